"""The ops of all ranks, which settings edit."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import field, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np

from perfscope.analyzers.replay.engine import Lanes, OpKind, ReplayResult, Schedules
from perfscope.analyzers.replay.lanes import side_by_side
from perfscope.analyzers.replay.step_time import predicted_step_ns
from perfscope.analyzers.whatif.schedules.hosts import HostOfRank, in_whole_ns, lanes_of
from perfscope.analyzers.whatif.schedules.ops import Collective, RankOp, ScheduleOp, left_out, waits_on_device, without
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NEVER, NONE, Int64

if TYPE_CHECKING:
    from perfscope.analyzers.replay.schedules import RecordedSchedules

_LATE_BATCH: Final = 0.5
"""Share of a step for which a device waits for a batch that comes late by itself."""

_EARLY_SHARE: Final = 0.1
"""Share of the bytes that a group moves up to which those before the backward are others: statistics, losses."""

# Looking up a member of an enum takes Python 3.11 as long as the rest of a loop over all ops.
_ISSUE: Final = OpKind.ISSUE
_HOLD: Final = OpKind.HOLD

StepCollectives = dict[tuple[int, int], list[RankOp]]
"""(rank, step) -> its rank ops of one sort in the order of issue."""


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
    hosts: dict[int, HostOfRank] = field(default_factory=dict)
    """Of every rank, where hosts are replayed beside their devices; else empty."""
    steps_alike: bool = True
    """The change is the same in all steps."""
    sooner: bool = False
    """Hosts come sooner to the first step than they were recorded to."""
    began_sooner_ns: dict[int, float] = field(default_factory=dict)
    """Rank -> what is left out of the time before its first window in which its device waited for its host."""
    longer: float = 1.0
    """What replays of these ops are multiplied by, which leave something out of the recorded steps."""
    lifted: bool = False
    """No rank waits for the loader workers that held it up."""
    settling: int = 0
    """Steps until ranks have found a new rhythm: the first one starts as far apart on them as it was recorded."""

    @functools.cached_property
    def steps(self) -> frozenset[int]:
        """Numbers of the recorded steps."""
        return frozenset(self.recorded.steps.tolist())

    def own_ns_of(self) -> dict[int, Int64]:
        """Rank -> own time before each of its ops, in whole ns."""
        return {rank: in_whole_ns([op.own_ns for op in ops]) for rank, ops in self.ops.items()}

    def issued(self) -> Iterator[RankOp]:
        """Every rank op, rank by rank in the order of issue."""
        return _issued(chain.from_iterable(self.ops.values()))

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

    def step_ns(self, replayed: ReplayResult, unchanged: ReplayResult) -> float:
        """The job's step time in a replay of these schedules; ``unchanged`` is that of the recorded ones."""
        floors = (*self.floor_step_ns.values(), *self.loading_step_ns.values())
        return predicted_step_ns(
            self.recorded,
            replayed,
            unchanged,
            settling=self.settling,
            steps_alike=self.steps_alike,
            sooner=self.sooner,
            lifted=self.lifted,
            floors_ns=floors,
            assumed_ns=self._assumed_ns(),
        )

    def _assumed_ns(self) -> Int64 | None:
        """What is assumed of begins, without what is left out of it; None: as recorded."""
        if not self.began_sooner_ns:
            return None
        assumed: Int64 = self.recorded.assumed_ns.copy()
        for rank, ns in self.began_sooner_ns.items():
            line = self.recorded.schedules.line_of(rank)
            assumed[line, 0] = max(assumed[line, 0] - round(ns), 0)
        return assumed

    def begin_sooner(self, rank: int, sooner_ns: float) -> None:
        """A rank's host comes that much sooner to its first work, where its device waited for it before its window."""
        line = self.recorded.schedules.line_of(rank)
        if sooner_ns and self.recorded.late[line] and self.recorded.assumed_ns[line, 0]:
            self.began_sooner_ns[rank], self.sooner = sooner_ns, True

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
        for rank_op in _issued(every):
            instance = instances.setdefault(rank_op.collective, len(instances))
            previous = last.get((rank_op.rank, rank_op.lane), NONE)
            after = NONE if rank_op.after is None else numbers.get(rank_op.after, NONE)
            # Without the one that it waited for it starts at once.
            gap = rank_op.gap_ns if rank_op.after is None or after != NONE else 0.0
            columns.append((
                instance, previous, round(gap), round(rank_op.late_ns + rank_op.transfer_ns), after,
                round(rank_op.after_gap_ns),
            ))  # fmt: skip
            last[rank_op.rank, rank_op.lane] = numbers[rank_op] = len(numbers)
        holds = [op.hold_ns for op in every if op.kind is _HOLD]
        number_of_hold = iter(range(len(holds)))
        operand = [
            numbers[op.rank_op] if op.rank_op is not None else next(number_of_hold) if op.kind is _HOLD else op.mark
            for op in every
        ]
        of_rank_ops = np.array(columns, dtype=np.int64).reshape(-1, 6)
        lanes = self._lanes(ranks, holds) if self.hosts else None
        return Schedules(
            ranks=ranks,
            start_ns=np.array([self.start_ns[rank] for rank in ranks], dtype=np.int64),
            first=np.cumsum([0, *(len(self.ops[rank]) for rank in ranks)]),
            kind=np.array([op.kind for op in every], dtype=np.int64),
            operand=np.array(operand, dtype=np.int64),
            own_ns=lanes.work_ns
            if lanes is not None
            else np.concatenate([in_whole_ns([op.own_ns for op in self.ops[rank]]) for rank in ranks]),
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
            chained={number: each.chained for each, number in instances.items() if each.chained},
            lanes=lanes,
        )

    def _lanes(self, ranks: Sequence[int], hold_ns: Sequence[int]) -> Lanes:
        lanes = []
        for rank in ranks:
            ops = self.ops[rank]
            lags = [float(op.lag_ns) for op in ops]
            lanes.append(lanes_of([op.own_ns for op in ops], lags, [op.host for op in ops], self.hosts[rank].lead_ns))
        return side_by_side(lanes, np.array(hold_ns, dtype=np.int64))

    @property
    def has_doubtful_loading(self) -> bool:
        """Is it of some rank not sure whether its loader workers set its pace?"""
        return any(found.longest_ns and not found.sure for found in self.recorded.deliveries.values())

    def scale(self, category: TimeCategory, factor: float) -> None:
        """All ranks' own time of a category takes ``factor`` times as long."""
        for op in chain.from_iterable(self.ops.values()):
            op.scale(category, factor)

    def without_host_waits(self, share: float, backends_on_host: Collection[int] = ()) -> None:
        """Hosts wait for their devices for ``share`` of the time; 0: they do not wait at all, and where one waited for
        a collective, its device does, as streams do for what is reduced or received. So do those that came late to
        their first work after a wait in the step before. ``backends_on_host``: ranks whose collectives are carried out
        on the host, which has to wait for these.
        """
        earliest = min(self.start_ns.values())
        for late, (rank, ops) in zip(self.recorded.late.tolist(), sorted(self.ops.items()), strict=True):
            joins = rank not in backends_on_host
            kinds = (OpKind.SYNC, OpKind.JOIN) if joins else (OpKind.SYNC,)
            if late and any(op.kind in kinds and op.host is not None and op.host.waited_ns for op in ops):
                host = self.hosts[rank]
                self.hosts[rank] = replace(host, lead_ns=round(max(share, host.lead_ns > 0) * host.lead_ns))
                self.start_ns[rank] = round(earliest + share * (self.start_ns[rank] - earliest))
                self.sooner = True
            if share == 0:
                waits = [waits_on_device(op) if joins and op.kind is OpKind.JOIN else op for op in ops]
                self.ops[rank], _ = left_out(waits, lambda op: op.kind is OpKind.SYNC)
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
                if op.kind is _HOLD and (op.doubtful or not doubtful):
                    self.lifted |= not doubtful and op.hold_ns != NEVER
                    op.hold(NEVER, 0.0)

    def free_hidden_loading(self, step_ns: float) -> frozenset[int]:
        """Workers do not set the pace where only hosts waited (``RecordedSchedules.hidden_loading``), nor where no
        batch took longer than taking one may cost. The ranks of which either is so. A batch that was so late that the
        device waited for it, too, for long beside a step (``step_ns``), comes as late whatever the training does: that
        wait is own time.
        """
        hidden = self.recorded.hidden_loading
        self.loading_step_ns = {rank: ns for rank, ns in self.loading_step_ns.items() if rank not in hidden}
        for rank in hidden:
            late = np.count_nonzero(self.recorded.deliveries[rank].stall_ns >= _LATE_BATCH * step_ns)
            holds = [op for op in self.ops[rank] if op.kind is _HOLD]
            for op in sorted(holds, key=_lag_ns)[:late]:
                op.hold(NEVER, 0.0)
        return hidden.union(rank for rank, found in self.recorded.deliveries.items() if found.slight)

    def hold_by_hidden_loading(self, step_ns: float) -> None:
        """A step takes as long as recorded, ``step_ns``, where hosts that are ahead of their devices waited for workers
        once, or any waited for as long as taking a batch may cost: how fast these are is not known, and they may be no
        faster.
        """
        for rank, found in self.recorded.deliveries.items():
            if found.slight or (found.is_hidden and found.batch_ns is None):
                self.loading_step_ns[rank] = step_ns

    def lift_holds(self) -> None:
        """No rank waits where workers that set the pace held it up: ``loading_step_ns`` bounds the step in their place.
        As many steps may hold more or fewer of the workers' turns; it does not matter then which of them.
        """
        for op in chain.from_iterable(self.ops.values()):
            if op.kind is _HOLD and op.hold_ns != NEVER:
                op.hold_ns, self.lifted = NEVER, True

    def free_of_few_absent(self) -> None:
        """Ranks that are not in the recording arrive as long after the others as they did, where most are recorded."""
        for rank_op in self.issued():
            if rank_op.collective.mostly:
                rank_op.collective.floor_ns = NEVER

    def free_of_absent(self, *, never_late: bool) -> None:
        """Ranks that are not in the recording arrive as long after the others as they did, or never later."""
        for rank_op in self.issued():
            rank_op.collective.floor_ns = NEVER
            rank_op.late_ns = 0.0 if never_late else rank_op.late_ns

    def work_ns(self) -> float:
        """What all recorded ranks work themselves, in all; beside hosts, what their devices do."""
        return float(sum(op.own_ns.sum() for op in chain.from_iterable(self.ops.values())))

    def change_absent(self, left: float, leaning: int) -> None:
        """Ranks that are not in the recording change with the others, whose work takes ``left`` times as long: they
        come later than these by ``left`` times what they did. What seems transfer with them may be waiting for one that
        comes late each time alike; the end of the range toward which the change goes (``leaning``) takes it for that.
        The other end has them come as they did.
        """
        toward = (left - 1) * leaning > 0
        if leaning and not toward:
            return
        for rank_op in self.issued():
            if not rank_op.collective.whole:
                rank_op.late_ns *= left
                rank_op.transfer_ns *= left if toward else 1.0


def _lag_ns(op: ScheduleOp) -> float:
    """How much later a rank that is held goes on; less than 0 by what it waited."""
    return op.lag_ns if op.host is None else op.host.lag_ns


def _issued(ops: Iterable[ScheduleOp]) -> Iterator[RankOp]:
    """``ScheduleOp.issued`` of those that issue something: every question about a job asks all ops several times."""
    return (op.rank_op for op in ops if op.kind is _ISSUE and op.rank_op is not None)


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
