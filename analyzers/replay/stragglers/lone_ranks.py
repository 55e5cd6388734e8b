"""Ranks that nobody's work is like, as the stages of a pipeline on a rank each, and that are slow in turn, or one of
them now and then.

Such a rank is compared with itself: its own time in a step, or that of one category, or on CPUs of one operator or
phase, with what its steps usually take.
What is slow in all steps alike is not found so, and need not be: a stage that is slow throughout is one of
``slow_stages``. Where the work of batches varies, it does on all stages at once: that is no turn of anybody, and what
the others take longer in the same step is nobody's delay.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.replay.engine import OpKind, Schedules
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.analyzers.replay.stragglers.chance import MANY_STEPS
from perfscope.analyzers.replay.stragglers.host_parts import StepParts
from perfscope.analyzers.replay.stragglers.straggler import CAUSES
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.medians import densest
from perfscope.trace.trace import Bool, Float64, Int64

_PLAIN: Final = 3.0
"""Standard deviations of a rank's usual steps from which one is longer than usual."""
_NOTICEABLE: Final = 0.1
"""Share of the step by which it must be longer: beside no peers what a busy machine does to a step is plain, too."""
_NOTICEABLE_PART: Final = 0.05
"""The same of one operator or phase, which has little of that."""
_AGAIN: Final = 2
"""Steps in which each rank must be slow: what comes once may be anything."""
_OFTEN_OF_MANY: Final = 3
"""Of many steps (``MANY_STEPS``), in how many one rank must be that is so now and then."""
_OFTEN: Final = 0.5
"""Share of the steps in which one of them must be."""
_MOST: Final = 0.6
"""Share of the steps in which each may be: a rank that is slow in more is so most of the time, and in no turn. Of two
that take turns each is slow in half of the steps, and by chance in a few more."""
_LARGEST_PART: Final = 2 / 3
"""Of what all are slower by, at most, one rank's: else it is that rank, now and then."""
_MANY: Final = 1 / 3
"""Share of the steps from which those that are plainly quicker than most are the usual ones."""
_OFTENER: Final = 2.0
"""A rank is slow now and then that is so in more than this many times as many steps as the others are."""
_MAIN: Final = 0.5
"""Part of what a category takes longer, at least, by which a rank's whole own time must be longer."""
_CHANCE: Final = 2.0
"""Standard errors of what else a step takes, as much as which that may seem less by chance."""


View: TypeAlias = TimeCategory | str | None
"""What of a rank's own time is looked at: one category, one of ``LoneRank.parts_ns``, or all of it."""


@dataclass(frozen=True, eq=False)
class LoneRank:
    """One rank's own time. ``bounds`` are the ops of its schedule that begin the recorded steps, and the one that ends
    the last; ``own_ns`` [recorded step]; ``rows_ns`` [recorded step, category]; ``parts_ns``, on CPUs: name of an
    operator, or of a phase for the time between its operators, -> [recorded step].
    """

    rank: int
    bounds: Int64
    own_ns: Int64
    rows_ns: Int64
    parts_ns: Mapping[str, Int64]

    def seen(self, view: View) -> Int64:
        """Own time in each recorded step, as far as ``view`` goes; 0 where there is none."""
        if view is None:
            return self.own_ns
        if isinstance(view, TimeCategory):
            return self.rows_ns[:, view]
        return self.parts_ns.get(view, np.zeros_like(self.own_ns))


@dataclass(frozen=True, eq=False)
class LateSteps:
    """The steps in which such a rank is slow, and for how much longer each then takes; [recorded step]."""

    of: LoneRank
    slow: Bool
    over_ns: Int64
    """0 where it is not slow."""

    def longer_ns(self, used: Bool) -> Int64:
        """By category, what slow steps take longer than the other used ones, all together."""
        usual = np.median(self.of.rows_ns[used & ~self.slow], axis=0)
        return np.asarray((self.of.rows_ns[self.slow] - usual).sum(axis=0), dtype=np.int64)


def lone_ranks(result: AlignedJob, recorded: RecordedSchedules, with_peers: Collection[int]) -> list[LoneRank]:
    """The ranks that are not among ``with_peers``."""
    return [_lone_rank(result, recorded, rank) for rank in recorded.schedules.ranks if rank not in with_peers]


def slow_now_and_then(ranks: Collection[LoneRank], used: Bool, step_ns: float, view: View) -> list[LateSteps]:
    """Those of these ranks that take plainly longer in some of the ``used`` steps, of ``step_ns``, and not in most: by
    their whole own time, or by a part of it. None where that is in few steps of all ranks together.
    """
    every = [_slow_steps(one, used, _least(view) * step_ns, view) for one in ranks]
    found = [one for one in every if _AGAIN <= one.slow.sum() <= _MOST * used.sum()]
    if not found or np.any([one.slow[used] for one in found], axis=0).mean() < _OFTEN:
        return []
    over = [int(one.over_ns.sum()) for one in found]
    return found if max(over) <= _LARGEST_PART * sum(over) else []


def late_now_and_then(ranks: Collection[LoneRank], used: Bool, step_ns: float, view: View) -> list[LateSteps]:
    """Each of these ranks that takes plainly longer in some of the ``used`` steps, not in most, and in more steps than
    the others do.
    """
    every = [_slow_steps(one, used, _least(view) * step_ns, view) for one in ranks]
    if len(every) < 2:
        return []
    over = np.stack([_over_usual(one, used, view)[0] for one in ranks])
    found = []
    for place, one in enumerate(every):
        of_all = np.median(np.delete(over, place, axis=0), axis=0)
        slow = one.slow & (one.over_ns - np.maximum(of_all, 0) >= _least(view) * step_ns)
        others = [int(each.slow.sum()) for each in every if each is not one]
        again = _OFTEN_OF_MANY if used.sum() >= MANY_STEPS else _AGAIN
        if max(again, _OFTENER * float(np.median(others)) + 1) <= slow.sum() <= _MOST * used.sum():
            found.append(replace(one, slow=slow, over_ns=np.where(slow, one.over_ns, 0)))
    return found


def at_usual_pace(recorded: RecordedSchedules, ranks: Collection[LateSteps]) -> Schedules:
    """Schedules in which the slow steps of these ranks take as long as their others."""
    schedules = recorded.schedules
    own = schedules.own_ns.copy()
    for one in ranks:
        first = schedules.slice_of(one.of.rank).start + 1  # an op's own time is that before it
        spans = [slice(first + begin, first + end) for begin, end in pairwise(one.of.bounds.tolist())]
        others = [span for span, slow, used in zip(spans, one.slow, recorded.used, strict=True) if used and not slow]
        for step in np.flatnonzero(one.slow).tolist():
            mine = schedules.own_ns[spans[step]]
            alike = [schedules.own_ns[span] for span in others if span.stop - span.start == len(mine)]
            shorter = mine - _longer(mine, alike, float(one.over_ns[step]))
            own[spans[step]] = np.diff(np.rint(np.cumsum(shorter)), prepend=0).astype(np.int64)
    return replace(schedules, own_ns=own)


def _longer(mine: Int64, usual: Sequence[Int64], over_ns: float) -> Float64:
    """Where a step's time before its ops is ``over_ns`` longer, as far as the other steps, op by op, show it: a pause
    before the first message delays more than one that comes while the rank would wait.
    """
    above = np.maximum(mine - np.median(usual, axis=0), 0) if len(usual) else np.zeros(len(mine))
    longer = above * min(over_ns / max(float(above.sum()), 1.0), 1.0)
    left = mine - longer
    return np.asarray(longer + left * min((over_ns - longer.sum()) / max(float(left.sum()), 1.0), 1.0))


def _slow_steps(one: LoneRank, used: Bool, least_ns: float, view: View) -> LateSteps:
    over, deviation = _over_usual(one, used, view)
    slow = used & (over >= max(least_ns, _PLAIN * deviation))
    if view is not None and slow.any() and not _is_later(one.own_ns, over, slow, used):
        slow = np.zeros_like(slow)
    return LateSteps(one, slow, np.where(slow, over, 0))


def _over_usual(one: LoneRank, used: Bool, view: View) -> tuple[Int64, float]:
    """By how much each step is longer than usual steps are, and the standard deviation of those: of two kinds of steps
    that are both many, of the quicker ones, be the slow ones however alike.
    """
    times = one.seen(view)
    usual, deviation = densest(times[used])
    quicker = times[used] < usual - _PLAIN * deviation
    if quicker.mean() >= _MANY:
        usual, deviation = densest(times[used][quicker])
    return times - round(usual), deviation


def _least(view: View) -> float:
    """Share of the step by which a step is longer that counts as slow."""
    return _NOTICEABLE_PART if isinstance(view, str) else _NOTICEABLE


def _is_later(own_ns: Int64, over_ns: Int64, slow: Bool, used: Bool) -> bool:
    """Is the whole own time longer in slow steps, as far as its noise lets that be seen, and not only something else
    shorter?
    """
    usual = used & ~slow
    if not usual.any():
        return False
    whole, part = (float(times[slow].mean() - times[usual].mean()) for times in (own_ns, over_ns))
    rest = own_ns - over_ns
    error = math.sqrt(sum(float(rest[steps].var()) / max(int(steps.sum()) - 1, 1) for steps in (slow, usual)))
    return whole + _CHANCE * error >= _MAIN * part


def _lone_rank(result: AlignedJob, recorded: RecordedSchedules, rank: int) -> LoneRank:
    schedules, index = recorded.schedules, recorded.schedules.line_of(rank)
    span = schedules.slice_of(rank)
    kind, operand = schedules.kind[span], schedules.operand[span]
    marks = np.append(recorded.begin[index], recorded.end[index, -1])
    of_mark = {int(operand[op]): op for op in np.flatnonzero(kind == OpKind.MARK).tolist()}
    bounds = np.array([of_mark[int(mark)] for mark in marks], dtype=np.int64)
    progress = np.cumsum(schedules.own_ns[span])[bounds]
    rows = recorded.rows_between(result, rank, progress)
    return LoneRank(rank, bounds, np.diff(progress), rows, _parts_ns(result, recorded, rank))


def _parts_ns(result: AlignedJob, recorded: RecordedSchedules, rank: int) -> dict[str, Int64]:
    """As in :class:`LoneRank`, those that may be plainly longer in some step."""
    if result.partials[rank].has_device_work:
        return {}
    return StepParts.of(result, rank, recorded.steps).longest(_NOTICEABLE_PART * result.step_ns)


def views(ranks: Sequence[LoneRank]) -> tuple[View, ...]:
    """All of them, the whole own time first. In one part a delay is plain that the noise of the rest would hide."""
    return (None, *CAUSES, *dict.fromkeys(name for one in ranks for name in one.parts_ns))
