"""A slow pipeline stage where no message names its peer and the hosts' clocks are apart: nobody is seen to wait."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.analyzers.measured import advised, measured
from tests.generator import MS, PipelineSpec, SlowCompute, simulate
from tests.planted.jobs import pipeline

HEALTHY = replace(
    pipeline(8),
    ranks_per_host=2,
    microbatches=4,
    noise=0.0,
    schedule=PipelineSpec(schedule="interleaved", chunks=2, coalesced=True, peers=False),
    host_clock_offsets_ns={0: 2 * MS, 1: -MS, 2: MS, 3: -2 * MS},
)


def test_a_slow_stage_costs_at_most_what_it_takes_longer(tmp_path: Path) -> None:
    slow = SlowCompute(ranks=HEALTHY.ranks_of_stage(2), factor=1.4)
    job = simulate(replace(HEALTHY, causes=(slow,)))
    job.write(tmp_path)
    summary = advised(tmp_path)
    assert "messages_unpaired" in {note.kind for note in summary.notes}
    (row,) = summary.stragglers
    assert (row.ranks, row.cause, row.replayed, row.confidence) == (slow.ranks, "compute", False, "low")
    lost_us = job.lost_ns(slow) / 1e3
    assert lost_us <= row.lost_us == pytest.approx(lost_us, rel=0.25)
    finding = next(one for one in summary.findings if one.rule == "straggling-rank")
    assert "costs up to" in finding.title
    assert finding.predicted_step_us is not None
    assert finding.predicted_step_us.high == pytest.approx(summary.job.step_time_us)


def test_a_rank_slower_than_those_of_its_stage_costs_at_most_what_it_takes_longer(tmp_path: Path) -> None:
    """Its delay is why the messages of its neighbours do not fit together: a third of its own are without other end."""
    slow = SlowCompute(ranks=(9,), factor=1.3)
    job = simulate(replace(HEALTHY, ranks=16, ranks_per_host=4, causes=(slow,)))
    job.write(tmp_path)
    (row,) = measured(tmp_path).stragglers
    assert (row.scope, row.ranks, row.cause, row.replayed) == ("rank", (9,), "compute", False)
    lost_us = job.lost_ns(slow) / 1e3
    assert lost_us <= row.lost_us == pytest.approx(lost_us, rel=0.25)


def test_healthy_stages_are_not_accused(tmp_path: Path) -> None:
    simulate(replace(HEALTHY, noise=0.02)).write(tmp_path)
    assert measured(tmp_path).stragglers == ()
