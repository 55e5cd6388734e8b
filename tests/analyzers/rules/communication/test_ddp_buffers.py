"""Buffers that DDP sends before each forward: what switches that off in each framework."""

from __future__ import annotations

from typing import Any

import pytest

from perfscope.analyzers.rules.communication import ddp_buffers
from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Prediction
from tests.analyzers.rules.jobs import STEP_US, breakdown, context, runs


def sending(saves_us: float = 20_000.0, broadcast_buffers: bool = True, **settings: Any) -> RuleContext:
    """Two ranks under DDP."""
    step_us = STEP_US - saves_us
    return context(
        *(breakdown(rank, exposed_comm_transfer=30_000.0) for rank in range(2)), strategy="ddp",
        runs=runs(2, ddp={"broadcast_buffers": broadcast_buffers}, **settings),
        predict=lambda change: (
            Prediction(low=step_us, mid=step_us, high=step_us) if change == {"ddp.broadcast_buffers": "false"} else None
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "typed"),
    [
        ({}, "DistributedDataParallel(model, broadcast_buffers=False)"),
        ({"transformers": {"bf16": True}}, "TrainingArguments(output_dir, ddp_broadcast_buffers=False)"),
        ({"accelerate": {"mixed_precision": "no"}}, "DistributedDataParallelKwargs(broadcast_buffers=False)"),
        ({"lightning": {"precision": "32-true"}}, "DDPStrategy(broadcast_buffers=False)"),
    ],
)
def test_each_framework_has_its_way(settings: dict[str, Any], typed: str) -> None:
    finding = ddp_buffers.evaluate(sending(**settings))
    assert finding is not None
    assert "costs 20% of the step" in finding.title
    assert typed in finding.action.how
    assert "average them before the model is saved" in finding.action.how


def test_it_is_silent_where_they_are_not_sent_or_little_is_saved() -> None:
    assert ddp_buffers.evaluate(sending(broadcast_buffers=False)) is None
    assert ddp_buffers.evaluate(sending(saves_us=4_900.0)) is None
