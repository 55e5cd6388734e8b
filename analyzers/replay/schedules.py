"""From aligned ranks to schedules that replay what was recorded.

A rank's own time is that of its ``Progress``. The rest follows from order: what blocked a rank, which collective ran
before which on a stream, and when each could start. Replayed unchanged, the schedules give the recorded times back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.deliveries import Deliveries, deliveries
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.replay.engine import OpKind, ReplayResult, Schedules
from perfscope.analyzers.replay.rank_ops import RankOpNumbers, ReplayRankOps
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NONE, Bool, Int64


@dataclass(frozen=True, eq=False)
class RecordedSchedules:
    """Schedules of all ranks and what their marks mean.

    ``begin`` and ``end`` hold the mark at which each rank (line) begins and ends each recorded step (column);
    ``steps`` are the steps' numbers, ``used`` marks those that the analysis uses. ``row`` is each rank op's row in its
    rank's ``Collectives``; ``begin_ns`` [rank, step] when each rank began each step, aligned; ``lead_ns`` is the part
    of each rank's ``Progress.lead_ns`` of the first step that is before its window, ``late`` its ``Progress.late``.
    ``deliveries`` are those of each rank that the schedules hold it up for.
    """

    schedules: Schedules
    begin: Int64
    end: Int64
    steps: Int64
    used: Bool
    row: Int64
    begin_ns: Int64
    lead_ns: Int64
    late: Bool
    deliveries: Mapping[int, Deliveries]

    def windows_ns(self, replayed: ReplayResult) -> Int64:
        """Length of each rank's (lines) window in each used step (columns)."""
        return (replayed.mark_ns[self.end] - replayed.mark_ns[self.begin])[:, self.used]

    def slowest_ns(self, replayed: ReplayResult) -> Int64:
        """The used windows of the rank whose mean window is longest; their mean is the job's step time."""
        windows = self.windows_ns(replayed)
        return np.asarray(windows[int(windows.sum(axis=1).argmax())])

    def first_progress_ns(self, result: AlignedJob, rank: int) -> int:
        """A rank's own progress where its schedule begins."""
        own = result.partials[rank].progress
        begin = result.clocks.to_own(rank, int(self.schedules.start_ns[self.schedules.ranks.index(rank)]))
        return begin - int(own.own.start_ns[0]) - int(own.blocked.before(np.array([begin]))[0])

    def rows_between(self, result: AlignedJob, rank: int, progress_ns: Int64) -> Int64:
        """Ns of each category of a rank's own time (columns) between consecutive moments of its progress (lines)."""
        own = result.partials[rank].progress
        if len(own.own) == 0:
            return np.zeros((len(progress_ns) - 1, len(TimeCategory)), dtype=np.int64)
        passed = self.first_progress_ns(result, rank)
        return own.unblocked().totals(progress_ns[:-1] + passed, progress_ns[1:] + passed)


def record_schedules(result: AlignedJob, workers: Mapping[int, int] | None = None) -> RecordedSchedules:
    """The schedules of all ranks over all recorded steps that they share. ``workers``: how many load data, of the ranks
    of which that is known.
    """
    steps = np.unique(np.concatenate((result.matched_before.instances.step, result.steps)))
    for partial in result.partials.values():
        steps = steps[np.isin(steps, partial.steps.number)]
    ranks = tuple(sorted(result.partials))
    begin = np.arange(len(ranks) * len(steps), dtype=np.int64).reshape(len(ranks), len(steps))
    end = begin + begin.size
    found = {rank: deliveries(result.partials[rank], (workers or {}).get(rank)) for rank in ranks}
    builder = _ScheduleBuilder(result, steps, found)
    for index, rank in enumerate(ranks):
        builder.add(rank, begin[index], end[index])
    firsts = [(own, int(own.steps.indices_of(steps[:1])[0])) for _, own in sorted(result.partials.items())]
    return RecordedSchedules(
        schedules=builder.schedules(ranks, marks=2 * begin.size),
        begin=begin,
        end=end,
        steps=steps,
        used=np.isin(steps, result.steps),
        row=np.concatenate([own.row for own in builder.rank_ops]),
        begin_ns=np.stack(builder.begin_ns),
        lead_ns=np.array([_lead_before_window_ns(own, index) for own, index in firsts], dtype=np.int64),
        late=np.array([own.progress.late[index] for own, index in firsts], dtype=np.bool_),
        deliveries=found,
    )


def _lead_before_window_ns(partial: RankPartial, index: int) -> int:
    """The host's time in a step up to the launch of its first work, before the device's window of it begins."""
    before = int(partial.steps.start_ns[index] - partial.steps.host_start_ns[index])
    return max(0, min(int(partial.progress.lead_ns[index]), before))


@dataclass(frozen=True, eq=False)
class _Ops:
    """Ops of one rank with the time of each, own clock."""

    time_ns: Int64
    kind: Int64
    operand: Int64
    lag_ns: Int64

    @classmethod
    def of(cls, kind: OpKind, time_ns: Int64, operand: Int64, lag_ns: Int64 | None = None) -> _Ops:
        """Ops of one kind."""
        lag = np.zeros(len(time_ns), dtype=np.int64) if lag_ns is None else lag_ns
        return cls(time_ns, np.full(len(time_ns), kind, dtype=np.int64), operand.astype(np.int64), lag)

    @classmethod
    def in_order(cls, *parts: _Ops) -> _Ops:
        """All of them by time; at one moment first the ends of waits and stalls, then marks, then what is issued."""
        time, kind, operand, lag = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("time_ns", "kind", "operand", "lag_ns")
        )
        order = np.lexsort((_AT_ONE_MOMENT[kind], time))
        return cls(time[order], kind[order], operand[order], lag[order])

    def own_and_lag(self, first_ns: int, blocked: Intervals) -> tuple[Int64, Int64]:
        """Own time before each op, counted from ``first_ns``, and its lag.

        An op inside a blocked stretch happens that much after the rank came to it, and one issued before ``first_ns``
        that much before.
        """
        begin = np.array([first_ns], dtype=np.int64)
        own = self.time_ns - first_ns - (blocked.before(self.time_ns) - blocked.before(begin))
        lag = self.lag_ns.copy()
        inside = np.flatnonzero(blocked.covers(self.time_ns) & np.isin(self.kind, (OpKind.ISSUE, OpKind.MARK)))
        holding = np.searchsorted(blocked.start_ns, self.time_ns[inside], side="right") - 1
        lag[inside] = self.time_ns[inside] - np.maximum(blocked.start_ns[holding], first_ns)
        early = self.time_ns < first_ns
        lag[early], own[early] = self.time_ns[early] - first_ns, 0
        return np.diff(own, prepend=0), lag


_AT_ONE_MOMENT: Final = np.array(
    [{OpKind.WAIT: 0, OpKind.HOLD: 1, OpKind.MARK: 2, OpKind.ISSUE: 3}[kind] for kind in OpKind]
)


class _ScheduleBuilder:
    """Collects the ranks' schedules."""

    def __init__(self, result: AlignedJob, steps: Int64, found: Mapping[int, Deliveries]) -> None:
        self._result = result
        self._deliveries = found
        self._steps = steps
        self._numbers = RankOpNumbers(result.matched_before)
        self._holds: list[int] = []
        self._starts: list[int] = []
        self.begin_ns: list[Int64] = []
        """When each rank (item) began each step, aligned."""
        self._first = [0]
        self._columns: list[tuple[Int64, ...]] = []
        self.rank_ops: list[ReplayRankOps] = []

    def add(self, rank: int, begin: Int64, end: Int64) -> None:
        """Write one rank's schedule; ``begin`` and ``end`` are its marks."""
        partial = self._result.partials[rank]
        clocks = self._result.clocks
        chosen = partial.steps.indices_of(self._steps)
        opens, closes = partial.steps.start_ns[chosen], partial.steps.end_ns[chosen]
        first, last = int(opens[0]), int(closes[-1])
        mine = self._numbers.of(rank, partial, first, last)
        held = self._deliveries[rank]
        ops = _Ops.in_order(
            _Ops.of(OpKind.ISSUE, mine.ready_ns, mine.number),
            _waits(partial, mine, first, last),
            _Ops.of(OpKind.MARK, opens, begin),
            _Ops.of(OpKind.MARK, closes, end),
            _Ops.of(OpKind.HOLD, held.on_ns, len(self._holds) + np.arange(len(held)), -held.stall_ns),
        )
        own, lag = ops.own_and_lag(first, partial.progress.blocked)
        self._columns.append((ops.kind, ops.operand, own, lag))
        self.rank_ops.append(mine)
        self.begin_ns.append(clocks.to_common(rank, opens))
        self._holds += clocks.to_common(rank, held.not_before_ns).tolist()
        self._starts.append(clocks.to_common(rank, first))
        self._first.append(self._first[-1] + len(own))

    def schedules(self, ranks: tuple[int, ...], marks: int) -> Schedules:
        """Those of all ranks, side by side."""
        kind, operand, own, lag = (np.concatenate(column) for column in zip(*self._columns, strict=True))
        return Schedules(
            ranks=ranks,
            start_ns=np.array(self._starts, dtype=np.int64),
            first=np.array(self._first, dtype=np.int64),
            kind=kind,
            operand=operand,
            own_ns=own,
            lag_ns=lag,
            instance=np.concatenate([own.instance for own in self.rank_ops]),
            previous=np.concatenate([own.previous for own in self.rank_ops]),
            gap_ns=np.concatenate([own.gap_ns for own in self.rank_ops]),
            transfer_ns=np.concatenate([own.transfer_ns for own in self.rank_ops]),
            floor_ns=self._numbers.floor_ns(),
            hold_ns=np.array(self._holds, dtype=np.int64),
            marks=marks,
            after=np.concatenate([own.after for own in self.rank_ops]),
            after_gap_ns=np.concatenate([own.after_gap_ns for own in self.rank_ops]),
        )


def _waits(partial: RankPartial, mine: ReplayRankOps, first_ns: int, last_ns: int) -> _Ops:
    """One rank's waits for collectives of its schedule."""
    stretches, blocker = partial.progress.blocked, partial.progress.blocker
    number = np.full(len(partial.collectives), NONE, dtype=np.int64)
    number[mine.row] = mine.number
    used = (stretches.end_ns > first_ns) & (stretches.end_ns <= last_ns) & (number[blocker] != NONE)
    until, blocker = stretches.end_ns[used], blocker[used]
    return _Ops.of(OpKind.WAIT, until, number[blocker], until - partial.collectives.end_ns[blocker])
