"""FSDP's gradients reduced after every micro-batch: what switches that off, and what it takes."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rules.communication import fsdp_no_sync
from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Prediction
from tests.analyzers.rules.communication.test_no_sync import accumulating
from tests.analyzers.rules.jobs import STEP_US, changed


def sharded(saves_us: float = 20_000.0, **settings: object) -> RuleContext:
    """FSDP with four micro-batches per step."""
    step_us = STEP_US - saves_us
    return changed(
        accumulating(**settings), strategy="fsdp",
        predict=lambda change: (
            Prediction(low=step_us, mid=step_us, high=step_us) if change == {"fsdp.no_sync": "true"} else None
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("recorded", "typed"),
    [
        ({"fsdp": {"version": 2}}, "model.set_requires_gradient_sync(number == len(batches))"),
        ({"fsdp": {"version": 1}}, "else model.no_sync():"),
        ({}, "model.set_requires_gradient_sync("),
        ({"fsdp": {"version": 2}, "accelerate": {"precision": "bf16"}}, "accelerator.accumulate"),
    ],
)
def test_fsdp_has_switches_of_its_own(recorded: dict[str, object], typed: str) -> None:
    finding = fsdp_no_sync.evaluate(sharded(**recorded))
    assert finding is not None
    assert (finding.rule, finding.whatif) == ("fsdp-no-sync", {"fsdp.no_sync": "true"})
    assert "each of 4 micro-batches" in finding.title
    assert typed in finding.action.how
    assert "more memory per rank" in (finding.action.costs or "")


def test_fsdp_is_silent_where_little_is_saved() -> None:
    assert fsdp_no_sync.evaluate(sharded(saves_us=4_900.0)) is None
