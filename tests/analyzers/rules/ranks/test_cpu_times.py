"""A rank whose thread takes more CPU time than the others' in steps without the profiler."""

from __future__ import annotations

import random
from typing import Any

import pytest

from perfscope.analyzers.rules.ranks import cpu_times
from perfscope.recording.metadata import RunMetadata, StepsMetadata
from perfscope.results.findings import Finding
from perfscope.results.rows import StragglerRow
from tests.analyzers.rules.jobs import STEP_US, breakdown, context

SLOW = StragglerRow(rank=0, cause="host", lost_us=0.06 * STEP_US, confidence="high", ranks=(0,))


def found(*means_ms: float, varies: float = 0.05, steps: int = 30, **others: Any) -> Finding | None:
    """Ranks whose threads take so long per step of 80 ms, more and less by ``varies``; in one step a checkpoint."""
    draw, runs = random.Random(7), {}
    for rank, mean in enumerate(means_ms):
        took = [round(mean * 1e6 * draw.uniform(1 - varies, 1 + varies)) for _ in range(steps - 1)]
        runs[rank] = RunMetadata(rank=rank, steps=StepsMetadata(unprofiled_thread_ns=(*took, 2 * 10**9 * (rank == 0))))
    known = {"devices": ("CPU",), "unprofiled_step_us": 80_000.0, "runs": runs, **others}
    return cpu_times.evaluate(context(*map(breakdown, range(len(means_ms))), **known))


def test_the_rank_that_runs_longer_is_named() -> None:
    """40 ms, and 53 on rank 1: at most 13 of 80 ms are waited for it."""
    finding = found(40, 53)
    assert finding is not None
    assert finding.title.startswith("Rank 1's training thread takes 1.")
    assert finding.gain(STEP_US) == pytest.approx(80 / (80 - 13) - 1, abs=0.06)
    assert found(40, 53, 40, 41) is not None


@pytest.mark.parametrize(
    "finding",
    [
        found(40, 46),
        found(40, 53, varies=0.95),
        found(40, 53, steps=9),
        found(40, 53, devices=("NVIDIA A100-SXM4-80GB",)),
        found(40, 53, stragglers=(SLOW,)),
        found(40, 53, unprofiled_step_us=None),
        found(53),
    ],
    ids=["little", "by chance", "few steps", "on devices", "a straggler is told", "no such step", "alone"],
)
def test_near_misses(finding: Finding | None) -> None:
    assert finding is None
