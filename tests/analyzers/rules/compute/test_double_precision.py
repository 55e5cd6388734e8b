"""Double precision: told where nearly all matrix products compute in it."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rules.compute import double_precision
from perfscope.results.tables import OperatorRow
from tests.analyzers.rules.jobs import breakdown, context


def product(dtype: str, us: float, *, on_host: bool, name: str = "aten::mm") -> OperatorRow:
    return OperatorRow(
        name=name, operator_class="matrix", count_per_step=4.0, kernels_per_step=4.0,
        device_us_per_step=0.0 if on_host else us, host_us_per_step=us if on_host else 9.0,
        flops_per_step=None, tflops=None, share_of_peak=None, dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("device", "saved_us"), [("CPU", 45_000.0), ("NVIDIA A100-SXM4-80GB", 70_000.0)], ids=["half", "all products"]
)
def test_float32_saves_half_or_what_a_device_takes_for_float64(device: str, saved_us: float) -> None:
    """Of 100 ms 80 compute, 70 of these in products, and 10 are exposed transfer."""
    ranks = [breakdown(rank, exposed_comm_transfer=10_000.0, idle_host=10_000.0) for rank in (0, 1)]
    rows = (product("float64", 70_000.0, on_host=device == "CPU"),)
    finding = double_precision.evaluate(context(*ranks, operators=rows, devices=(device,)))
    assert finding is not None
    assert finding.title == "Matrix products in float64 take 70% of the step: float32 moves half the bytes"
    assert finding.ceiling == pytest.approx(100_000.0 / (100_000.0 - saved_us) - 1)
    assert "model = model.float()" in finding.action.how


@pytest.mark.parametrize(
    "rows",
    [
        (product("float32", 70_000.0, on_host=False),),
        (product("float64", 4_000.0, on_host=False),),
        # A part of the model that needs it.
        (product("float64", 20_000.0, on_host=False), product("float32", 20_000.0, on_host=False, name="aten::bmm")),
    ],
)
def test_other_precisions_and_parts_of_a_model_are_silent(rows: tuple[OperatorRow, ...]) -> None:
    assert double_precision.evaluate(context(breakdown(0), operators=rows)) is None
