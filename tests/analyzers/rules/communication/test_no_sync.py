"""``no_sync``: fires where reductions after every micro-batch cost time, as each framework writes its accumulation."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rules.communication import no_sync
from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Confidence, Obtained, Prediction
from tests.analyzers.rules.jobs import STEP_US, breakdown, changed, context, runs


def accumulating(saves_us: float = 20_000.0, **settings: object) -> RuleContext:
    """Four micro-batches per step; with one reduction per step it takes ``saves_us`` less."""
    step_us = STEP_US - saves_us
    return context(
        breakdown(0, exposed_comm_transfer=30_000.0), breakdown(1, exposed_comm_transfer=30_000.0),
        microbatches=4, runs=runs(2, **settings) if settings else {},
        predict=lambda change: (
            Prediction(low=step_us, mid=step_us, high=step_us) if change == {"ddp.no_sync": "true"} else None
        ),
    )  # fmt: skip


def test_fires_with_what_once_per_step_saves() -> None:
    finding = no_sync.evaluate(accumulating())
    assert finding is not None
    assert "each of 4 micro-batches" in finding.title
    assert (finding.obtained, finding.confidence) == (Obtained.REPLAYED, Confidence.HIGH)
    assert finding.ceiling == pytest.approx(100 / 80 - 1)
    assert finding.whatif == {"ddp.no_sync": "true"}
    assert "else model.no_sync():" in finding.action.how


@pytest.mark.parametrize(
    ("framework", "typed"),
    [
        ("accelerate", "accelerator.accumulate"),
        ("lightning", "Trainer("),
        ("transformers", "gradient_accumulation_steps=4"),
    ],
)
def test_the_framework_s_own_accumulation(framework: str, typed: str) -> None:
    finding = no_sync.evaluate(accumulating(**{framework: {"precision": "bf16"}}))
    assert finding is not None
    assert typed in finding.action.how


def test_fabric_has_a_loop_of_the_user_s_own() -> None:
    finding = no_sync.evaluate(accumulating(lightning={"fabric": True}))
    assert finding is not None
    assert "with fabric.no_backward_sync(model, enabled=number < 4):" in finding.action.how


def test_silent_where_little_is_saved_or_nothing_can_be_replayed() -> None:
    assert no_sync.evaluate(accumulating(saves_us=4_900.0)) is None
    assert no_sync.evaluate(changed(accumulating(), predict=None)) is None
    assert no_sync.evaluate(changed(accumulating(), strategy="fsdp")) is None, "what FSDP would save is not known"
    assert no_sync.evaluate(accumulating(ddp={"implementation": "horovod"})) is None
    unmarked = changed(accumulating(), steps=())
    assert no_sync.evaluate(unmarked) is None, "what seem to be micro-batches may be steps"
