"""From aligned ranks to schedules that replay what was recorded.

A rank's own time is that of its ``Progress``. The rest follows from order: what blocked a rank, which collective ran
before which on a stream, and when each could start. Replayed unchanged, the schedules give the recorded times back.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob, job_windows
from perfscope.analyzers.job.deliveries import Deliveries, deliveries, of_used_steps
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.replay.engine import OpKind, ReplayResult, Schedules
from perfscope.analyzers.replay.gathers import unseen_waits
from perfscope.analyzers.replay.lanes import ProgramOps, RankLane, issued_beside, rank_lane, side_by_side
from perfscope.analyzers.replay.messages import awaited_at_once, unseen_messages
from perfscope.analyzers.replay.program import host_waits, issues, marks, other_draws, stalls, waits
from perfscope.analyzers.replay.rank_ops import RankOpNumbers, ReplayRankOps
from perfscope.analyzers.replay.stream_waits import StreamWaits, unseen_exchanges
from perfscope.frozen import dataclass
from perfscope.recording.metadata import DataLoaderMetadata
from perfscope.results.categories import TimeCategory
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NEVER, Bool, Int64

_OFTEN: Final = 0.5
"""Share of the batches from which waits that no device notices are those for busy workers."""
_NO_PAUSE: Final = 0.85
"""Share of the recorded step that the batches of workers that set its pace take at least."""


@dataclass(frozen=True, eq=False)
class RecordedSchedules:
    """Schedules of all ranks and what their marks mean.

    ``begin`` and ``end`` hold the mark at which each rank (line) begins and ends each recorded step (column);
    ``steps`` are the steps' numbers, ``used`` marks those that the analysis uses. ``row`` is each rank op's row in its
    rank's ``Collectives``; ``bound_ns`` [rank, step] when each rank began each step and, last, ended the last one,
    aligned; ``lead_ns`` is the part of each rank's ``Progress.lead_ns`` of the first step that is before its window,
    ``late`` its ``Progress.late``; ``assumed_ns`` [rank, step] its ``Steps.assumed_ns``. ``aligned`` are the ranks on
    the common clock. ``deliveries`` are those of each rank that the schedules hold it up for.
    """

    schedules: Schedules
    begin: Int64
    end: Int64
    steps: Int64
    used: Bool
    row: Int64
    bound_ns: Int64
    lead_ns: Int64
    late: Bool
    assumed_ns: Int64
    aligned: Bool
    deliveries: Mapping[int, Deliveries]
    with_hosts: Schedules | None
    """The same with hosts beside their devices, in the order of the program, where ranks that are not recorded come
    whenever the others do; None where the host of a rank is not known."""
    lanes: tuple[RankLane, ...]
    """Those of ``with_hosts`` rank by rank, with what they follow from."""

    @functools.cached_property
    def found_holds(self) -> dict[tuple[int, bool], tuple[Int64, Int64]]:
        """What ``pace`` has found of holds: (line, with hosts) -> its answer, which several ranks' pace rests on."""
        return {}

    def steps_ns(self, replayed: ReplayResult, assumed_ns: Int64 | None = None) -> Int64:
        """Length of each used step of the job; ``assumed_ns``: with this in place of its own."""
        begin, end = (replayed.mark_ns[marks[:, self.used]] for marks in (self.begin, self.end))
        assumed = self.assumed_ns if assumed_ns is None else assumed_ns
        first, last = job_windows(begin, end, assumed[:, self.used], self.aligned)
        return last - first

    def step_time_ns(self, replayed: ReplayResult) -> float:
        """The job's step time: the mean of ``steps_ns``."""
        return float(self.steps_ns(replayed).mean())

    def transfers_ns(self) -> dict[int, float]:
        """Rank -> what its transfers take per recorded step, exposed or not."""
        kind, operand = self.schedules.kind, self.schedules.operand
        found = {}
        for rank in self.schedules.ranks:
            span = self.schedules.slice_of(rank)
            issued = operand[span][kind[span] == OpKind.ISSUE]
            found[rank] = float(self.schedules.transfer_ns[issued].sum()) / len(self.steps)
        return found

    @property
    def settling(self) -> int:
        """Steps until ranks have found a new rhythm: a first step in which devices wait for busy workers begins where
        the one before, which is not replayed, was recorded to.
        """
        return int(any(found.holds_device for found in self.deliveries.values()))

    @functools.cached_property
    def hidden_loading(self) -> frozenset[int]:
        """The ranks whose workers do not set the pace, though their hosts waited for them: most ranks' hosts did so now
        and then, ahead of their devices. A host that comes out of a pause asks for batches faster than any device
        trains. One that waits alone has a slow loader.
        """
        hidden = {rank: found.share for rank, found in self.deliveries.items() if found.is_hidden}
        # Of few recorded batches one rank may happen to have waited for most.
        if 2 * len(hidden) <= len(self.deliveries) or median(hidden.values()) >= _OFTEN:
            return frozenset()
        return frozenset(hidden)

    def loading_step_ns(self, result: AlignedJob) -> dict[int, float]:
        """Rank -> the recorded step, where devices wait for the workers; what its batches took, where only hosts do
        that are ahead, where workers idle between the batches of a step, or where most batches were waited for and
        that is plainly less, because a rank paused.
        """
        steps = {}
        for rank, found in self.deliveries.items():
            took = None if found.batch_ns is None else found.batch_ns * result.batches_per_step[rank]
            paused = took is not None and took < _NO_PAUSE * result.step_ns and found.share >= _OFTEN
            if found.holds_device and not paused:
                steps[rank] = result.step_ns
            elif took is not None:
                steps[rank] = min(took, result.step_ns)
        return steps

    def first_progress_ns(self, result: AlignedJob, rank: int) -> int:
        """A rank's own progress where its schedule begins."""
        own = result.partials[rank].progress
        begin = result.clocks.to_own(rank, int(self.schedules.start_ns[self.schedules.line_of(rank)]))
        return begin - int(own.own.start_ns[0]) - int(own.blocked.before(np.array([begin]))[0])

    def rows_between(self, result: AlignedJob, rank: int, progress_ns: Int64) -> Int64:
        """Ns of each category of a rank's own time (columns) between consecutive moments of its progress (lines)."""
        own = result.partials[rank].progress
        if len(own.own) == 0:
            return np.zeros((len(progress_ns) - 1, len(TimeCategory)), dtype=np.int64)
        passed = self.first_progress_ns(result, rank)
        return own.unblocked().totals(progress_ns[:-1] + passed, progress_ns[1:] + passed)


def record_schedules(result: AlignedJob, loaders: Mapping[int, DataLoaderMetadata] | None = None) -> RecordedSchedules:
    """The schedules of all ranks over all recorded steps that they share. ``loaders``: of ranks of which it is known,
    the one that loads their data.
    """
    steps = distinct(np.concatenate((result.matched_before.instances.step, result.steps)))
    for partial in result.partials.values():
        steps = steps[np.isin(steps, partial.steps.number)]
    ranks = tuple(sorted(result.partials))
    begin = np.arange(len(ranks) * len(steps), dtype=np.int64).reshape(len(ranks), len(steps))
    end = begin + begin.size
    found = {rank: _deliveries(result, rank, (loaders or {}).get(rank)) for rank in ranks}
    builder = _ScheduleBuilder(result, steps, found)
    for index, rank in enumerate(ranks):
        builder.add(rank, begin[index], end[index])
    schedules, with_hosts = builder.schedules(ranks, marks=2 * begin.size)
    firsts = [(own, int(own.steps.indices_of(steps[:1])[0])) for _, own in sorted(result.partials.items())]
    return RecordedSchedules(
        schedules=schedules,
        begin=begin,
        end=end,
        steps=steps,
        used=np.isin(steps, result.steps),
        row=np.concatenate([own.row for own in builder.rank_ops]),
        bound_ns=np.stack(builder.bound_ns),
        lead_ns=np.array([_lead_before_window_ns(own, index) for own, index in firsts], dtype=np.int64),
        late=np.array([own.progress.late[index] for own, index in firsts], dtype=np.bool_),
        assumed_ns=result.assumed_ns(steps),
        aligned=result.clocks.aligned,
        deliveries=found,
        with_hosts=with_hosts,
        lanes=tuple(builder.lanes),
    )


def _deliveries(result: AlignedJob, rank: int, loader: DataLoaderMetadata | None) -> Deliveries:
    workers, fetched_ns = (None, None) if loader is None else (loader.num_workers, loader.fetched_ns)
    taking_ns, in_turn, partial = result.taking_at_most_ns[rank], result.workers_in_turn, result.partials[rank]
    found = deliveries(partial, workers, fetched_ns, taking_ns, in_turn)
    return of_used_steps(found, partial, result.steps)


def _lead_before_window_ns(partial: RankPartial, index: int) -> int:
    """The host's time in a step up to the launch of its first work, before the device's window of it begins."""
    before = int(partial.steps.start_ns[index] - partial.steps.host_start_ns[index])
    return max(0, min(int(partial.progress.lead_ns[index]), before))


def _own_and_lag(ops: ProgramOps, first_ns: int, blocked: Intervals) -> tuple[Int64, Int64]:
    """Own time before each op, counted from ``first_ns``, and its lag.

    An op inside a blocked stretch happens that much after the rank came to it, and one issued before ``first_ns`` that
    much before.
    """
    begin = np.array([first_ns], dtype=np.int64)
    own = ops.time_ns - first_ns - (blocked.before(ops.time_ns) - blocked.before(begin))
    lag = ops.lag_ns.copy()
    inside = np.flatnonzero(blocked.covers(ops.time_ns) & np.isin(ops.kind, (OpKind.ISSUE, OpKind.MARK)))
    holding = np.searchsorted(blocked.start_ns, ops.time_ns[inside], side="right") - 1
    lag[inside] = ops.time_ns[inside] - np.maximum(blocked.start_ns[holding], first_ns)
    early = ops.time_ns < first_ns
    lag[early], own[early] = ops.time_ns[early] - first_ns, 0
    return np.diff(own, prepend=0), lag


class _Columns:
    """Columns of the ops of all ranks: kind, operand, own time, lag."""

    def __init__(self) -> None:
        self._first = [0]
        self._columns: list[tuple[Int64, ...]] = []

    def add(self, ops: ProgramOps, own_ns: Int64, lag_ns: Int64) -> None:
        """Those of the next rank."""
        self._columns.append((ops.kind, ops.operand, own_ns, lag_ns))
        self._first.append(self._first[-1] + len(ops.kind))

    def into(self, schedules: Schedules) -> Schedules:
        """``schedules`` with these ops."""
        kind, operand, own, lag = (np.concatenate(column) for column in zip(*self._columns, strict=True))
        first = np.array(self._first, dtype=np.int64)
        return replace(schedules, first=first, kind=kind, operand=operand, own_ns=own, lag_ns=lag)


class _ScheduleBuilder:
    """Collects the ranks' schedules."""

    def __init__(self, result: AlignedJob, steps: Int64, found: Mapping[int, Deliveries]) -> None:
        self._result = result
        self._deliveries = found
        self._awaited = awaited_at_once(result.partials.values())
        self._calls = StreamWaits.of(result.partials.values())
        self._steps = steps
        self._numbers = RankOpNumbers(result.matched_before)
        self._holds: list[int] = []
        self._host_holds: list[int] = []
        self._starts: list[int] = []
        self._notes = 0
        self.bound_ns: list[Int64] = []
        """When each rank (item) began each step and ended the last one, aligned."""
        self._columns = _Columns()
        self._ops: list[ProgramOps] = []
        self._sorts: dict[tuple[str, int | None], int] = {}
        self.rank_ops: list[ReplayRankOps] = []
        self.lanes: list[RankLane] = []
        """Of those ranks whose hosts are known."""

    def add(self, rank: int, begin: Int64, end: Int64) -> None:
        """Write one rank's schedule; ``begin`` and ``end`` are its marks."""
        partial = self._result.partials[rank]
        clocks = self._result.clocks
        chosen = partial.steps.indices_of(self._steps)
        opens, closes = partial.steps.start_ns[chosen], partial.steps.end_ns[chosen]
        first, last = int(opens[0]), int(closes[-1])
        mine = self._numbers.of(rank, partial, first, last)
        held, lane = self._deliveries[rank], partial.progress.host
        holds, loaded = stalls(partial, held.on_ns, -held.stall_ns, len(self._holds) + np.arange(len(held)))
        parts = (
            issues(partial, mine, self._sorts),
            waits(partial, mine, first, last),
            marks(partial, opens, begin),
            marks(partial, closes, end),
            holds,
        )
        ops = ProgramOps.in_order(*(part.as_it_happened() for part in parts))
        self._columns.add(ops, *_own_and_lag(ops, first, partial.progress.blocked))
        self._holds += clocks.to_common(rank, held.not_before_ns).tolist()
        self._host_holds += np.where(loaded == NEVER, NEVER, clocks.to_common(rank, loaded)).tolist()
        if lane is not None:
            draws = other_draws(lane, holds, (first, last), len(self._holds))
            self._holds += [NEVER] * len(draws.kind)
            self._host_holds += [NEVER] * len(draws.kind)
            unseen = (
                unseen_waits(partial, lane, mine, (first, last)),
                unseen_messages(partial, lane, mine, (first, last), self._awaited),
                unseen_exchanges(partial, lane, mine, (first, last), self._calls),
            )
            waiting = host_waits(partial, lane, mine, (first, last), self._notes)
            ops = ProgramOps.in_order(*parts, draws, *unseen, *waiting)
            self.lanes.append(rank_lane(partial.progress, lane, ops, first))
            self._ops.append(ops)
            self._notes += int((ops.kind == OpKind.NOTE).sum())
        self.rank_ops.append(mine)
        self.bound_ns.append(clocks.to_common(rank, np.append(opens, last)))
        self._starts.append(clocks.to_common(rank, first))

    def schedules(self, ranks: tuple[int, ...], marks: int) -> tuple[Schedules, Schedules | None]:
        """Those of all ranks, side by side; and with hosts beside their devices, where all hosts are known."""
        nothing = np.empty(0, dtype=np.int64)
        both = Schedules(
            ranks=ranks,
            start_ns=np.array(self._starts, dtype=np.int64),
            first=nothing,
            kind=nothing,
            operand=nothing,
            own_ns=nothing,
            lag_ns=nothing,
            instance=np.concatenate([own.instance for own in self.rank_ops]),
            previous=np.concatenate([own.previous for own in self.rank_ops]),
            gap_ns=np.concatenate([own.gap_ns for own in self.rank_ops]),
            transfer_ns=np.concatenate([own.transfer_ns for own in self.rank_ops]),
            floor_ns=self._numbers.floor_ns(),
            hold_ns=np.array(self._holds, dtype=np.int64),
            marks=marks,
            after=np.concatenate([own.after for own in self.rank_ops]),
            after_gap_ns=np.concatenate([own.after_gap_ns for own in self.rank_ops]),
            chained=self._numbers.chained(),
        )
        if len(self.lanes) < len(ranks):
            return self._columns.into(both), None
        columns = _Columns()
        for place, beside in enumerate(issued_beside(list(zip(self._ops, self.lanes, strict=True)))):
            own = self.lanes[place].lanes
            own = replace(own, device_lag_ns=np.where(beside, NEVER, own.device_lag_ns))
            self.lanes[place] = replace(self.lanes[place], lanes=own)
            columns.add(self._ops[place], own.work_ns, own.device_lag_ns)
        lanes = side_by_side([own.lanes for own in self.lanes], np.array(self._host_holds, dtype=np.int64))
        # Those that are not recorded come after the others, whenever these do.
        free = np.full(len(both.floor_ns), NEVER)
        return self._columns.into(both), replace(columns.into(both), lanes=lanes, floor_ns=free)
