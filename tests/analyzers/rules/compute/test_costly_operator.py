"""One operator that takes much of the step: which are told, and what else would do."""

from __future__ import annotations

from typing import Any

import pytest

from perfscope.analyzers.rules.compute import costly_operator
from perfscope.results.findings import Finding
from perfscope.results.tables import OperatorRow
from tests.analyzers.rules.jobs import STEP_US, breakdown, context


def operator(name: str, share: float, kind: str = "other", *, device: bool = False, **others: Any) -> OperatorRow:
    """It takes that share of the step: of a device, else of the host."""
    values: dict[str, Any] = {
        "count_per_step": 1.0, "device_us_per_step": share * STEP_US if device else 0.0,
        "host_us_per_step": 5.0 if device else share * STEP_US, "kernels_per_step": 0.0, "flops_per_step": None,
        "tflops": None, "share_of_peak": None, "dtype": None,
    }  # fmt: skip
    return OperatorRow(name=name, operator_class=kind, **{**values, **others})


def found(*rows: OperatorRow, **others: Any) -> Finding | None:
    return costly_operator.evaluate(
        context(breakdown(0), breakdown(1), operators=rows, **{"devices": ("CPU",), **others})
    )


@pytest.mark.parametrize(
    ("name", "kind", "how"),
    [
        ("aten::sort", "reduction", "torch.topk(scores, k=8)"),
        ("aten::copy_", "copy", ".double(), .float(), .half()"),
        ("aten::_unique2", "other", "depends on the data"),
        ("aten::histc", "other", "mostly for a log"),
        ("aten::index_put_", "other", "Sorted indices"),
        ("aten::cat", "copy", "made once, instead of joining parts"),
        ("aten::normal_", "other", "Draw random numbers"),
        ("torchvision::nms", "other", "a cheaper operator for the same"),
    ],
)
def test_it_is_named_with_what_else_would_do(name: str, kind: str, how: str) -> None:
    finding = found(operator("aten::mm", 0.5, "matrix"), operator(name, 0.3, kind))
    assert finding is not None
    assert finding.title == f"{name} takes 30% of the step (1 call per step)"
    assert how in finding.action.how
    assert "perfscope run --stacks" in finding.action.how or "with_stack=True" in finding.action.how
    assert finding.gain(STEP_US) == pytest.approx(1 / 0.7 - 1)


def test_who_calls_it_is_told() -> None:
    finding = found(operator("aten::sort", 0.3, "reduction", called_by="aten::quantile", function="train.py(11): hook"))
    assert finding is not None
    assert finding.title == "aten::sort takes 30% of the step (1 call per step, within aten::quantile)"
    assert "mostly for a log" in finding.action.how
    assert finding.action.how.endswith("aten::quantile calls it, in hook (train.py:11).")


def test_on_devices_their_work_counts_and_known_lines_are_told() -> None:
    a100 = ("NVIDIA A100-SXM4-80GB",)
    finding = found(operator("aten::sort", 0.4, "reduction", device=True, lines=("model.py:7",)), devices=a100)
    assert finding is not None
    assert finding.title.startswith("aten::sort takes 40% of the step")
    assert finding.action.how.endswith("It is called in model.py:7.")
    assert found(operator("aten::sort", 0.4, "reduction"), devices=a100) is None


@pytest.mark.parametrize(
    ("name", "share", "kind"),
    [
        ("aten::sort", 0.19, "reduction"),
        ("aten::mm", 0.6, "matrix"),
        ("aten::native_batch_norm", 0.3, "normalisation"),
        ("aten::mul", 0.3, "elementwise"),
        ("aten::fill_", 0.5, "other"),
        ("SegSumBackward", 0.3, "other"),
        ("aten::mkldnn_rnn_layer_backward", 0.3, "other"),
        ("c10d::allreduce_", 0.3, "other"),
    ],
    ids=[
        "little",
        "a layer",
        "a normalization",
        "arithmetic",
        "told by another rule",
        "a function",
        "a layer's backward",
        "communication",
    ],
)
def test_near_misses(name: str, share: float, kind: str) -> None:
    assert found(operator(name, share, kind)) is None
