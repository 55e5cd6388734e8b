"""Copies of batches from pinned memory, on the stream of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfscope.analyzers.rules.memory import batch_copies
from tests.analyzers.rules.bare import Bare, found
from tests.analyzers.rules.jobs import breakdown, context, kernel, runs

PINNED, PAGEABLE, BACK = (
    "Memcpy HtoD (Pinned -> Device)",
    "Memcpy HtoD (Pageable -> Device)",
    "Memcpy DtoH (Device -> Pinned)",
)
ZERO = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}


def copying(us: float = 16_000.0, exposed: float = 16_000.0, name: str = PINNED, back_us: float = 0.0, **others):
    """``others`` are fields of the kernels' row, or of the context."""
    count = others.pop("count_per_step", 2.0)
    copy = {"category": "copy", "operator_class": "copy"}
    rows = (kernel(name, us, count_per_step=count, **copy), kernel(BACK, back_us, **copy))
    return context(breakdown(0, exposed_copy=exposed), kernels=rows, **others)


def test_a_step_that_begins_with_a_copy_is_shorter_with_one_that_comes_earlier(tmp_path: Path) -> None:
    job = Bare(copy_us=4_000.0)
    summary = job.analyze(tmp_path)
    finding = found(summary, batch_copies.RULE)
    assert finding is not None
    assert finding is summary.findings[0]
    assert finding.ceiling == pytest.approx(job.step_us / Bare().step_us - 1, rel=0.01)
    assert "torch.cuda.Stream()" in finding.action.how
    assert "non_blocking=True" in finding.action.how


def test_no_more_than_the_copies_is_saved():
    finding = batch_copies.evaluate(copying(us=12_000.0))
    assert finding is not None
    assert finding.ceiling == pytest.approx(100 / 88 - 1)


@pytest.mark.parametrize(
    "job",
    [
        copying(exposed=9_900.0),
        copying(name=PAGEABLE),
        copying(back_us=8_100.0),
        copying(count_per_step=17.0),
        copying(runs=runs(1, deepspeed={"config": ZERO, **ZERO})),
    ],
    ids=["hidden", "pageable", "as much goes back", "many", "offloaded"],
)
def test_silent(job):
    assert batch_copies.evaluate(job) is None
