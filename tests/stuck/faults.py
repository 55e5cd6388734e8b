"""Breaks ranks of a healthy job, and says which rank it was."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.stuck.machine import Machine
from tests.stuck.program import Action, Collective, Job, Messages, Stall, Stop

HOST_STOPS = ("sleep", "die")
STOPS = (*HOST_STOPS, "error", "stall")
"""The host stops, with or without a dump; the device fails, and the host with it; a kernel does not end."""
ODD = ("skip", "shape", "order")


@dataclass(frozen=True)
class Fault:
    """What one rank does otherwise."""

    rank: int
    kind: str
    place: int
    """Of the action in its program."""


def draw(rng: random.Random, job: Job, kind: str, rank: int) -> Fault | None:
    """A fault of a kind in the second half of a rank's program; None where there is no place for it."""
    program = job.programs[rank]
    half = range(len(program) // 2, len(program))
    if kind in STOPS:
        places = [place for place in half if isinstance(program[place], Collective | Messages)]
    else:
        # Two ranks alone would not show which is wrong; of a group of equal calls, a missing one is a late one.
        places = [
            place
            for place in half
            if isinstance(action := program[place], Collective) and len(action.group.ranks) > 2
            and (kind != "order" or _next_in_group(program, place) is not None)
        ]  # fmt: skip
    return Fault(rank, kind, rng.choice(places)) if places else None


def broken(job: Job, faults: list[Fault]) -> Job:
    """The job with these faults, at most one of a rank."""
    programs = [list(program) for program in job.programs]
    for fault in faults:
        program = programs[fault.rank]
        action = program[fault.place]
        if fault.kind in STOPS:
            program.insert(fault.place, Stall() if fault.kind == "stall" else Stop())
        elif fault.kind == "skip":
            del program[fault.place]
        elif fault.kind == "shape" and isinstance(action, Collective):
            program[fault.place] = replace(
                action, sizes_in=(7, *action.sizes_in[1:]), sizes_out=(7, *action.sizes_out[1:])
            )
        elif (other := _next_in_group(program, fault.place)) is not None:
            program[fault.place], program[other] = program[other], action
    return Job(job.groups, programs)


def _next_in_group(program: list[Action], place: int) -> int | None:
    """The next collective of the same group, where it is a different one."""
    action = program[place]
    assert isinstance(action, Collective)
    for other in range(place + 1, len(program)):
        later = program[other]
        if isinstance(later, Collective) and later.group == action.group:
            return other if later.signature != action.signature else None
    return None


def acted(machine: Machine, faults: list[Fault]) -> list[Fault]:
    """The faults that their ranks came to."""
    return [
        fault
        for fault in faults
        if (
            machine.ranks[fault.rank].stopped
            if fault.kind in STOPS and fault.kind != "stall"
            else machine.ranks[fault.rank].place > fault.place
        )
    ]
