"""The recorded schedules in a form that settings can edit: ops are stretched, taken out, moved and put in.

``replay.engine.Schedules`` are arrays, quick to replay; ``EditableSchedules`` hold the same as objects. A setting edits
them, ``StepOps`` one step of one rank at a time, and ``compiled`` makes arrays of the outcome.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.rank.host_lane import HostTime
from perfscope.analyzers.replay.engine import Lanes, OpKind, ReplayResult, Schedules
from perfscope.analyzers.replay.lanes import side_by_side
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.analyzers.whatif.hosts import (
    HOST_ROWS,
    OF_DEVICE_ROWS,
    OWN_ROWS,
    HostOfRank,
    HostPart,
    host_of,
    in_whole_ns,
    lanes_of,
    launched_anew,
)
from perfscope.grouping import grouped
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NEVER, NONE, Float64, Int64

SMALLEST: Final = 4096
"""Collectives of fewer bytes move no parameters and no gradients: losses, norms, counters."""


@dataclass(eq=False)
class Collective:
    """A collective or message of ``size`` ranks. ``bytes`` as in ``Collectives`` (None: not known); ``floor_ns`` is the
    last arrival of a rank that is not in the recording.
    """

    kind: str
    group: int
    bytes: int | None
    size: int
    step: int | None
    dtype: str | None = None
    floor_ns: int = NEVER


@dataclass(eq=False)
class RankOp:
    """One rank's part in a collective: on which ``lane`` (stream) of the rank, how long after it could start it did
    (``gap_ns``), and how long it took from the last arrival (``transfer_ns``).
    """

    rank: int
    collective: Collective
    lane: int
    gap_ns: float = 0.0
    transfer_ns: float = 0.0
    backward: bool = False
    """Issued by autograd, as far as that is recorded."""
    after: RankOp | None = None
    """The rank op of another stream whose end it waits for as well: its ``gap_ns`` includes that."""
    after_gap_ns: float = 0.0
    """From that end to its start."""
    host_ns: float | None = None
    """What issuing it takes the host; None: as long as it usually does."""

    @property
    def bytes(self) -> int:
        """Of its collective; 0 where not known."""
        return self.collective.bytes or 0

    def moves(self, *kinds: str) -> bool:
        """Is it of one of these kinds, and moves parameters or gradients?"""
        return self.collective.kind in kinds and self.bytes >= SMALLEST


_EARLY_SHARE: Final = 0.1
"""Share of the bytes that a group moves up to which those before the backward are others: statistics, losses."""
_FEW_STEPS: Final = 2
"""Of no more recorded steps, each counts as it is replayed."""

StepCollectives = dict[tuple[int, int], list[RankOp]]
"""(rank, step) -> its rank ops of one sort in the order of issue."""


@dataclass(eq=False)
class ScheduleOp:
    """One op: the rank's own time before it by category (ns), and what it then does.

    ``rank_op`` is set where ``kind`` is ISSUE, WAIT or JOIN, ``mark`` where MARK, SYNC or NOTE, ``hold_ns`` where HOLD.
    Beside a ``host``, own time and ``lag_ns`` are the device's alone.
    """

    kind: OpKind
    own_ns: Float64
    lag_ns: float = 0.0
    rank_op: RankOp | None = None
    mark: int = NONE
    hold_ns: int = NEVER
    doubtful: bool = False
    """A HOLD for a delivery of which it is not sure that its moment is fixed."""
    step: int | None = None
    """The job's step number in which this happens; None before the first."""
    host: HostPart | None = None
    """What the host does before it; None where that is part of the rank's own time, or nothing."""

    def scale(self, category: TimeCategory, factor: float) -> None:
        """The time before it that belongs to a category takes ``factor`` times as long."""
        self.own_ns[category] *= factor
        if self.host is not None:
            self.host.scale(category, factor)

    def add(self, category: TimeCategory, ns: float) -> None:
        """There is that much more of the device's own time before it."""
        self.own_ns[category] += ns
        if self.host is not None:
            self.host.launches[:, OF_DEVICE_ROWS + category] += ns

    def spend(self, ns: float) -> None:
        """The host's operators take that much more (negative: less) before it."""
        if self.host is not None:
            self.host.own_ns[HostTime.OPERATORS] = max(float(self.host.own_ns[HostTime.OPERATORS]) + ns, 0.0)

    @property
    def issued(self) -> RankOp | None:
        """The rank op that it issues; None where it does something else."""
        return self.rank_op if self.kind is OpKind.ISSUE else None

    @classmethod
    def of(cls, kind: OpKind, rank_op: RankOp, step: int | None, lag_ns: float = 0.0) -> ScheduleOp:
        """An op without own time before it, which issues a rank op or waits for it."""
        return cls(kind, np.zeros(len(TimeCategory)), lag_ns, rank_op, step=step)


@dataclass(eq=False)
class EditableSchedules:
    """All ranks' ops, in order. ``start_ns`` is when each rank starts."""

    recorded: RecordedSchedules
    ops: dict[int, list[ScheduleOp]]
    start_ns: dict[int, int]
    marks: int
    lanes: int
    """Lanes in use: a new one takes this number."""
    floor_step_ns: dict[int, float] = field(default_factory=dict)
    """Rank -> host time per step that does not depend on the rest; the step cannot be shorter."""
    loading_step_ns: dict[int, float] = field(default_factory=dict)
    """Rank -> time in which its loader workers deliver the batches of a step, where they set its pace."""
    hosts: Mapping[int, HostOfRank] = field(default_factory=dict)
    """Of every rank, where hosts are replayed beside their devices; else empty."""
    steps_alike: bool = True
    """The change is the same in all steps."""
    settling: int = 0
    """Steps until ranks have found a new rhythm: the first one starts as far apart on them as it was recorded."""

    @functools.cached_property
    def steps(self) -> frozenset[int]:
        """Numbers of the recorded steps."""
        return frozenset(self.recorded.steps.tolist())

    def issued(self) -> Iterator[RankOp]:
        """Every rank op, rank by rank in the order of issue."""
        return filter(None, (op.issued for op in chain.from_iterable(self.ops.values())))

    def by_step(self, kind: str) -> StepCollectives:
        """The collectives of a kind that move parameters or gradients, rank by rank and step by step."""
        return grouped(
            ((rank_op.rank, step), rank_op)
            for rank_op in self.issued()
            if (step := rank_op.collective.step) in self.steps and rank_op.moves(kind)
        )

    def of_gradients(self, kind: str) -> StepCollectives:
        """Those of them in the group that moves most bytes of each rank; empty where none is recorded with its size. A
        group that moves them before the backward as well moves activations (tensor parallelism), unless there is no
        other.
        """
        of_rank = grouped((rank, rank_ops) for (rank, _), rank_ops in self.by_step(kind).items())
        groups = {rank: _group_of_gradients(steps) for rank, steps in of_rank.items()}
        of_group = (
            (key, [own for own in rank_ops if own.collective.group == groups[key[0]]])
            for key, rank_ops in self.by_step(kind).items()
        )
        return {key: rank_ops for key, rank_ops in of_group if rank_ops}

    def collectives(self) -> dict[Collective, list[RankOp]]:
        """Every collective with its rank ops, in the order in which they are first issued."""
        return grouped((rank_op.collective, rank_op) for rank_op in self.issued())

    def every_step(self, *, whole: bool = False) -> Iterator[StepOps]:
        """Every step of every rank; its ops are read when it is its turn."""
        for rank, ops in self.ops.items():
            for step in sorted({op.step for op in ops if op.step is not None}):
                yield StepOps(self, rank, step, whole=whole)

    def without(self, rank_ops: set[RankOp]) -> None:
        """Take these rank ops out, with all waits for them, and what issuing them takes the hosts. The other own time
        around them stays.
        """
        for rank, ops in self.ops.items():
            for op in ops:
                if op.issued in rank_ops:
                    op.spend(-self.issuing_ns(op))
            self.ops[rank], _ = without(ops, rank_ops)

    def issuing_ns(self, op: ScheduleOp) -> float:
        """What an op takes a host to issue; 0 without hosts, and where it issues nothing."""
        issued = op.issued
        if issued is None or not self.hosts:
            return 0.0
        return self.hosts[issued.rank].usually_issuing_ns if issued.host_ns is None else issued.host_ns

    def compiled(self) -> Schedules:
        """What the engine replays."""
        ranks = tuple(sorted(self.ops))
        numbers: dict[RankOp, int] = {}
        instances: dict[Collective, int] = {}
        last: dict[tuple[int, int], int] = {}
        columns: list[tuple[int, ...]] = []
        every = [op for rank in ranks for op in self.ops[rank]]
        for rank_op in filter(None, (op.issued for op in every)):
            instance = instances.setdefault(rank_op.collective, len(instances))
            previous = last.get((rank_op.rank, rank_op.lane), NONE)
            after = NONE if rank_op.after is None else numbers.get(rank_op.after, NONE)
            # Without the one that it waited for it starts at once.
            gap = rank_op.gap_ns if rank_op.after is None or after != NONE else 0.0
            columns.append((
                instance, previous, round(gap), round(rank_op.transfer_ns), after, round(rank_op.after_gap_ns),
            ))  # fmt: skip
            last[rank_op.rank, rank_op.lane] = numbers[rank_op] = len(numbers)
        holds = [op.hold_ns for op in every if op.kind is OpKind.HOLD]
        number_of_hold = iter(range(len(holds)))
        operand = [
            numbers[op.rank_op]
            if op.rank_op is not None
            else next(number_of_hold)
            if op.kind is OpKind.HOLD
            else op.mark
            for op in every
        ]
        of_rank_ops = np.array(columns, dtype=np.int64).reshape(-1, 6)
        return Schedules(
            ranks=ranks,
            start_ns=np.array([self.start_ns[rank] for rank in ranks], dtype=np.int64),
            first=np.cumsum([0, *(len(self.ops[rank]) for rank in ranks)]),
            kind=np.array([op.kind for op in every], dtype=np.int64),
            operand=np.array(operand, dtype=np.int64),
            own_ns=np.concatenate([in_whole_ns([op.own_ns for op in self.ops[rank]]) for rank in ranks]),
            lag_ns=np.array([round(op.lag_ns) for op in every], dtype=np.int64),
            instance=of_rank_ops[:, 0],
            previous=of_rank_ops[:, 1],
            gap_ns=of_rank_ops[:, 2],
            transfer_ns=of_rank_ops[:, 3],
            floor_ns=np.array([collective.floor_ns for collective in instances], dtype=np.int64),
            hold_ns=np.array(holds, dtype=np.int64),
            marks=self.marks,
            after=of_rank_ops[:, 4],
            after_gap_ns=of_rank_ops[:, 5],
            lanes=self._lanes(ranks) if self.hosts else None,
        )

    def _lanes(self, ranks: Sequence[int]) -> Lanes:
        lanes = []
        for rank in ranks:
            ops = self.ops[rank]
            lags = [float(op.lag_ns) for op in ops]
            lanes.append(lanes_of([op.own_ns for op in ops], lags, [op.host for op in ops], self.hosts[rank].lead_ns))
        every = chain.from_iterable(self.ops[rank] for rank in ranks)
        return side_by_side(lanes, np.array([op.hold_ns for op in every if op.kind is OpKind.HOLD], dtype=np.int64))

    def step_ns(self, replayed: ReplayResult, unchanged: ReplayResult) -> float:
        """The job's step time in a replay of these schedules. It misses of the measured step what the replay of the
        ``unchanged`` steps misses: that is taken out.
        """
        measured = float(self.recorded.slowest_ns(unchanged).mean())
        recorded_ns = self.recorded.windows_ns(unchanged).astype(np.float64)
        changed_ns = self._as_the_others(self.recorded.windows_ns(replayed).astype(np.float64), recorded_ns)
        predicted = self._settled_ns(changed_ns) * (measured / self._settled_ns(recorded_ns))
        predicted = max(predicted, self._host_paced_ns(replayed, unchanged))
        return max([predicted, *self.floor_step_ns.values(), *self.loading_step_ns.values()])

    def _host_paced_ns(self, replayed: ReplayResult, unchanged: ReplayResult) -> float:
        """What a step takes the slowest host that never waits, less what its device was quicker before the change. A
        device that has come behind its host is quicker than its host only until it has caught up.
        """
        (host, _), (before, device) = self._paces_ns(replayed), self._paces_ns(unchanged)
        return host - max(before - device, 0.0)

    def _paces_ns(self, replayed: ReplayResult) -> tuple[float, float]:
        """(the slowest host's time from one step to the next, the slowest device's); 0 without hosts."""
        begin = self.recorded.begin[:, self.recorded.used]
        if replayed.host_mark_ns is None or begin.shape[1] < 2:
            return 0.0, 0.0
        steps = begin.shape[1] - 1
        marks = (replayed.host_mark_ns, replayed.mark_ns)
        host, device = (float((mark_ns[begin[:, -1]] - mark_ns[begin[:, 0]]).max()) / steps for mark_ns in marks)
        return host, device

    @property
    def has_doubtful_loading(self) -> bool:
        """Is it of some rank not sure whether its loader workers set its pace?"""
        return any(found.longest_ns and not found.sure for found in self.recorded.deliveries.values())

    def scale(self, category: TimeCategory, factor: float) -> None:
        """All ranks' own time of a category takes ``factor`` times as long."""
        for op in chain.from_iterable(self.ops.values()):
            op.scale(category, factor)

    def without_host_waits(self, share: float) -> None:
        """Hosts wait for their devices for ``share`` of the time; 0: they do not wait at all."""
        kinds = (OpKind.SYNC, OpKind.JOIN)
        for rank, ops in self.ops.items():
            if share == 0:
                self.ops[rank], _ = left_out(ops, lambda op: op.kind in kinds)
            for op in ops if share else ():
                if op.kind in kinds and op.host is not None:
                    op.host.lag_ns -= (1 - share) * op.host.waited_ns

    def at_least(self, rank: int, step_ns: float) -> None:
        """Host time per step of a rank that does not depend on the rest."""
        self.floor_step_ns[rank] = max(self.floor_step_ns.get(rank, 0.0), step_ns)

    def free_loading(self, ranks: Iterable[int], *, doubtful: bool = False) -> None:
        """Workers do not set the pace of these ranks any more (``doubtful``: nor where that was not sure). Their stalls
        are own time as all other.
        """
        for rank in ranks:
            if not doubtful or not self.recorded.deliveries[rank].sure:
                self.loading_step_ns.pop(rank, None)
            for op in self.ops[rank]:
                if op.kind is OpKind.HOLD and (op.doubtful or not doubtful):
                    op.hold_ns, op.lag_ns = NEVER, 0.0
                    if op.host is not None:
                        op.host.lag_ns = 0.0

    @property
    def waits_for_absent(self) -> bool:
        """Does a rank wait for one that is not in the recording?"""
        return any(collective.floor_ns != NEVER for collective in self.collectives())

    def free_of_absent(self) -> None:
        """Ranks that are not in the recording are never the last to arrive, as if the change helped them most."""
        for collective in self.collectives():
            collective.floor_ns = NEVER

    def _as_the_others(self, changed_ns: Float64, recorded_ns: Float64) -> Float64:
        """The windows with the first step changed as the others are. How far hosts are ahead of their devices where it
        begins is recorded, not replayed: where the change makes that more or less, it does so in this step.
        """
        alike = self.hosts and self.steps_alike and self.recorded.used[0] and changed_ns.shape[1] > _FEW_STEPS
        if not alike:
            return changed_ns
        changed_ns = changed_ns.copy()
        changed_ns[:, 0] = recorded_ns[:, 0] * np.median(changed_ns[:, 1:] / recorded_ns[:, 1:], axis=1)
        return changed_ns

    def _settled_ns(self, windows_ns: Float64) -> float:
        """Mean step of the slowest rank, without the steps in which ranks still settle."""
        settled = windows_ns[:, min(self.settling, windows_ns.shape[1] - 1) :]
        return float(settled.mean(axis=1).max())


def _group_of_gradients(steps: Sequence[Sequence[RankOp]]) -> int:
    """The group of one rank's reductions of gradients, step by step."""
    moved: Counter[int] = Counter()
    early: Counter[int] = Counter()
    for rank_ops in steps:
        first = next((place for place, own in enumerate(rank_ops) if own.backward), 0)
        for place, own in enumerate(rank_ops):
            moved[own.collective.group] += own.bytes
            early[own.collective.group] += own.bytes if place < first else 0
    late = [group for group in moved if early[group] <= _EARLY_SHARE * moved[group]]
    return max(late or moved, key=moved.__getitem__)


def without(
    ops: Sequence[ScheduleOp], rank_ops: Set[RankOp], kind: OpKind | None = None
) -> tuple[list[ScheduleOp], Float64]:
    """(ops without those of ``rank_ops``, own time after the last of them); ``kind``: only their issues, or waits. The
    own time before an op that is taken out comes before the next one.
    """
    return left_out(ops, lambda op: op.rank_op in rank_ops and kind in (None, op.kind))


def left_out(ops: Sequence[ScheduleOp], gone: Callable[[ScheduleOp], bool]) -> tuple[list[ScheduleOp], Float64]:
    """The same without those that are ``gone``."""
    left: list[ScheduleOp] = []
    carried: ScheduleOp | None = None
    for op in ops:
        joined = op if carried is None else behind(carried, op)
        if gone(op):
            carried = joined
        else:
            left.append(joined)
            carried = None
    return left, np.zeros(len(TimeCategory)) if carried is None else carried.own_ns


def behind(first: ScheduleOp, op: ScheduleOp) -> ScheduleOp:
    """``op`` with the time before ``first`` in front of its own."""
    joined = replace(op, own_ns=first.own_ns + op.own_ns)
    if first.host is not None or op.host is not None:
        joined.host = (first.host or HostPart.none()).then(op.host or HostPart.none(), op.own_ns)
    return joined


class StepOps:
    """The ops of one rank in one step, and those around them that issue its collectives: a host that runs ahead of its
    device issues some before the device begins the step. ``begins`` is the place of the op that begins the step.

    ``progress_ns`` is the rank's own time passed at each op, counted from before that one; new ops are placed by it.
    ``ends_ns`` is that of the step's last op; ``whole``: of the op that starts the next step, with all own time of
    this one.
    """

    def __init__(self, schedules: EditableSchedules, rank: int, step: int, *, whole: bool = False) -> None:
        self._schedules, self.rank, self.step = schedules, rank, step
        every = schedules.ops[rank]
        inside = [place for place, op in enumerate(every) if op.step == step] or [0]
        issued = [place for place, op in enumerate(every) if _belongs(op.issued, step)]
        first, last = inside[0], min(inside[-1] + whole, len(every) - 1)
        self._bounds = (min([first, *issued]), max([last, *issued]) + 1)
        self.ops: list[ScheduleOp] = every[slice(*self._bounds)]
        self.begins = first - self._bounds[0]
        hosts = [np.zeros(HOST_ROWS) if op.host is None else op.host.own_ns for op in self.ops]
        rows = [np.concatenate((op.own_ns, host)) for op, host in zip(self.ops, hosts, strict=True)]
        self._rows = np.cumsum(rows, axis=0)
        passed = self._rows[:, :OWN_ROWS].sum(axis=1)
        self._before = float(passed[self.begins - 1]) if self.begins else 0.0
        self.progress_ns: Float64 = passed - self._before
        self.ends_ns = float(self.progress_ns[last - self._bounds[0]])

    def issues(self, *kinds: str) -> dict[int, RankOp]:
        """Place in ``ops`` -> the rank op issued there: the step's of these kinds that move parameters or gradients."""
        issued = ((place, op.issued) for place, op in enumerate(self.ops))
        return {
            place: rank_op
            for place, rank_op in issued
            if rank_op is not None and _belongs(rank_op, self.step) and rank_op.moves(*kinds)
        }

    def places(self, kind: OpKind, rank_ops: set[RankOp]) -> list[int]:
        """Places in ``ops`` of those that issue ``rank_ops``, or wait for them."""
        return [place for place, op in enumerate(self.ops) if op.kind is kind and op.rank_op in rank_ops]

    def in_every_part(self, rank_ops: set[RankOp], parts: int) -> bool:
        """Are these issued all through the ``parts`` micro-batches of the step's work, not in the last one only?"""
        worked = self.progress_ns - self._rows[:, TimeCategory.DATALOADER]
        issues = self.places(OpKind.ISSUE, rank_ops)
        first, last, begin = (float(worked[place]) for place in (issues[0], issues[-1], self.begins))
        return parts > 1 and first < begin + (last - begin) * (parts - 1) / parts

    def replace(self, dropped: frozenset[RankOp], added: Sequence[tuple[float, ScheduleOp]]) -> None:
        """Take the ops of the rank ops ``dropped`` out and put ``added`` in at their progress; the own time stays.

        At the same progress the ops that were there come first, then those added, in their order.
        """
        ops = list(zip(self.progress_ns, self._rows, self.ops, strict=True))
        left = [(float(at), rows, op) for at, rows, op in ops if op.rank_op is None or op.rank_op not in dropped]
        rows = self._rows_at(np.array([at for at, _ in added], dtype=np.float64))
        left += [(at, passed, op) for (at, op), passed in zip(added, rows, strict=True)]
        left.sort(key=lambda item: item[0])
        cost = self._schedules.issuing_ns
        spent = {id(op): cost(op) for _, op in added}
        moments = [at for at, _, _ in left]
        for at, _, op in ops:
            if op.issued in dropped:
                following = left[min(bisect_left(moments, at), len(left) - 1)][2]
                spent[id(following)] = spent.get(id(following), 0.0) - cost(op)
        self._write([(passed, op) for _, passed, op in left], spent)

    def move(self, behind: Mapping[int, int]) -> None:
        """Move ops (by their place in ``ops``) to right behind others; those moved to one place stay in order."""
        order = sorted(range(len(self.ops)), key=lambda place: (behind.get(place, place), place in behind, place))
        self._write([(self._rows[behind.get(place, place)], self.ops[place]) for place in order])

    def _write(self, items: Sequence[tuple[Float64, ScheduleOp]], spent: Mapping[int, float] | None = None) -> None:
        """Write the step anew: ops in order, each with what has passed there. ``spent``: what the host spends more (or
        less) before an op, by its id.
        """
        # What was left after the last op comes before the next step's first.
        passed = np.maximum.accumulate(np.vstack([*(rows for rows, _ in items), self._rows[-1]]))
        own = np.diff(passed, axis=0, prepend=0.0)
        new = [ScheduleOp(OpKind.MARK, rows[:OWN_ROWS]) for rows in own]
        if self._schedules.hosts:
            launched = launched_anew([op.host for op in self.ops], self._rows, passed)
            for op, host, rows in zip(new, launched, own, strict=True):
                op.host = replace(host, own_ns=rows[OWN_ROWS:])
        written = [_timed(op, time) for (_, op), time in zip(items, new, strict=False)]
        for (_, before), op in zip(items, written, strict=True):
            op.spend((spent or {}).get(id(before), 0.0))
        ops = self._schedules.ops[self.rank]
        ops[slice(*self._bounds)] = written
        following = self._bounds[0] + len(written)
        if own[-1].any() and following < len(ops):
            ops[following] = behind(new[-1], ops[following])

    def _rows_at(self, progress_ns: Float64) -> Float64:
        """Own time passed at each moment of the progress (lines), by category (columns): linear between the ops."""
        points = np.concatenate(([-self._before], self.progress_ns))
        rows = np.concatenate((np.zeros((1, self._rows.shape[1])), self._rows))
        after = np.clip(np.searchsorted(points, progress_ns, side="left"), 1, len(points) - 1)
        length = points[after] - points[after - 1]
        share = np.divide(progress_ns - points[after - 1], length, out=np.ones_like(length), where=length > 0)
        share = np.clip(share, 0.0, 1.0)[:, None]
        return np.asarray(rows[after - 1] + share * (rows[after] - rows[after - 1]), dtype=np.float64)


def _belongs(rank_op: RankOp | None, step: int) -> bool:
    """Is it part of a collective of this step?"""
    return rank_op is not None and rank_op.collective.step == step


def _timed(op: ScheduleOp, time: ScheduleOp) -> ScheduleOp:
    """``op`` with the time before ``time``."""
    host = time.host
    if host is not None and op.host is not None:
        host = replace(host, lag_ns=op.host.lag_ns, waited_ns=op.host.waited_ns)
    return replace(op, own_ns=time.own_ns, host=host)


def editable_schedules(
    result: AlignedJob, recorded: RecordedSchedules, *, with_hosts: bool = False
) -> EditableSchedules:
    """The recorded schedules, ready to be edited; ``with_hosts``: hosts beside their devices, where they are known."""
    schedules, hosts = recorded.schedules, dict[int, HostOfRank]()
    if with_hosts and recorded.with_hosts is not None:
        schedules = recorded.with_hosts
        sides = zip(schedules.ranks, recorded.lanes, strict=True)
        issuing = _issuing_ns(result, recorded)
        hosts = {rank: host_of(result.partials[rank].progress, side, issuing[rank]) for rank, side in sides}
    holds = schedules.hold_ns if schedules.lanes is None else schedules.lanes.hold_ns
    collectives = _collectives(result, schedules)
    lanes = _lanes(schedules)
    backward = _backward(result, recorded)
    rank_ops: dict[int, RankOp] = {}
    ops: dict[int, list[ScheduleOp]] = {}
    for index, rank in enumerate(schedules.ranks):
        span = schedules.slice_of(rank)
        progress = np.concatenate(([0], np.cumsum(schedules.own_ns[span])))
        host = hosts.get(rank)
        own = recorded.rows_between(result, rank, progress).astype(np.float64) if host is None else host.work_ns
        begins = {int(mark): int(step) for mark, step in zip(recorded.begin[index], recorded.steps, strict=True)}
        step = None
        ops[rank] = []
        for place, at in enumerate(range(span.start, span.stop)):
            kind, operand = OpKind(int(schedules.kind[at])), int(schedules.operand[at])
            op = ScheduleOp(kind, own[place], lag_ns=int(schedules.lag_ns[at]))
            if host is not None:
                op.lag_ns, op.host = host.device_lag_ns[place], host.parts[place]
            if kind in (OpKind.ISSUE, OpKind.WAIT, OpKind.JOIN):
                if operand not in rank_ops:
                    rank_ops[operand] = RankOp(
                        rank, collectives[int(schedules.instance[operand])], lanes[operand],
                        int(schedules.gap_ns[operand]), int(schedules.transfer_ns[operand]), backward[operand],
                        host_ns=None if host is None else host.issuing_ns.get(operand),
                    )  # fmt: skip
                op.rank_op = rank_ops[operand]
            elif kind is OpKind.HOLD:
                op.hold_ns = int(holds[operand])
                op.doubtful = not recorded.deliveries[rank].sure
            else:
                op.mark = operand
                step = begins.get(operand, step) if kind is OpKind.MARK else step
            op.step = step
            ops[rank].append(op)
    _wait_for_others(schedules, rank_ops)
    starts = dict(zip(schedules.ranks, (int(start) for start in schedules.start_ns), strict=True))
    return EditableSchedules(
        recorded, ops, starts, schedules.marks, max(lanes.values(), default=-1) + 1,
        loading_step_ns=_loading_step_ns(result, recorded), hosts=hosts,
        # A first step that waits for busy workers begins where the one before, which is not replayed, was recorded to.
        settling=int(any(map(len, recorded.deliveries.values()))),
    )  # fmt: skip


def _loading_step_ns(result: AlignedJob, recorded: RecordedSchedules) -> dict[int, float]:
    """Of the batches that were taken inside the windows. The recorded steps show less where they hold fewer of the
    workers' turns than usual: then they are believed.
    """
    steps = {}
    for rank, found in recorded.deliveries.items():
        partial, (start, end) = result.partials[rank], result.windows[rank]
        if found.batch_ns is not None:
            taken = partial.loading.end_ns
            batches = int(((taken > start[0]) & (taken <= end[-1])).sum())
            steps[rank] = min(found.batch_ns * batches / len(start), result.mean_step_ns(rank))
    return steps


def _collectives(result: AlignedJob, schedules: Schedules) -> list[Collective]:
    """One for each instance of the schedules; those beyond the matched ones are a single rank's."""
    known = result.matched_before.instances
    collectives = []
    for number, floor in enumerate(schedules.floor_ns.tolist()):
        if number >= len(known):
            collectives.append(Collective(kind="unmatched", group=NONE, bytes=None, size=1, step=None))
            continue
        group, count, dtype = int(known.group[number]), int(known.bytes[number]), int(known.dtype[number])
        collectives.append(
            Collective(
                kind=known.kinds[int(known.kind[number])],
                group=group,
                bytes=count if count >= 0 else None,
                size=len(known.groups[group].ranks) or known.groups[group].size or int(known.participants[number]),
                step=int(known.step[number]),
                dtype=known.dtypes[dtype] if dtype != NONE else None,
                floor_ns=int(floor),
            )
        )
    return collectives


def _wait_for_others(schedules: Schedules, rank_ops: Mapping[int, RankOp]) -> None:
    """Note which rank ops (by their number) wait for one of another stream."""
    if schedules.after is None or schedules.after_gap_ns is None:
        return
    for number, rank_op in rank_ops.items():
        if (other := int(schedules.after[number])) != NONE:
            rank_op.after, rank_op.after_gap_ns = rank_ops.get(other), float(schedules.after_gap_ns[number])


def _backward(result: AlignedJob, recorded: RecordedSchedules) -> list[bool]:
    """For each rank op: did autograd issue it?"""
    found = [False] * len(recorded.row)
    for rank, rank_ops in _issued(recorded):
        backward = result.partials[rank].collectives.backward[recorded.row[rank_ops]]
        for rank_op, by_autograd in zip(rank_ops.tolist(), backward.tolist(), strict=True):
            found[rank_op] = by_autograd
    return found


def _issuing_ns(result: AlignedJob, recorded: RecordedSchedules) -> dict[int, dict[int, float]]:
    """Rank -> rank op -> what issuing it takes the host."""
    found: dict[int, dict[int, float]] = {}
    for rank, rank_ops in _issued(recorded):
        lane = result.partials[rank].progress.host
        cost = None if lane is None else lane.cost_ns[recorded.row[rank_ops]]
        found[rank] = {} if cost is None else dict(zip(rank_ops.tolist(), cost.astype(float).tolist(), strict=True))
    return found


def _issued(recorded: RecordedSchedules) -> Iterator[tuple[int, Int64]]:
    """(rank, numbers of the rank ops that it issues) of every rank."""
    schedules = recorded.schedules
    for rank in schedules.ranks:
        span = schedules.slice_of(rank)
        yield rank, schedules.operand[span][schedules.kind[span] == OpKind.ISSUE]


def _lanes(schedules: Schedules) -> dict[int, int]:
    """Rank op -> the lane that it runs on: that of the one it follows, else a new one."""
    lanes: dict[int, int] = {}
    for rank_op, previous in enumerate(schedules.previous.tolist()):
        lanes[rank_op] = lanes[previous] if previous != NONE and previous in lanes else len(lanes)
    return lanes
