"""Filled tensors: found by the operators that fill, on the device or on the CPU."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rules.compute import filled_tensors
from perfscope.results.findings import Obtained
from perfscope.results.tables import OperatorRow
from tests.analyzers.rules.jobs import breakdown, context


def operator(name: str, *, device_us: float = 0.0, host_us: float = 0.0, count: float = 14.0) -> OperatorRow:
    return OperatorRow(
        name=name, operator_class="elementwise", count_per_step=count, kernels_per_step=0.0,
        device_us_per_step=device_us, host_us_per_step=host_us,
        flops_per_step=None, tflops=None, share_of_peak=None, dtype=None,
    )  # fmt: skip


@pytest.mark.parametrize(("device", "of"), [("NVIDIA A100-SXM4-80GB", "device_us"), ("CPU", "host_us")])
def test_what_filling_takes_is_a_bound(device: str, of: str) -> None:
    """25 + 15 ms of 100."""
    rows = (operator("aten::mm", **{of: 50_000.0}), operator("aten::fill_", **{of: 25_000.0}))
    rows += (operator("aten::zero_", **{of: 15_000.0}, count=3.0),)
    finding = filled_tensors.evaluate(context(breakdown(0), breakdown(1), operators=rows, devices=(device,)))
    assert finding is not None
    assert finding.title == "Filling tensors with one value takes 40% of the step: 14 aten::fill_ per step"
    assert finding.obtained is Obtained.BOUNDED
    assert finding.ceiling == pytest.approx(100 / 60 - 1)
    assert [each.value for each in finding.evidence] == [25_000.0, 14.0, 15_000.0, 3.0]
    assert "zero_grad(set_to_none=True)" in finding.action.how


@pytest.mark.parametrize(
    "rows",
    [
        (operator("aten::fill_", device_us=9_000.0),),
        (operator("aten::fill_", host_us=90_000.0),),  # the host's time is none of the device's
        (operator("aten::copy_", device_us=90_000.0),),
        (),
    ],
)
def test_little_filling_and_other_operators_are_silent(rows: tuple[OperatorRow, ...]) -> None:
    assert filled_tensors.evaluate(context(breakdown(0), operators=rows)) is None
