"""Faults as NVIDIA's tests inject them, and the proof that a fault cannot be told from another rank's."""

from __future__ import annotations

import pickle
import random

import pytest

from tests.stuck.dumps import Recorder
from tests.stuck.faults import Fault, broken
from tests.stuck.machine import Machine
from tests.stuck.program import Collective, Group, Job, Sync
from tests.stuck.resiliency import inject, megatron
from tests.stuck.twins import twins

WORLD = Group("0", "default_pg", (0, 1, 2))


def _reduce(size: int) -> Collective:
    return Collective(WORLD, "all_reduce", (size,), (size,))


def test_the_job_runs_to_its_end() -> None:
    assert Machine(megatron(random.Random(5)), 5).run().finished


def test_a_dead_rank_leaves_no_dump_and_a_failed_device_shows_as_open_what_others_have_done() -> None:
    killed = inject(1, "SIGKILL")
    assert {rank for rank in range(16) if killed.dump(rank) is None} == killed.ranks
    failed = inject(2, "GPU_ERROR")
    for rank in failed.ranks:
        content = pickle.loads(failed.dump(rank) or b"")
        ended = [each for each in failed.machine.ranks[rank].issued[-8:] if each.ended_ns is not None]
        assert len(content["entries"]) >= len(ended)


def test_a_kernel_that_does_not_end_holds_back_what_is_issued_after_it() -> None:
    job = Job([WORLD], [[_reduce(1), _reduce(2), Sync()] for _ in range(3)])
    machine = Machine(broken(job, [Fault(1, "stall", 1)])).run()
    assert [[each.started_ns is not None for each in rank.issued] for rank in machine.ranks] == [
        [True, True], [True, False], [True, True]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "recorder", "others"),
    [
        ("stall", Recorder(), {0, 2}),
        ("stall", Recorder(timing=True), set()),
        ("shape", Recorder(), set()),
        ("shape", Recorder(entries=1), {0, 2}),
    ],
)
def test_twins(kind: str, recorder: Recorder, others: set[int]) -> None:
    """A stall shows in start events alone; another shape in its own entry alone, which a short buffer has lost."""
    job = Job([WORLD], [[_reduce(1), _reduce(2), _reduce(3), Sync()] for _ in range(3)])
    fault = Fault(1, kind, 1)
    machine = Machine(broken(job, [fault])).run()
    assert twins(job, machine, [fault], fault, recorder, ()) == others
