"""Strategies with causes planted on 8 ranks, some on 64: the straggler, its cost, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfscope.results.rows import StragglerRow
from perfscope.results.summary import Summary
from tests.analyzers.measured import advised
from tests.generator import TENSORBOARD, Job, simulate
from tests.planted.jobs import Expected, Planted, jobs

WORTH_FINDING = 0.05
"""Share of the step from which a cause must be found."""

EVERYWHERE = (
    "healthy",
    "slow host",
    "slow rank, clocks apart",
    "loader stalls on one rank",
    "collector pauses in turn",
)
IN_STAGES = (*EVERYWHERE, "slow rank", "slow stage", "slow rank and pauses on another")
"""Pipelines take several seconds each."""
ON_64 = ("ddp on 64: slow host", "ddp on 64: clocks apart")
"""The whole table, with pipelines of 64 ranks, takes minutes: ``python -m tests.benchmarks.planted``."""


def _is_small(job: Planted) -> bool:
    layout, cause = job.name.split(": ")
    return layout == "ddp on 8" or cause in (IN_STAGES if layout == "1f1b on 8" else EVERYWHERE)


SMALL = tuple(job for job in jobs(8) if _is_small(job))
LARGE = tuple(job for job in jobs(64) if job.name in ON_64)


@pytest.mark.scale
@pytest.mark.parametrize("planted", SMALL + LARGE, ids=lambda planted: planted.name)
def test_the_straggler_is_reported_with_its_cost_and_no_other_rank_is(planted: Planted, tmp_path: Path) -> None:
    job = simulate(planted.spec)
    job.write(tmp_path, file_template=TENSORBOARD)
    summary = advised(tmp_path)
    # Clocks that run at different speeds leave some 10 ppm.
    assert summary.replay.error == pytest.approx(0.0, abs=1e-4)
    assert summary.job.step_time_us == pytest.approx(job.truth.step_time_ns / 1e3, rel=0.001)
    for row in summary.time_breakdown:
        assert row.idle_unknown_us <= 0.02 * row.step_time_us
    assert sum(row.us for row in summary.critical_path or ()) == pytest.approx(summary.job.step_time_us)
    check_attribution(job, planted, summary)
    serious = {finding.rule for finding in summary.findings if finding.severity in ("high", "medium")}
    if planted.rule is not None:
        assert planted.rule in serious
    elif not planted.attributed:
        assert serious <= {"pipeline-bubble"}  # a schedule's own, however healthy the ranks are
        assert summary.verdict.healthy or serious


def check_attribution(job: Job, planted: Planted, summary: Summary) -> None:
    """Everyone planted who costs 5 % of the step is found at the right cost, the costliest first, and nobody else."""
    costs = {expected: job.lost_ns(cause) / 1e3 for cause, expected in planted.attributed}
    step = job.truth.step_time_ns / 1e3
    due = sorted(
        ((cost, expected) for expected, cost in costs.items() if cost >= WORTH_FINDING * step), key=lambda d: d[0]
    )
    for row in summary.stragglers:
        assert any(_is(row, expected) for expected in costs), f"{row.rank} is reported for {row.cause}"
    for cost, expected in due:
        (row,) = [row for row in summary.stragglers if _is(row, expected)]
        if row.causes:  # ranks that hide each other are one straggler
            together = [cause for cause, who in planted.attributed if _is(row, who)]
            assert row.lost_us == pytest.approx(job.lost_ns(*together) / 1e3, rel=0.05)
            assert row.alone_us[row.ranks.index(expected.ranks[0])] == pytest.approx(cost, rel=0.05)
            continue
        assert row.lost_us == pytest.approx(cost, rel=0.05)
        assert row.scope == expected.scope
        assert expected.pattern in (None, row.pattern)
    if due:
        assert _is(summary.stragglers[0], max(due, key=lambda entry: entry[0])[1])


def _is(row: StragglerRow, expected: Expected) -> bool:
    if row.causes:
        return any((rank, expected.cause) in zip(row.ranks, row.causes, strict=True) for rank in expected.ranks)
    if row.cause != expected.cause:
        return False
    if expected.scope in ("host", "stage"):
        return row.ranks == expected.ranks
    return row.rank in expected.ranks
