"""Plays programs of all ranks forward in time: own work, collectives that tie ranks together, and waits for them.

A rank's program is a list of instructions, each preceded by some time of the rank's own. Collectives occupy their
stream on each rank in order, begin there when the rank has issued them and the one before has ended, and end on all
ranks once the last of them has begun, plus the transfer. Example, two ranks, own work 10 and 14 ns, then a collective
whose transfer takes 5, for which both wait::

    rank 0   own [0, 10)   collective [10, 19)   blocked until 19
    rank 1   own [0, 14)   collective [14, 19)   blocked until 19

The engine knows nothing of training: ``programs`` writes the programs, ``pace`` changes them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from perfscope.trace import NONE, Int64


class Op(enum.IntEnum):
    """What an instruction does once the own time before it has passed."""

    ISSUE = 0
    """Hand collective ``operand`` to its stream, ``lag_ns`` later."""
    BLOCK = 1
    """Go on only ``lag_ns`` after collective ``operand`` has ended on this rank (before its end, where negative)."""
    MARK = 2
    """Note the time, plus ``lag_ns``, as mark ``operand``."""
    HOLD = 3
    """Go on ``lag_ns`` later (a stall is part of the own time, so: earlier), but not before ``hold_ns[operand]``."""


@dataclass(frozen=True, eq=False)
class Programs:
    """Every rank's program, side by side. Times are ns.

    Rank i (in the order of ``ranks``) begins at ``start_ns[i]`` and has the instructions ``first[i]`` to ``first[i +
    1]`` of ``op``, ``operand``, ``own_ns`` (own time before the instruction) and ``lag_ns``. Participations (a rank's
    part in a collective) have a line in ``instance``, ``previous`` (the participation before it on its stream, or
    NONE), ``gap_ns`` (from being able to begin to beginning) and ``transfer_ns``. ``floor_ns`` holds, for each
    instance, a time before which its last arrival cannot be: that of participants whose programs are not known.
    ``hold_ns`` are moments that nothing in the programs can move.
    """

    ranks: tuple[int, ...]
    start_ns: Int64
    first: Int64
    op: Int64
    operand: Int64
    own_ns: Int64
    lag_ns: Int64
    instance: Int64
    previous: Int64
    gap_ns: Int64
    transfer_ns: Int64
    floor_ns: Int64
    hold_ns: Int64
    marks: int
    after: Int64 | None = None
    """For each participation, the one on another stream whose end it waits for besides, or NONE; None: none does."""
    after_gap_ns: Int64 | None = None
    """From that end to its beginning, which ``gap_ns`` includes."""

    def slice_of(self, rank: int) -> slice:
        """Where one rank's instructions lie."""
        index = self.ranks.index(rank)
        return slice(int(self.first[index]), int(self.first[index + 1]))


@dataclass(frozen=True, eq=False)
class Played:
    """When everything happened: ns of each mark, start and end of each participation (NONE where never reached).

    ``complete``: every rank came to the end of its program. Otherwise the programs wait for each other, which a
    recording's cannot unless its collectives were matched wrongly.
    """

    mark_ns: Int64
    start_ns: Int64
    end_ns: Int64
    complete: bool


def play(programs: Programs) -> Played:
    """Play all programs to their ends."""
    return _Play(programs).run()


class _Play:
    """One run. Plain lists: an element of a list is read many times faster than one of an array."""

    def __init__(self, programs: Programs) -> None:
        self._first = programs.first.tolist()
        self._op = programs.op.tolist()
        self._operand = programs.operand.tolist()
        self._own = programs.own_ns.tolist()
        self._lag = programs.lag_ns.tolist()
        self._time = programs.start_ns.tolist()
        self._at = self._first[:-1]
        self._marks = [NONE] * programs.marks
        count = len(programs.instance)
        self._instance = programs.instance.tolist()
        self._previous = programs.previous.tolist()
        self._following: list[list[int]] = [[] for _ in range(count)]
        for participation, previous in enumerate(self._previous):
            if previous != NONE:
                self._following[previous].append(participation)
        nothing = np.full(count, NONE, dtype=np.int64)
        self._after = (nothing if programs.after is None else programs.after).tolist()
        self._after_gap = (nothing if programs.after_gap_ns is None else programs.after_gap_ns).tolist()
        for participation, other in enumerate(self._after):
            if other != NONE:
                self._following[other].append(participation)
        self._gap = programs.gap_ns.tolist()
        self._transfer = programs.transfer_ns.tolist()
        self._ready: list[int | None] = [None] * count
        self._start: list[int | None] = [None] * count
        self._end: list[int | None] = [None] * count
        self._members: list[list[int]] = [[] for _ in range(len(programs.floor_ns))]
        for participation, instance in enumerate(self._instance):
            self._members[instance].append(participation)
        self._absent = [len(members) for members in self._members]
        self._hold = programs.hold_ns.tolist()
        self._latest = programs.floor_ns.tolist()
        self._waiting: dict[int, int] = {}
        self._runnable = list(range(len(self._time)))[::-1]

    def run(self) -> Played:
        while self._runnable:
            self._advance(self._runnable.pop())
        return Played(
            np.array(self._marks, dtype=np.int64),
            np.array([NONE if time is None else time for time in self._start], dtype=np.int64),
            np.array([NONE if time is None else time for time in self._end], dtype=np.int64),
            complete=not self._waiting,
        )

    def _advance(self, rank: int) -> None:
        """Run one rank until it has to wait or is done."""
        now, at, stop = self._time[rank], self._at[rank], self._first[rank + 1]
        while at < stop:
            op, operand, reached = self._op[at], self._operand[at], now + self._own[at]
            if op == Op.BLOCK:
                end = self._end[operand]
                if end is None:
                    self._waiting[operand] = rank
                    break
                now = max(end + self._lag[at], reached)
            else:
                now = reached
                if op == Op.HOLD:
                    now = max(reached + self._lag[at], self._hold[operand])
                elif op == Op.ISSUE:
                    self._ready[operand] = reached + self._lag[at]
                    self._begin(operand)
                else:
                    self._marks[operand] = reached + self._lag[at]
            at += 1
        self._time[rank], self._at[rank] = now, at

    def _begin(self, participation: int) -> None:
        """Begin a collective on one rank if its stream is free, and whatever that sets free."""
        able = [participation]
        while able:
            participation = able.pop()
            ready, previous = self._ready[participation], self._previous[participation]
            if ready is None or self._start[participation] is not None:
                continue
            if previous != NONE:
                end = self._end[previous]
                if end is None:
                    continue
                ready = max(ready, end)
            other = self._after[participation]
            if other == NONE:
                start = ready + self._gap[participation]
            else:
                end = self._end[other]
                if end is None:
                    continue
                start = max(ready, end + self._after_gap[participation])
            self._start[participation] = start
            instance = self._instance[participation]
            if start > self._latest[instance]:
                self._latest[instance] = start
            self._absent[instance] -= 1
            if self._absent[instance] == 0:
                able += self._finish(instance)

    def _finish(self, instance: int) -> list[int]:
        """End a collective on all its ranks; returns what may begin now."""
        latest, able = self._latest[instance], []
        for participation in self._members[instance]:
            self._end[participation] = latest + self._transfer[participation]
            rank = self._waiting.pop(participation, None)
            if rank is not None:
                self._runnable.append(rank)
            able += self._following[participation]
        return able
