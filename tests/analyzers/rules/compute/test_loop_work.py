"""Work of the training loop beside the training: what is said of it by where it is, and when another finding is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perfscope.analyzers.job.extra_work import LoopCost, LoopWorkCost
from perfscope.analyzers.rank.extra.loop_work import HOOKS
from perfscope.analyzers.rank.extra.model_loops import LOOPS
from perfscope.analyzers.rank.host_activity import BETWEEN
from perfscope.analyzers.rank.loop_phases import OF_BATCH, OF_GRADIENTS
from perfscope.analyzers.rules import evaluate
from perfscope.analyzers.rules.compute import loop_work
from perfscope.results.findings import Finding, Prediction
from tests.analyzers.rules.jobs import STEP_US, breakdown, context

ROLLOUT = LoopWorkCost(BETWEEN, 0.6 * STEP_US, 64.0, ("aten::linear", "aten::tanh"), of_model=True)
METRICS = LoopWorkCost(BETWEEN, 0.2 * STEP_US, 0.0, ("aten::histc", "aten::item"), of_model=False)


def found(*work: LoopWorkCost, **others: Any) -> Finding | None:
    return loop_work.evaluate(context(breakdown(0), breakdown(1), loop_work=work, **others))


@pytest.mark.parametrize(
    ("work", "title", "how"),
    [
        (
            LoopWorkCost(LOOPS, 0.4 * STEP_US, 0.0, ("SegSumBackward", "aten::select"), of_model=True),
            "Loops of the model take 40% of the step: SegSumBackward, aten::select",
            "operators on whole tensors",
        ),
        (
            ROLLOUT,
            "optimizer and forward takes 60% of the step: 64 forwards without gradients; aten::linear, aten::tanh",
            "more samples at once",
        ),
        (replace(ROLLOUT, forwards=0.0), "takes 60% of the step: aten::linear, aten::tanh", "more samples at once"),
        (METRICS, "takes 20% of the step: aten::histc, aten::item", "perfscope run --stacks"),
        (
            replace(METRICS, operators=("aten::randn", "aten::to")),
            "aten::randn, aten::to",
            "collate_fn of a DataLoader",
        ),
        (replace(METRICS, part=OF_GRADIENTS), "backward and optimizer takes 20%", "has to be done in each step"),
        (replace(METRICS, part=OF_BATCH), "The preparation of the batch takes 20%", "collate_fn of a DataLoader"),
        (
            replace(METRICS, part=HOOKS),
            "Hooks of the backward take 20% of the step: aten::",
            "_foreach_norm",
        ),
    ],
)
def test_it_is_told_what_runs_there_and_where(work: LoopWorkCost, title: str, how: str) -> None:
    finding = found(work)
    assert finding is not None
    assert title in finding.title
    assert how in finding.action.how
    assert finding.predicted_step_us is None
    assert finding.gain(STEP_US) == pytest.approx(1 / (1 - work.us / STEP_US) - 1)


def test_the_longest_is_named_and_all_are_evidence() -> None:
    finding = found(ROLLOUT, replace(METRICS, part=HOOKS))
    assert finding is not None
    assert [row.value for row in finding.evidence] == [0.6 * STEP_US, 64.0, 0.2 * STEP_US]


@pytest.mark.parametrize(
    ("part", "saved", "fires"), [(OF_GRADIENTS, 0.15, False), (OF_GRADIENTS, 0.08, True), (BETWEEN, 0.08, False)]
)
def test_not_where_loops_over_tensors_are_most_of_it(part: str, saved: float, fires: bool) -> None:
    """``small-operators`` says what to call instead; of the same part of the loop in any case."""
    loop = LoopCost(part, 500.0, 0.2 * STEP_US, ("aten::mul_",))
    step = Prediction(low=0.5 * STEP_US, mid=(1 - saved) * STEP_US, high=STEP_US)
    case = context(breakdown(0), breakdown(1), loop_work=(METRICS,), loops=(loop,), devices=("CPU",))
    findings = evaluate(replace(case, predict=lambda _: step))
    assert {finding.rule for finding in findings} >= {"small-operators"}
    assert any(finding.rule == loop_work.RULE for finding in findings) is fires


@pytest.mark.parametrize("work", [(), (replace(METRICS, us=0.09 * STEP_US),)])
def test_near_misses(work: tuple[LoopWorkCost, ...]) -> None:
    assert found(*work) is None
