"""Loops over many tensors: what is said of them by where they are and what they call, and when nothing is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perfscope.analyzers.job.extra_work import LoopCost
from perfscope.analyzers.rank.loop_phases import OF_BATCH
from perfscope.analyzers.rules.host import optimizer_kernels, small_operators
from perfscope.results.findings import Finding, Prediction
from tests.analyzers.rules.jobs import STEP_US, breakdown, context

CLIPPING = LoopCost("the loop between backward and optimizer", 1200.0, 20_000.0, ("aten::linalg_vector_norm",))
AVERAGING = LoopCost("the loop between optimizer and forward", 480.0, 9_000.0, ("aten::mul_", "aten::add_"))
UPDATING = LoopCost("the optimizer's step or the loop around it", 900.0, 30_000.0, ("aten::mul_", "aten::sqrt"))
OPTIMIZER = LoopCost("the optimizer's step", 2400.0, 40_000.0, ("aten::mul_",))


def found(
    *loops: LoopCost,
    saved: float = 0.2,
    rule: Any = small_operators,
    devices: tuple[str, ...] = ("CPU",),
    **others: Any,
) -> Finding | None:
    step = Prediction(low=0.5 * STEP_US, mid=(1 - saved) * STEP_US, high=STEP_US)
    case = context(breakdown(0), breakdown(1), loops=loops, devices=devices, predict=lambda _: step, **others)
    finding: Finding | None = rule.evaluate(case)
    return finding


@pytest.mark.parametrize(
    ("loop", "typed"),
    [
        (CLIPPING, "clip_grad_norm_(model.parameters(), max_norm, foreach=True)"),
        (AVERAGING, "torch._foreach_lerp_(averages"),
        (UPDATING, "an optimizer of torch.optim, with fused=True"),
        (replace(CLIPPING, operators=("aten::item", "aten::detach", "aten::norm")), "value = loss.item()"),
    ],
)
def test_each_is_told_what_it_is_probably_for(loop: LoopCost, typed: str) -> None:
    finding = found(loop)
    assert finding is not None
    assert typed in finding.action.how
    assert "torch._foreach_mul_(tensors" in finding.action.how
    assert finding.whatif == {"loop.operators": "0"}
    assert loop.part.removeprefix("the ") in finding.title


def test_work_on_a_batch_is_compiled_or_left_to_the_loader() -> None:
    finding = found(LoopCost(OF_BATCH, 300.0, 9_000.0, ("aten::mul", "aten::clamp")))
    assert finding is not None
    assert finding.title.startswith("The preparation of the batch runs 300 small operators per step")
    assert "@torch.compile" in finding.action.how
    assert "parameters" not in finding.action.how


def test_the_costliest_is_named_and_all_are_evidence() -> None:
    finding = found(CLIPPING, AVERAGING)
    assert finding is not None
    assert finding.title == (
        "The loop between backward and optimizer runs 1,200 small operators per step, one after the other, in 20% of "
        "the step: aten::linalg_vector_norm"
    )
    assert [row.value for row in finding.evidence] == [1200.0, 20_000.0, 480.0, 9_000.0]


def test_on_devices_they_are_kernels() -> None:
    finding = found(CLIPPING, devices=("NVIDIA A100-SXM4-80GB",))
    assert finding is not None
    assert "1,200 small kernels" in finding.title


@pytest.mark.parametrize(("loops", "saved"), [((), 0.2), ((OPTIMIZER,), 0.2), ((CLIPPING,), 0.04)])
def test_near_misses(loops: tuple[LoopCost, ...], saved: float) -> None:
    assert found(*loops, saved=saved) is None


def test_on_cpus_an_optimizer_that_loops_is_to_be_fused() -> None:
    settings = {"optimizer": {"classes": ["AdamW"]}}
    finding = found(OPTIMIZER, rule=optimizer_kernels, settings=settings)
    assert finding is not None
    assert finding.title.startswith("The optimizer runs 2,400 small operators per step, one after the other, in 40% of")
    assert finding.whatif == {"optimizer.loops": "0"}
    assert found(CLIPPING, rule=optimizer_kernels) is None
    assert found(OPTIMIZER, rule=optimizer_kernels, saved=0.04) is None
