"""Proof that dumps cannot tell a rank at fault: another rank's fault of the same kind leaves the same dumps."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Sequence
from typing import Any

from tests.stuck.dumps import Recorder, dump
from tests.stuck.faults import Fault, broken
from tests.stuck.machine import Machine
from tests.stuck.program import Action, Collective, Group, Job

TWINS = ("shape", "stall")
"""Kinds of fault at a collective that all ranks of its group have issued in the end."""


def twins(
    job: Job,
    machine: Machine,
    faults: Sequence[Fault],
    fault: Fault,
    recorder: Recorder,
    without_dump: Collection[int],
) -> frozenset[int]:
    """Ranks that would have left the same dumps, but for times, with ``fault`` of ``faults`` at the same collective."""
    program = job.programs[fault.rank]
    place = next((at for at in range(fault.place, len(program)) if isinstance(program[at], Collective)), None)
    if fault.kind not in TWINS or place is None:
        return frozenset()
    action = program[place]
    assert isinstance(action, Collective)
    number = sum(_is_of(each, action.group) for each in program[:place])
    shown = _content(machine, recorder, without_dump)
    found = set()
    for rank in set(action.group.ranks) - {each.rank for each in faults}:
        same = [at for at, each in enumerate(job.programs[rank]) if _is_of(each, action.group)][number]
        other = Machine(broken(job, [*(each for each in faults if each != fault), Fault(rank, fault.kind, same)])).run()
        if _content(other, recorder, without_dump) == shown:
            found.add(rank)
    return frozenset(found)


def _is_of(action: Action, group: Group) -> bool:
    return isinstance(action, Collective) and action.group == group


def _content(machine: Machine, recorder: Recorder, without_dump: Collection[int]) -> list[dict[str, Any]]:
    dumps = [
        pickle.loads(dump(machine, rank, recorder)) for rank in range(machine.job.world) if rank not in without_dump
    ]
    for content in dumps:
        for entry in content["entries"]:
            for name in [name for name in entry if name.startswith("time_")]:
                del entry[name]
    return dumps
