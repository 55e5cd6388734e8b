"""A rank that is slow in all steps and also pauses in some of them: in how many, and what either costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers.replay.stragglers.rows import _longest
from tests.analyzers.measured import advised
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import MS, Cause, Job, Model, Recording

SLOW = Cause("slow compute", 1.6, (1,))
PAUSE = Cause("pause", 15 * MS, (1,), every=3, how="log")


def job(*causes: Cause) -> Job:
    model = Model(blocks=4, tokens=4096)
    return Job(ranks=4, noise=0.005, item_every=1, model=model, recording=Recording(steps=9), causes=causes)


def test_the_cost_of_steps_with_a_pause_is_told_beside_that_of_the_others(tmp_path: Path) -> None:
    emulation = emulate(job(SLOW, PAUSE))
    emulation.write(tmp_path)
    summary = advised(tmp_path)
    (row,) = summary.stragglers
    assert (row.ranks, len(row.steps), len(row.longest_steps)) == ((1,), 9, 3)
    assert {step % 3 for step in row.longest_steps} == {row.longest_steps[0] % 3}
    slow_us = (step_ns(job(SLOW)) - step_ns(job())) / 1e3
    assert row.longest_us == pytest.approx(slow_us + PAUSE.value / 1e3, rel=0.1)
    title = next(finding.title for finding in summary.findings if finding.rule == "straggling-rank")
    share = row.lost_us / summary.job.step_time_us
    assert f"waiting for it costs {share:.0%} of the time (" in title
    assert "in one of every 3 steps, " in title


def test_a_rank_that_is_as_slow_in_all_steps_costs_each(tmp_path: Path) -> None:
    emulate(job(SLOW)).write(tmp_path)
    summary = advised(tmp_path)
    assert summary.stragglers[0].longest_steps == ()
    assert summary.findings[0].title.endswith("of each step")


@pytest.mark.parametrize(
    ("cost", "longest"),
    [
        ([46, 100, 45, 21, 110, 31, 37, 99], [1, 4, 7]),
        ([40, 100, 70, 20, 110, 31, 50, 99], []),  # anything between
        ([50, 95, 50, 50, 95, 50, 50, 95], []),  # less than twice
        ([5, 5, 60, 5, 5, 5], []),  # once
        ([90, 90, 20, 90, 90, 20], []),  # most of them
        ([-3, 60, -5, 55], [1, 3]),
    ],
)
def test_steps_that_stand_out(cost: list[int], longest: list[int]) -> None:
    assert np.flatnonzero(_longest(np.array(cost))).tolist() == longest
