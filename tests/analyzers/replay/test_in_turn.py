"""Ranks with the same work that pause in turn: one straggler that rotates, also where there are only two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.replay.job_replay import core_waits
from perfscope.recording.metadata import CaptureMetadata, RunMetadata
from tests.analyzers.job.pipelines.pipeline_jobs import compared
from tests.analyzers.measured import measured
from tests.emulator import Cause, Job, Model, Recording, emulate
from tests.generator import cpu_job


def job(ranks: int, *offsets: int) -> tuple[Job, float]:
    """Each rank pauses in every so many steps as there are ranks, this many steps later; and the step without, ns."""
    healthy = Job(
        strategy="ddp", ranks=ranks, ranks_per_host=ranks, noise=0.03, item_every=1,
        model=Model(blocks=2, tokens=8192, width=512), recording=Recording(steps=8),
    )  # fmt: skip
    step_ns = emulate(healthy).step_ns
    pauses = [
        Cause("pause", int(0.25 * step_ns), (rank,), every=ranks, offset=offset, how="log")
        for rank, offset in enumerate(offsets)
    ]
    return replace(healthy, causes=tuple(pauses)), step_ns


def test_two_ranks_that_pause_in_turn_rotate(tmp_path: Path) -> None:
    planted, healthy_ns = job(2, 0, 1)
    emulation = emulate(planted)
    emulation.write(tmp_path)
    (row,) = measured(tmp_path).stragglers
    assert (row.pattern, row.cause, row.ranks) == ("rotating", "host", (0, 1))
    lost_ns = emulation.step_ns - healthy_ns
    assert row.lost_us * 1e3 == pytest.approx(lost_ns, abs=0.05 * emulation.step_ns)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> AlignedJob:
    """Four ranks on CPUs."""
    _, replayed = compared(cpu_job(steps=3), tmp_path_factory.mktemp("cpu"))
    return replayed.result


def recorded(rank: int, first_step: int, waited_ns: tuple[int, ...]) -> RunMetadata:
    """A rank whose only capture has these waits for a core."""
    last = first_step + len(waited_ns) - 1
    file = f"rank-{rank:05d}.capture-0.trace.json.gz"
    capture = CaptureMetadata(file=file, first_step=first_step, last_step=last, waited_ns=waited_ns)
    return RunMetadata(rank=rank, captures=(capture,))


def test_waits_for_cores_are_those_of_the_used_steps(result: AlignedJob) -> None:
    first, used = int(result.steps[0]), len(result.steps)
    runs = {rank: recorded(rank, first - 1, (9, *range(used), 9)) for rank in result.partials}
    waits = core_waits(0, runs, result)
    assert all(np.array_equal(waits[rank], range(used)) for rank in result.partials)
    assert core_waits(None, runs, result) == {}
    assert core_waits(0, {**runs, 2: recorded(2, first, (1,) * (used - 1))}, result) == {}
    assert core_waits(0, {rank: run for rank, run in runs.items() if rank}, result) == {}
