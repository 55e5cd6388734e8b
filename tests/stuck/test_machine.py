"""The simulated standstills by hand: small programs whose end is worked out on paper."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest

from tests.stuck.dumps import Recorder, dump
from tests.stuck.faults import Fault, broken
from tests.stuck.jobs import healthy, stuck_job
from tests.stuck.machine import Machine
from tests.stuck.program import Action, Collective, Group, Job, Join, Message, Messages, Stop, Sync

WORLD = Group("0", "default_pg", (0, 1, 2))
PAIR = Group("1", "pp", (0, 1))


def reduce(group: Group = WORLD, size: int = 4, *, blocking: bool = True) -> Collective:
    return Collective(group, "all_reduce", (size,), (size,), "Float", blocking)


def message(send: bool, peer: int, group: Group = PAIR) -> Messages:
    return Messages(group, (Message(send, peer, (8,)),), batched=False)


def run(*programs: list[Action]) -> Machine:
    return Machine(Job([WORLD, PAIR], list(programs))).run()


def ended(machine: Machine, rank: int) -> list[bool]:
    return [each.ended_ns is not None for each in machine.ranks[rank].issued]


def dumped(machine: Machine, rank: int, **options: Any) -> dict[str, Any]:
    content: dict[str, Any] = pickle.loads(dump(machine, rank, Recorder(**options)))
    return content


def test_one_rank_stops_before_the_second_of_two() -> None:
    both: list[Action] = [reduce(), reduce(), Sync()]
    machine = run(both, both, [reduce(), Stop(), reduce()])
    assert [ended(machine, rank) for rank in range(3)] == [[True, False], [True, False], [True]]
    assert machine.ranks[2].stopped
    assert not machine.finished
    first = [rank.issued[0] for rank in machine.ranks]
    assert {each.ended_ns for each in first} == {max(each.started_ns or 0 for each in first) + 50_000}


def test_sizes_that_do_not_fit_never_end() -> None:
    machine = run([reduce(), reduce()], [reduce(), reduce()], [reduce(size=5), reduce()])
    assert all(ended(machine, rank) == [False, False] for rank in range(3))
    assert [each.started_ns is None for each in machine.ranks[0].issued] == [False, True], "one after the other"


def test_what_needs_a_result_waits_for_it_and_what_does_not_goes_on() -> None:
    """Rank 0 waits for rank 2's all-reduce before it sends; overlapped, it sends all the same."""
    receives: list[Action] = [message(False, 0), reduce()]
    machine = run([reduce(), message(True, 1)], receives, [Stop()])
    assert (ended(machine, 0), ended(machine, 1)) == ([False, False], [False, False])
    machine = run([reduce(blocking=False), message(True, 1)], receives, [Stop()])
    assert (ended(machine, 0), ended(machine, 1)) == ([False, True], [True, False])
    machine = run([reduce(blocking=False), Join(WORLD), message(True, 1)], receives, [Stop()])
    assert (ended(machine, 0), ended(machine, 1)) == ([False, False], [False, False])


def test_messages_issued_as_one_end_together() -> None:
    both = Messages(PAIR, (Message(True, 1, (8,)), Message(False, 1, (8,))), batched=True)
    machine = run([both], [message(False, 0), message(True, 0)], [])
    assert (ended(machine, 0), ended(machine, 1)) == ([True], [True, True])
    machine = run([both], [message(False, 0), Stop()], [])
    assert (ended(machine, 0), ended(machine, 1)) == ([False], [True])


def test_a_host_waits_at_the_end_of_its_step() -> None:
    machine = run([reduce(), Sync(), reduce()], [reduce(), Sync(), reduce()], [Stop()])
    assert [len(rank.issued) for rank in machine.ranks] == [1, 1, 0]


def test_faults() -> None:
    program: list[Action] = [reduce(size=1), reduce(size=2)]
    job = Job([WORLD], [list(program) for _ in range(3)])
    assert broken(job, [Fault(1, "sleep", 1)]).programs[1] == [program[0], Stop(), program[1]]
    assert broken(job, [Fault(1, "skip", 0)]).programs[1] == [program[1]]
    assert broken(job, [Fault(1, "order", 0)]).programs[1] == [program[1], program[0]]
    assert broken(job, [Fault(1, "shape", 1)]).programs[1] == [program[0], reduce(size=7)]
    assert broken(job, [Fault(1, "shape", 1)]).programs[0] == program


def test_a_dump_as_torch_writes_it() -> None:
    both = Messages(PAIR, (Message(True, 1, (8,)), Message(False, 1, (8,))), batched=True, line=90)
    machine = run([reduce(), both, reduce()], [reduce(), message(False, 0), Stop()], [reduce(), reduce()])
    content = dumped(machine, 0, timing=True)
    assert [
        (each["profiling_name"], each["collective_seq_id"], each["p2p_seq_id"], each["op_id"], each["state"])
        for each in content["entries"]
    ] == [
        ("nccl:all_reduce", 1, 0, 1, "completed"),
        ("nccl:send 0->1", 0, 1, 1, "scheduled"),
        ("nccl:recv 0<-1", 0, 1, 2, "scheduled"),
        ("nccl:coalesced", 0, 1, 3, "started"),
        ("nccl:all_reduce", 2, 0, 2, "scheduled"),
    ]
    assert content["pg_config"]["1"] == {"name": "1", "desc": "pp", "ranks": "[0, 1]"}
    assert content["pg_status"]["0"] == {
        "last_enqueued_collective": 2, "last_started_collective": -1, "last_completed_collective": 1
    }  # fmt: skip
    assert [each["record_id"] for each in dumped(machine, 0, entries=2)["entries"]] == [3, 4]
    assert [each["state"] for each in dumped(machine, 2, only_active=True)["entries"]] == ["scheduled"]


@pytest.mark.parametrize("seed", range(40))
def test_layouts_run_to_their_end_unless_a_rank_is_at_fault(seed: int) -> None:
    layout, job = healthy(random.Random(seed))
    assert Machine(job, seed).run().finished, layout
    drawn = stuck_job(seed)
    if drawn.faults:
        assert not drawn.machine.finished
        assert drawn.roots <= {fault.rank for fault in drawn.faults}
        assert drawn.groups
    else:
        assert drawn.machine.finished
