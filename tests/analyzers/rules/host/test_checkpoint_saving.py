"""Checkpoints that all ranks save together, and those of one rank that the others wait for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.host import checkpoint_saving
from perfscope.results.findings import Finding
from perfscope.results.rows import StragglerRow
from tests.analyzers.rules.jobs import breakdown, changed, context
from tests.analyzers.rules.ranks.test_straggling_rank import steps

EVERY_FOURTH = (0.0, 0.0, 0.0, 60_000.0) * 2
ALONE = StragglerRow(rank=0, cause="host", lost_us=14_000.0, confidence="high", ranks=(0,))


def saving(*per_rank: tuple[float, ...], stragglers: tuple[StragglerRow, ...] = ()) -> RuleContext:
    """Eight steps of 100 ms."""
    each = {rank: replace(steps(0.0), saving_us=us) for rank, us in enumerate(per_rank)}
    return context(*map(breakdown, each), per_step=each, stragglers=stragglers)


def told(job: RuleContext) -> Finding:
    finding = checkpoint_saving.evaluate(job)
    assert finding is not None
    return finding


def test_all_ranks_save_in_two_of_eight_steps() -> None:
    finding = told(saving(EVERY_FOURTH, EVERY_FOURTH))
    assert finding.title == "Saving checkpoints takes 15% of the time, in 2 of 8 steps"
    assert finding.ceiling == pytest.approx(100 / 85 - 1)
    assert "async_save" in finding.action.how


def test_a_rank_that_is_slow_by_something_else_hides_nothing() -> None:
    told(saving(EVERY_FOURTH, EVERY_FOURTH, stragglers=(replace(ALONE, cause="compute"),)))
    told(saving(EVERY_FOURTH, EVERY_FOURTH, stragglers=(ALONE,)))  # it saves for no longer than the other


@pytest.mark.parametrize(
    "job",
    [
        saving((0.0,) * 8, (0.0,) * 8),
        saving((0.0,) * 7 + (30_000.0,), (0.0,) * 7 + (30_000.0,)),
        saving(EVERY_FOURTH, (0.0,) * 8, (0.0,) * 8),
        saving(EVERY_FOURTH, (0.0,) * 8, stragglers=(ALONE,)),
        context(breakdown(0)),
    ],
    ids=["none", "little", "one of three ranks", "a straggler's", "no steps"],
)
def test_silent(job: RuleContext) -> None:
    assert checkpoint_saving.evaluate(job) is None


def test_a_rank_that_saves_alone_costs_what_the_others_wait() -> None:
    """As where threads wait for cores, so that no straggler is named: 15 ms per step, of which the others wait 12."""
    case = saving(EVERY_FOURTH, (0.0,) * 8)
    case = changed(case, time_breakdown=(breakdown(0), breakdown(1, exposed_comm_wait=12_000.0)))
    finding = told(case)
    assert finding.title == "Saving checkpoints takes 12% of the time, in 2 of 8 steps, on rank 0 alone"
    assert finding.ceiling == pytest.approx(100 / 88 - 1)
