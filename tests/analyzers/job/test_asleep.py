"""What training threads sleep outside communication and loading, from the CPU time that their ranks recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.asleep import slept_between_ns
from perfscope.recording.metadata import CpuMetadata, DataLoaderMetadata, RunMetadata
from perfscope.results.categories import TimeCategory
from tests.analyzers.job.pipelines.pipeline_jobs import compared
from tests.generator import MS, cpu_job


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> AlignedJob:
    """Ranks on CPUs: a step is 40 ms in operators, 30 between them, 20 in the loader and 10 in communication."""
    _, replayed = compared(cpu_job(ranks=2, steps=3), tmp_path_factory.mktemp("cpu"))
    totals = {rank: np.zeros_like(each) for rank, each in replayed.result.totals.items()}
    for each in totals.values():
        each[:, TimeCategory.COMPUTE], each[:, TimeCategory.HOST] = 40 * MS, 30 * MS
        each[:, TimeCategory.DATALOADER], each[:, TimeCategory.COMM_WAIT] = 20 * MS, 10 * MS
    return replace(replayed.result, totals=totals)


def runs(ran_ms: int, waited_ms: int, more_ms: int = 0, threads: int = 1) -> dict[int, RunMetadata]:
    """Two ranks whose training threads ran and waited for a core so long in each of three steps, and were blocked for
    ``more_ms`` in none of them.
    """
    wall, ran, waited = 3 * 100 + more_ms, 3 * ran_ms, 3 * waited_ms
    cpu = CpuMetadata(steps=3, wall_ns=wall * MS, thread_ns=ran * MS, waited_ns=waited * MS)
    loader = DataLoaderMetadata(num_workers=1)
    return {rank: RunMetadata(rank=rank, cpu=cpu, dataloaders=(loader,), cpu_threads=threads) for rank in range(2)}


@pytest.mark.parametrize(
    ("recorded", "slept_ms"),
    [
        (runs(30, 15), 25),
        (runs(20, 10), 30),
        (runs(30, 40), 0),
        (runs(30, 15, more_ms=60), 25),
        (runs(30, 15, threads=2), 0),
        ({}, 0),
    ],
    ids=[
        "blocked 55, 30 of them elsewhere", "blocked 70", "blocked 30, which is all elsewhere",
        "and 60 more in a step that is not used", "threads wait for one another", "not recorded",
    ],
)  # fmt: skip
def test_what_is_blocked_in_neither_communication_nor_loading_is_slept(
    result: AlignedJob, recorded: dict[int, RunMetadata], slept_ms: int
) -> None:
    slept = slept_between_ns(result, recorded)
    assert {rank: slept.get(rank, 0) for rank in range(2)} == pytest.approx({0: slept_ms * MS, 1: slept_ms * MS})
