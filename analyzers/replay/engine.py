"""Replays the schedules of all ranks forward in time: own work, collectives that tie ranks together, waits for them.

A rank's schedule is a list of ops, each preceded by some time of the rank's own. Collectives occupy their stream on
each rank in order. They start there when the rank has issued them and the one before has ended, and end on all ranks
once the last of them has started, plus the transfer; where messages chain several ranks, on each once those at the
other ends of its own have. Example, two ranks, own work 10 and 14 ns, then a collective whose transfer takes 5, for
which both wait::

    rank 0   own [0, 10)   collective [10, 19)   waits until 19
    rank 1   own [0, 14)   collective [14, 19)   waits until 19

Where the schedules have ``Lanes``, each rank is two: a host that launches work, and a device that carries it out once
it is launched and what came before has ended. Whichever is late makes the other wait, and only there.

The engine knows nothing of training: ``schedules`` makes the schedules, ``pace`` and what-ifs change them.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import field, replace
from typing import Final

import numpy as np

from perfscope.frozen import dataclass
from perfscope.trace.trace import NEVER, NONE, Int64


class OpKind(enum.IntEnum):
    """What an op does once the own time before it has passed."""

    ISSUE = 0
    """Issue rank op ``operand`` on its stream, ``lag_ns`` later."""
    WAIT = 1
    """Go on only ``lag_ns`` after rank op ``operand`` has ended (before its end, where negative)."""
    MARK = 2
    """Note the time, plus ``lag_ns``, as mark ``operand``."""
    HOLD = 3
    """Go on ``lag_ns`` later (a stall is part of the own time, so: earlier), but not before ``hold_ns[operand]``."""
    SYNC = 4
    """The host goes on only after its device has come here, or to the NOTE ``operand``. With lanes only."""
    JOIN = 5
    """The host goes on only after rank op ``operand`` has ended. With lanes only."""
    NOTE = 6
    """Note when the device has come here, as ``operand``. With lanes only."""
    QUEUE = 7
    """As SYNC, in a launch: the device's queue was full. With lanes only."""
    LIMIT = 8
    """As SYNC, before a gather of parameters: FSDP gathers no further ahead. With lanes only."""


# Looking up a member of an enum takes Python 3.11 as long as the rest of an op.
_ISSUE, _WAIT, _MARK, _HOLD, _SYNC, _, _NOTE, _QUEUE, _LIMIT = map(int, OpKind)
_UP_TO_DEVICE: Final = (_SYNC, _QUEUE, _LIMIT)
"""The host waits for its device, which has come here, or to a NOTE."""


@dataclass(frozen=True, eq=False)
class Lanes:
    """Host and device of every rank: columns beside the ops of ``Schedules``, ns.

    Before an op a host that is at h and its device at d come to h + ``host_ns`` and max(d + ``work_ns``, h +
    ``reach_ns``): the device carries out its work, but each piece only once it is launched. That is the largest, over
    the pieces launched meanwhile, of when it could start after h plus all work from it on.

    What is issued or marked is so at the later of the host's time + ``host_lag_ns`` and the device's +
    ``device_lag_ns`` (NEVER: whenever). A device goes on ``device_lag_ns`` after what it waits for (NEVER: it does not
    wait), a host ``host_lag_ns``. ``hold_ns`` replaces that of the schedules: it is the hosts that are held. The hosts
    start ``lead_ns`` [rank] before their ranks.

    Example: two pieces of 3 and 4, launched 1 and 6 after h, where d = h: the device is done at max(0 + 7, 1 + 7, 6 +
    4) = 10.
    """

    host_ns: Int64
    work_ns: Int64
    reach_ns: Int64
    host_lag_ns: Int64
    device_lag_ns: Int64
    hold_ns: Int64
    lead_ns: Int64


@dataclass(frozen=True, eq=False)
class Schedules:
    """Every rank's schedule, side by side. Times are ns.

    Rank i (in the order of ``ranks``) starts at ``start_ns[i]`` and has the ops ``first[i]`` to ``first[i + 1]`` of
    ``kind`` (``OpKind``), ``operand``, ``own_ns`` (own time before the op) and ``lag_ns``. Rank ops (a rank's part in a
    collective) have a line in ``instance``, ``previous`` (the rank op before it on its stream, or NONE), ``gap_ns``
    (from when it could start to its start) and ``transfer_ns``. ``floor_ns`` holds, for each instance, a time before
    which its last arrival cannot be: that of ranks whose schedules are not known. ``hold_ns`` are moments that nothing
    in the schedules can move.
    """

    ranks: tuple[int, ...]
    start_ns: Int64
    first: Int64
    kind: Int64
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
    """For each rank op, the one on another stream whose end it waits for as well, or NONE; None: none does."""
    after_gap_ns: Int64 | None = None
    """From that end to its start, which ``gap_ns`` includes."""
    chained: Mapping[int, Mapping[int, Set[int]]] = field(default_factory=dict)
    """Of instances that are chains of messages between three ranks or more: rank -> the ranks at the other ends of its
    messages, for which alone it waits. In all others each rank waits for all."""
    lanes: Lanes | None = None
    """None: what a rank's host does is part of its own time."""

    @functools.cached_property
    def _lines(self) -> dict[int, int]:
        return {rank: line for line, rank in enumerate(self.ranks)}

    def line_of(self, rank: int) -> int:
        """A rank's place in ``ranks``. Raises KeyError where it is not among them."""
        return self._lines[rank]

    def slice_of(self, rank: int) -> slice:
        """Where one rank's ops are."""
        line = self.line_of(rank)
        return slice(int(self.first[line]), int(self.first[line + 1]))


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """When everything happened: ns of each mark, start and end of each rank op (NONE where never reached).

    ``complete``: every rank came to the end of its schedule. Otherwise the ranks wait for each other, which those of a
    recording cannot unless its collectives were matched wrongly.
    """

    mark_ns: Int64
    start_ns: Int64
    end_ns: Int64
    complete: bool
    host_mark_ns: Int64 | None = None
    """When the hosts would come to the marks if they never waited for their devices, for collectives or for batches;
    None without lanes."""


def replay(schedules: Schedules) -> ReplayResult:
    """Replay all schedules to their ends."""
    return (_Replay(schedules) if schedules.lanes is None else _LanesReplay(schedules, schedules.lanes)).run()


class _Replay:
    """One run. Plain lists: an element of a list is read many times faster than one of an array."""

    def __init__(self, schedules: Schedules) -> None:
        self._first = schedules.first.tolist()
        self._kind = schedules.kind.tolist()
        self._operand = schedules.operand.tolist()
        self._own = schedules.own_ns.tolist()
        self._lag = schedules.lag_ns.tolist()
        self._time = schedules.start_ns.tolist()
        self._at = self._first[:-1]
        self._marks = [NONE] * schedules.marks
        count = len(schedules.instance)
        self._instance = schedules.instance.tolist()
        self._previous = schedules.previous.tolist()
        self._following: list[list[int]] = [[] for _ in range(count)]
        for rank_op, previous in enumerate(self._previous):
            if previous != NONE:
                self._following[previous].append(rank_op)
        nothing = np.full(count, NONE, dtype=np.int64)
        self._after = (nothing if schedules.after is None else schedules.after).tolist()
        self._after_gap = (nothing if schedules.after_gap_ns is None else schedules.after_gap_ns).tolist()
        for rank_op, other in enumerate(self._after):
            if other != NONE:
                self._following[other].append(rank_op)
        self._gap = schedules.gap_ns.tolist()
        self._transfer = schedules.transfer_ns.tolist()
        self._ready: list[int | None] = [None] * count
        self._start: list[int | None] = [None] * count
        self._end: list[int | None] = [None] * count
        self._members: list[list[int]] = [[] for _ in range(len(schedules.floor_ns))]
        for rank_op, instance in enumerate(self._instance):
            self._members[instance].append(rank_op)
        self._absent = [len(members) for members in self._members]
        self._hold = schedules.hold_ns.tolist()
        self._latest = schedules.floor_ns.tolist()
        self._meets = _meets(schedules, self._members)
        self._to_come = {rank_op: len(others) for rank_op, others in self._meets.items()}
        self._came = {rank_op: self._latest[self._instance[rank_op]] for rank_op in self._meets}
        self._waiting: dict[int, int] = {}
        self._runnable = list(range(len(self._time)))[::-1]

    def run(self) -> ReplayResult:
        while self._runnable:
            self._advance(self._runnable.pop())
        return ReplayResult(
            np.array(self._marks, dtype=np.int64),
            np.array([NONE if time is None else time for time in self._start], dtype=np.int64),
            np.array([NONE if time is None else time for time in self._end], dtype=np.int64),
            complete=not self._waiting,
        )

    def _advance(self, rank: int) -> None:
        """Run one rank until it has to wait or is done."""
        now, at, stop = self._time[rank], self._at[rank], self._first[rank + 1]
        while at < stop:
            kind, operand, reached = self._kind[at], self._operand[at], now + self._own[at]
            if kind == _WAIT:
                end = self._end[operand]
                if end is None:
                    self._waiting[operand] = rank
                    break
                now = max(end + self._lag[at], reached)
            else:
                now = reached
                if kind == _HOLD:
                    now = max(reached + self._lag[at], self._hold[operand])
                elif kind == _ISSUE:
                    self._ready[operand] = reached + self._lag[at]
                    self._start_op(operand)
                else:
                    self._marks[operand] = reached + self._lag[at]
            at += 1
        self._time[rank], self._at[rank] = now, at

    def _start_op(self, rank_op: int) -> None:
        """Start a collective on one rank if its stream is free, and whatever can start as it ends."""
        able = [rank_op]
        while able:
            rank_op = able.pop()
            ready, previous = self._ready[rank_op], self._previous[rank_op]
            if ready is None or self._start[rank_op] is not None:
                continue
            if previous != NONE:
                end = self._end[previous]
                if end is None:
                    continue
                ready = max(ready, end)
            other = self._after[rank_op]
            if other == NONE:
                start = ready + self._gap[rank_op]
            else:
                end = self._end[other]
                if end is None:
                    continue
                start = max(ready, end + self._after_gap[rank_op])
            self._start[rank_op] = start
            able += self._meet(rank_op, start) if rank_op in self._meets else self._arrive(rank_op, start)

    def _arrive(self, rank_op: int, start: int) -> list[int]:
        """A rank has come to a collective: the last one ends it on all ranks."""
        instance = self._instance[rank_op]
        if start > self._latest[instance]:
            self._latest[instance] = start
        self._absent[instance] -= 1
        if self._absent[instance]:
            return []
        return [able for member in self._members[instance] for able in self._finish(member, self._latest[instance])]

    def _meet(self, rank_op: int, start: int) -> list[int]:
        """Its part in a chain of messages has started: end those at their other ends that waited for no other."""
        able = []
        for other in self._meets[rank_op]:
            self._came[other] = max(self._came[other], start)
            self._to_come[other] -= 1
            if self._to_come[other] == 0:
                able += self._finish(other, self._came[other])
        return able

    def _finish(self, rank_op: int, latest: int) -> list[int]:
        """End a collective on one rank, the last arrival being known; returns the rank ops that may start now."""
        self._end[rank_op] = latest + self._transfer[rank_op]
        rank = self._waiting.pop(rank_op, None)
        if rank is not None:
            self._runnable.append(rank)
        return self._following[rank_op]


def _meets(schedules: Schedules, members: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Rank op in a chain of messages -> those that it waits for, itself among them."""
    if not schedules.chained:
        return {}
    rank_of = {}
    for index, rank in enumerate(schedules.ranks):
        span = slice(int(schedules.first[index]), int(schedules.first[index + 1]))
        issued = schedules.operand[span][schedules.kind[span] == _ISSUE]
        rank_of.update(dict.fromkeys(issued.tolist(), rank))
    found = {}
    for instance, others in schedules.chained.items():
        on_rank = {rank_of[rank_op]: rank_op for rank_op in members[instance] if rank_op in rank_of}
        for rank, rank_op in on_rank.items():
            met = {rank, *others.get(rank, ())}
            found[rank_op] = [on_rank[other] for other in sorted(met) if other in on_rank]
    return found


class _LanesReplay(_Replay):
    """One run of hosts beside their devices."""

    def __init__(self, schedules: Schedules, lanes: Lanes) -> None:
        super().__init__(schedules)
        self._host = (schedules.start_ns - lanes.lead_ns).tolist()
        self._host_own = lanes.host_ns.tolist()
        self._own = lanes.work_ns.tolist()
        self._reach = lanes.reach_ns.tolist()
        self._host_lag = lanes.host_lag_ns.tolist()
        self._device_lag = lanes.device_lag_ns.tolist()
        self._hold = lanes.hold_ns.tolist()
        self._noted: dict[int, int] = {}
        self._host_marks = [NONE] * schedules.marks
        self._waited = [0] * len(self._host)

    def run(self) -> ReplayResult:
        return replace(super().run(), host_mark_ns=np.array(self._host_marks, dtype=np.int64))

    def _advance(self, rank: int) -> None:
        """Run one rank until its host or its device has to wait for a collective, or both are done."""
        host, now, at, stop = self._host[rank], self._time[rank], self._at[rank], self._first[rank + 1]
        while at < stop:
            kind, operand = self._kind[at], self._operand[at]
            reached = max(now + self._own[at], host + self._reach[at])
            called = host + self._host_own[at]
            if kind == _ISSUE:
                self._ready[operand] = max(called + self._host_lag[at], reached + self._device_lag[at])
                self._start_op(operand)
            elif kind == _WAIT:
                if self._device_lag[at] != NEVER:
                    end = self._end[operand]
                    if end is None:
                        self._waiting[operand] = rank
                        break
                    reached = max(reached, end + self._device_lag[at])
            elif kind == _MARK:
                self._host_marks[operand] = called - self._waited[rank]
                self._marks[operand] = max(called + self._host_lag[at], reached + self._device_lag[at])
            else:
                goes_on = self._host_goes_on(rank, at, called, reached)
                if goes_on is None:
                    break
                self._waited[rank] += goes_on - called - (self._host_lag[at] if kind == _HOLD else 0)
                called = goes_on
            host, now = called, reached
            at += 1
        self._host[rank], self._time[rank], self._at[rank] = host, now, at

    def _host_goes_on(self, rank: int, at: int, called: int, reached: int) -> int | None:
        """When a host that is there at ``called``, its device at ``reached``, goes on after an op of its own; None
        where that is not known yet.
        """
        kind, operand = self._kind[at], self._operand[at]
        lag: int = self._host_lag[at]
        if kind in _UP_TO_DEVICE:
            return max(called, (reached if operand == NONE else self._noted[operand]) + lag)
        if kind == _HOLD:
            held: int = self._hold[operand]
            return max(called + lag, held)
        if kind == _NOTE:
            self._noted[operand] = reached
            return called
        end: int | None = self._end[operand]
        if end is None:
            self._waiting[operand] = rank
            return None
        return max(called, end + lag)
