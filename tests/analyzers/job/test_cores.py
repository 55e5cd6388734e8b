"""What ranks have of their hosts' cores, and what training and loading take of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perfscope.analyzers.job.cores import SharedCores, cores_of, demands, needed_ns, shared_cores
from perfscope.recording.metadata import CpuMetadata, DataLoaderMetadata, RunMetadata
from perfscope.results.system import HostRow, System

MS = 1_000_000


def run(rank: int, *, cores: str = "0-7", count: int = 8, local: int = 2, **changes: Any) -> RunMetadata:
    """A rank that trains for 70 ms of a core and loads for 30, in steps of 100 ms."""
    cpu = {"steps": 10, "wall_ns": 1000 * MS, "process_ns": 1000 * MS, "thread_ns": 1000 * MS, "waited_ns": 0}
    loader = {"timed_batches": 12, "load_ns": 360 * MS, "load_cpu_ns": 360 * MS, "load_process_cpu_ns": 360 * MS}
    workers, threads = changes.pop("workers", 0), changes.pop("threads", 1)
    cpu |= {key: value for key, value in changes.items() if key in CpuMetadata.__dataclass_fields__}
    loader |= {key: value for key, value in changes.items() if key in DataLoaderMetadata.__dataclass_fields__}
    return RunMetadata(
        rank=rank, host=changes.get("host", "a"), cpu_count=count, local_world_size=local, cpu_threads=threads,
        cpu=CpuMetadata(cores=cores, quota=changes.get("quota"), **{k: v for k, v in cpu.items() if k != "quota"}),
        dataloaders=(DataLoaderMetadata(num_workers=workers, **loader),),
    )  # fmt: skip


def runs(*given: RunMetadata) -> dict[int, RunMetadata]:
    return {one.rank: one for one in given}


@pytest.mark.parametrize(
    ("job", "cores"),
    [
        (runs(run(0), run(1)), 4),  # one host's cores for two
        (runs(run(0, cores="0-3", count=4), run(1, cores="4-7", count=4)), 4),  # bound to cores of their own
        (runs(run(0, local=4), run(1, local=4)), 2),  # two more are not recorded
        (runs(run(0, host="a", local=1), run(1, host="b", local=1)), 8),
        (runs(run(0, quota=3.0), run(1, quota=3.0)), 1.5),  # a container's limit
    ],
)
def test_cores_of_a_rank(job: dict[int, RunMetadata], cores: float) -> None:
    assert cores_of(job, 0) == cores


def test_cores_are_not_guessed() -> None:
    assert cores_of({0: RunMetadata(rank=0)}, 0) is None


def test_what_training_and_loading_take() -> None:
    found = demands(runs(run(0), run(1)), {0: 1.0, 1: 1.0})[0]
    assert (found.training_ns, found.batch_ns, found.batch_most_ns, found.slowdown) == (70 * MS, 30 * MS, 30 * MS, 1.0)
    # Two batches per step: less is left for the training.
    assert demands(runs(run(0)), {0: 2.0})[0].training_ns == 40 * MS


def test_workers_are_processes_of_their_own() -> None:
    found = demands(runs(run(0, workers=2)), {0: 1.0})[0]
    assert (found.training_ns, found.batch_ns) == (100 * MS, 30 * MS)


def test_threads_that_spin_are_not_taken_for_work() -> None:
    busy = run(0, threads=4, process_ns=4000 * MS, load_process_cpu_ns=1440 * MS)
    found = demands(runs(busy), {0: 1.0})[0]
    assert (found.training_ns, found.batch_ns, found.batch_most_ns) == (70 * MS, 30 * MS, 120 * MS)


def test_waiting_for_a_core_shows_in_the_demand() -> None:
    assert demands(runs(run(0, waited_ns=500 * MS)), {0: 1.0})[0].slowdown == 1.5


def test_what_was_not_recorded_is_left_out() -> None:
    assert demands(runs(run(0, timed_batches=0), run(1, steps=0)), {}) == {}
    assert demands({0: RunMetadata(rank=0, cpu_count=8)}, {}) == {}


def test_no_step_is_shorter_than_its_cpu_time_over_the_cores() -> None:
    batches = {0: 1.0, 1: 1.0}
    crowded = runs(run(0, count=2, cores="0-1"), run(1, count=2, cores="0-1", process_ns=600 * MS))
    # 100 and 60 ms of CPU time on two cores.
    assert needed_ns(demands(crowded, batches), 0, batches) == pytest.approx(80 * MS)
    bound = runs(run(0, count=1, cores="0"), run(1, count=1, cores="1", process_ns=600 * MS))
    assert needed_ns(demands(bound, batches), 0, batches) == pytest.approx(100 * MS)


def sampled(**changes: Any) -> System:
    """Two cores, of which the job uses 1.06 and others 0.9."""
    unknown = dict.fromkeys(name for name in HostRow.__dataclass_fields__)
    known = {"host": "a", "ranks": (0, 1), "samples": 9, "cores": 2, "cpu_share": 0.98, "job_cores": 1.06}
    row = HostRow(**{**unknown, **known, **changes})
    return System(hosts=(row,), devices=(), processes=(), window_us=(0.0, 1.0))


def test_a_wait_that_ends_makes_others_wait_where_no_core_is_idle() -> None:
    """Of the 1.1 cores that are the job's 0.04 run nothing: 3.6 of 100 ms. Two ranks of 10 ms less need 18.2 less."""
    (shared,) = shared_cores(sampled(), {rank: replace(run(rank), backend="gloo") for rank in (0, 1)})
    assert (shared.cores, shared.idle) == (pytest.approx(1.1), pytest.approx(0.04))
    assert shared.least_ns(100.0, {}) == pytest.approx(96.36, abs=0.01)
    assert shared.least_ns(100.0, {0: 10.0, 1: 10.0}) == pytest.approx(78.18, abs=0.01)
    assert shared.least_ns(100.0, {0: 200.0}) == 0
    assert SharedCores((0, 1), 2.0, 1.0).least_ns(100.0, {}) == 50


@pytest.mark.parametrize(
    ("changes", "of_host"),
    [
        ({"backend": "mpi"}, {}),  # may wait for messages with a core
        ({"cpu_threads": 2}, {}),  # wait for one another with a core
        ({}, {"job_cores": None}),
        ({}, {"cores_usable": 1.0}),  # what else the host does with its cores is not the job's
        ({}, {"job_cores": 0.0, "cpu_share": 1.0}),
    ],
)
def test_whose_the_cores_are_is_not_known_everywhere(changes: dict[str, Any], of_host: dict[str, Any]) -> None:
    ranks = {rank: replace(run(rank), **{"backend": "gloo", **changes}) for rank in (0, 1)}
    assert not shared_cores(sampled(**of_host), ranks)
    assert not shared_cores(None, ranks)
