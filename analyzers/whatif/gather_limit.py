"""FSDP's limit on how far ahead of their use parameters are gathered, when units are gathered elsewhere.

Each unit that is freed leaves an event behind the work that used it. Where more than one of these is left, a host that
gathers takes the oldest and waits for it (torch's ``_FreeEventQueue``). So the waits pair gathers with freed units in
the order of both, and which unit a gather waits for follows from how many are gathered and freed before it::

    host     gather 0 | use 0, free 0 | gather 1 | use 1, free 1 | gather 2: waits for use 0
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from statistics import median
from typing import Final

from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif.gathers import Gathers
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules, StepCollectives
from perfscope.analyzers.whatif.schedules.ops import RankOp, ScheduleOp, left_out
from perfscope.frozen import dataclass
from perfscope.trace.trace import NONE

_IN_FLIGHT: Final = 2
"""Freed units that a gather leaves: ``_max_num_inflight_all_gathers``."""
_SETTLED: Final = 4
"""Steps after which the queue is as long at the end of every step."""


def limits(ops: Sequence[ScheduleOp]) -> dict[RankOp, int]:
    """Rank op -> the place of the call in which its host waits before it issues it."""
    found, waited = {}, None
    for place, op in enumerate(ops):
        if op.kind is OpKind.LIMIT:
            waited = place
        elif op.issued is not None:
            if waited is not None:
                found[op.issued] = waited
            waited = None
    return found


def without_limit(schedules: EditableSchedules, gathers: Gathers) -> None:
    """Hosts do not wait before they issue gathers."""
    mine = _every(gathers)
    for rank, ops in schedules.ops.items():
        gone = {ops[place] for rank_op, place in limits(ops).items() if rank_op in mine}
        schedules.ops[rank], _ = left_out(ops, gone.__contains__)


def without_gathers(
    schedules: EditableSchedules, gathers: Gathers, dropped: set[RankOp], reductions: StepCollectives
) -> None:
    """Take ``dropped`` gathers out, those of backwards. Hosts that waited for freed units then wait for those that are
    freed in backwards, each right before its gradients are reduced.
    """
    mine = _every(gathers) - dropped
    numbers = count(1 + max(op.mark for op in chain.from_iterable(schedules.ops.values())))
    limited = {rank: _lags(ops, _every(gathers)) for rank, ops in schedules.ops.items()}
    without_limit(schedules, gathers)
    schedules.without(dropped)
    for rank, lags in limited.items():
        if lags:
            freed = {rank_op for (of, _), rank_ops in reductions.items() if of == rank for rank_op in rank_ops}
            units = len(gathers.once(rank, min(step for of, step in gathers.by_step if of == rank)))
            ops = _limited(schedules, schedules.ops[rank], mine, freed, units, median(lags), numbers)
            schedules.ops[rank] = list(ops)


def _lags(ops: Sequence[ScheduleOp], gathers: set[RankOp]) -> list[float]:
    """How long after freed units the host went on."""
    waits = (ops[place] for rank_op, place in limits(ops).items() if rank_op in gathers)
    return [op.host.lag_ns for op in waits if op.host is not None]


def _limited(
    schedules: EditableSchedules, ops: Sequence[ScheduleOp], gathers: set[RankOp], reductions: set[RankOp], units: int,
    lag_ns: float, numbers: Iterator[int],
) -> Iterator[ScheduleOp]:  # fmt: skip
    """``ops`` with a wait before each gather that has to; before each of ``reductions`` a unit is freed. Of the steps
    before as many are left as after any other: one more than the ``units`` of a pass.
    """
    queue: deque[int | None] = deque([None] * (1 + units))
    for op in ops:
        issued = op.issued
        if issued is None or issued not in gathers | reductions or op.host is None:
            yield op
            continue
        if issued in reductions:
            number = next(numbers)
            before, behind = op.divided(0.0, math.inf)
            queue.append(number)
            yield replace(before, kind=OpKind.NOTE, mark=number)
            yield behind
            continue
        freed = queue.popleft() if len(queue) >= _IN_FLIGHT else None
        if freed is None:
            yield op
            continue
        before, behind = op.divided(0.0, float(op.host.own_ns.sum()) - schedules.issuing_ns(op))
        assert before.host is not None
        before.host.lag_ns = lag_ns
        yield replace(before, kind=OpKind.LIMIT, mark=freed)
        yield behind


@dataclass(frozen=True)
class Pass:
    """``units`` are gathered, each ``ahead`` units before its own is used; ``frees``: and freed once they are used."""

    units: int
    ahead: int
    frees: bool

    def events(self) -> Iterator[bool]:
        """In order: is a unit gathered (or else freed)?"""
        gathered = 0
        for unit in range(self.units):
            while gathered < min(unit + 1 + self.ahead, self.units):
                gathered += 1
                yield True
            if self.frees:
                yield False


def taken_later(before: Sequence[Pass], after: Sequence[Pass]) -> int:
    """By how many freed units fewer have been waited for before any gather of a step, once the ``before`` of every step
    are as ``after``.
    """
    old, new = _waited_for(before), _waited_for(after)
    return max(0, min((mine - other for mine, other in zip(old, new, strict=True)), default=0))


def _waited_for(passes: Sequence[Pass]) -> list[int]:
    """For each gather of a settled step, the number of the freed unit that it waits for (from the first step on)."""
    queue: deque[int] = deque()
    freed = 0
    found: list[int] = []
    for _ in range(_SETTLED):
        found = []
        for is_gather in chain.from_iterable(one.events() for one in passes):
            if not is_gather:
                queue.append(freed)
                freed += 1
            else:
                found.append(queue.popleft() if len(queue) >= _IN_FLIGHT else NONE)
    return found


def wait_for_earlier(ops: Sequence[ScheduleOp], gathers: Sequence[RankOp], fewer: Mapping[int | None, int]) -> None:
    """Each of one rank's ``gathers``, in order, waits for what the one so many before it (``fewer``, by step) waited
    for; where that is not recorded, for nothing.
    """
    places = limits(ops)
    marks = {rank_op: ops[place].mark for rank_op, place in places.items()}
    for number, rank_op in enumerate(gathers):
        less = fewer.get(rank_op.collective.step, 0)
        if not less or rank_op not in marks:
            continue
        earlier = gathers[number - less] if number >= less else None
        mark = NONE if earlier is None else marks.get(earlier, NONE)
        op = ops[places[rank_op]]
        op.kind, op.mark = OpKind.NOTE if mark == NONE else op.kind, mark


def forget_unfreed(ops: Sequence[ScheduleOp]) -> None:
    """Hosts do not wait for what comes later: a call that only happened to end with a unit's work had nothing to wait
    for.
    """
    noted = set[int]()
    for op in ops:
        if op.kind is OpKind.LIMIT and op.mark != NONE and op.mark not in noted:
            op.kind, op.mark = OpKind.NOTE, NONE
        elif op.kind is OpKind.NOTE:
            noted.add(op.mark)


def _every(gathers: Gathers) -> set[RankOp]:
    return {rank_op for rank_ops in gathers.by_step.values() for rank_op in rank_ops}
