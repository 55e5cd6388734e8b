"""What ranks need of the cores that they share, by hand."""

from __future__ import annotations

import pytest

from perfscope.analyzers.job.cores import CoresNeeded, cores_needed
from perfscope.recording.metadata import CpuMetadata, RunMetadata

MS = 1_000_000


def ranks(*cpu_ms: float, cores: int = 2, waited_ms: float = 0.0, wall_ms: float = 200.0) -> dict[int, RunMetadata]:
    """Ranks of one host; ``cpu_ms`` of each per step."""
    return {
        rank: RunMetadata(
            rank=rank,
            host="node",
            local_world_size=len(cpu_ms),
            cpu_count=cores,
            cpu_threads=1,
            cpu=CpuMetadata(
                cores=f"0-{cores - 1}",
                steps=10,
                wall_ns=round(10 * wall_ms * MS),
                process_ns=round(10 * ms * MS),
                thread_ns=round(10 * ms * MS),
                waited_ns=round(10 * waited_ms * MS),
            ),
        )
        for rank, ms in enumerate(cpu_ms)
    }


def test_four_ranks_that_compute_at_once_share_two_cores() -> None:
    needed = cores_needed(ranks(30, 30, 30, 30), (1,))
    assert needed.least_ns == pytest.approx(60 * MS)
    assert needed.contended_ns == pytest.approx(60 * MS)


def test_cores_of_their_own_limit_nothing_but_the_longest() -> None:
    assert cores_needed(ranks(30, 30, cores=8)).least_ns == pytest.approx(7.5 * MS)


def test_a_rank_at_its_peers_pace_needs_what_they_do() -> None:
    assert cores_needed(ranks(30, 90), (1,)).least_ns == pytest.approx(30 * MS)
    assert cores_needed(ranks(30, 90)).least_ns == pytest.approx(60 * MS)


def test_other_processes_want_the_cores_too() -> None:
    """Each rank runs for 20 ms of 200 and waits for 20: twice as long as alone, on two cores. So of 4 threads that
    wanted them 1.2 are the ranks' own, on average (one of its own, and the other in a fifth of the time), 2.8 others.
    """
    needed = cores_needed(ranks(20, 20, waited_ms=20))
    assert needed.least_ns == pytest.approx(20 * MS)
    assert needed.contended_ns == pytest.approx(20 * MS * (2 + 2.8) / 2)


def test_without_cpu_times_nothing_is_known() -> None:
    runs = ranks(30, 30)
    del runs[1]  # another rank of the host is in the recording without its CPU time
    runs[1] = RunMetadata(rank=1, host="node", local_world_size=2, cpu_count=2, cpu=CpuMetadata(cores="0-1"))
    assert cores_needed(runs) == CoresNeeded(0.0, 0.0)
    assert cores_needed({}) == CoresNeeded(0.0, 0.0)
