"""The recorded schedules, ready to be edited."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.collectives.cost_model import transfers_ns
from perfscope.analyzers.job.collectives.of_loop import between_steps, collectives_of_loop
from perfscope.analyzers.job.collectives.returned import returned_gradients
from perfscope.analyzers.job.collectives.table import instance_transfer_ns
from perfscope.analyzers.replay.engine import OpKind, Schedules
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.hosts import RecordedHost, recorded_host
from perfscope.analyzers.whatif.schedules.ops import Collective, RankOp, ScheduleOp
from perfscope.frozen import dataclass
from perfscope.trace.trace import NEVER, NONE, Float64, Int64

_MOST_KEPT: Final = 64 << 20
"""Bytes of a job's ops that are kept between two questions about it."""


def editable_schedules(
    result: AlignedJob, recorded: RecordedSchedules, *, with_hosts: bool = False
) -> EditableSchedules:
    """The recorded schedules, ready to be edited; ``with_hosts``: hosts beside their devices, where they are known."""
    known = _known_of(result, recorded, with_hosts=with_hosts and recorded.with_hosts is not None)
    schedules = known.schedules
    hosts = {rank: host.editable() for rank, host in known.hosts.items()}
    holds = schedules.hold_ns if schedules.lanes is None else schedules.lanes.hold_ns
    collectives = _collectives(result, schedules)
    rank_ops: dict[int, RankOp] = {}
    ops: dict[int, list[ScheduleOp]] = {}
    for index, rank in enumerate(schedules.ranks):
        span = schedules.slice_of(rank)
        host = hosts.get(rank)
        own = known.own_ns[rank].copy() if host is None else host.work_ns
        begins = {int(mark): int(step) for mark, step in zip(recorded.begin[index], recorded.steps, strict=True)}
        step = None
        ops[rank] = []
        lags, parts = (known.lags_ns[span], _NO_HOST) if host is None else (host.device_lag_ns, host.parts)
        columns = zip(known.kinds[span], known.operands[span], own, lags, parts, strict=False)  # _NO_HOST has no end
        for kind, operand, own_ns, lag_ns, part in columns:
            op = ScheduleOp(kind, own_ns, lag_ns, host=part)
            if kind in _OF_RANK_OPS:
                if operand not in rank_ops:
                    rank_ops[operand] = RankOp(
                        rank, collectives[known.instances[operand]], known.lanes[operand], *known.times_ns[operand],
                        *known.issued_in[operand], sends=known.sends.get(operand),
                        host_ns=None if host is None else host.issuing_ns.get(operand),
                    )  # fmt: skip
                op.rank_op = rank_ops[operand]
            elif kind is _HOLD:
                op.hold_ns = int(holds[operand])
                op.doubtful = not recorded.deliveries[rank].sure
            else:
                op.mark = operand
                step = begins.get(operand, step) if kind is _MARK else step
            op.step = step
            ops[rank].append(op)
    _wait_for_others(schedules, rank_ops)
    starts = dict(zip(schedules.ranks, (int(start) for start in schedules.start_ns), strict=True))
    return EditableSchedules(
        recorded, ops, starts, schedules.marks, max(known.lanes.values(), default=-1) + 1,
        loading_step_ns=recorded.loading_step_ns(result), hosts=hosts, settling=recorded.settling,
    )  # fmt: skip


def waits_for_absent(result: AlignedJob, recorded: RecordedSchedules) -> bool:
    """Does a rank wait for one that is not in the recording?"""
    schedules, complete = recorded.schedules, result.matched_before.instances.complete
    instances = schedules.instance[schedules.operand[schedules.kind == OpKind.ISSUE]]
    return not complete[instances[instances < len(complete)]].all()


@dataclass(frozen=True, eq=False)
class _OpsAsRecorded:
    """What all that is asked about a job starts from: ``kinds``, ``operands`` and ``lags_ns`` of every op, ``own_ns``
    of each rank without a host, ``hosts`` of the others; ``instances``, ``lanes``, ``issued_in`` (the backward; after
    it; a forward that runs again; a layer's own; a norm's) and ``times_ns`` (gap, transfer, how late others seem to
    have come) of every rank op, ``sends`` of those that are messages in one direction.
    """

    schedules: Schedules
    kinds: Sequence[OpKind]
    operands: Sequence[int]
    lags_ns: Sequence[int]
    own_ns: Mapping[int, Float64]
    hosts: Mapping[int, RecordedHost]
    instances: Sequence[int]
    lanes: Mapping[int, int]
    issued_in: Sequence[tuple[bool, bool, bool, bool, bool]]
    times_ns: Sequence[tuple[int, int, int]]
    sends: Mapping[int, bool]

    @property
    def size(self) -> int:
        """Bytes of its large parts."""
        return sum(host.size for host in self.hosts.values()) + sum(own.nbytes for own in self.own_ns.values())


_OF_RANK_OPS: Final = frozenset((OpKind.ISSUE, OpKind.WAIT, OpKind.JOIN))
_HOLD: Final = OpKind.HOLD
_MARK: Final = OpKind.MARK
_NO_HOST: Final = itertools.repeat(None)

_KEPT: Final[WeakKeyDictionary[RecordedSchedules, dict[bool, _OpsAsRecorded]]] = WeakKeyDictionary()
"""Without and with hosts, for as long as a job's recorded schedules are in use: a dozen questions are asked of them."""


def _known_of(result: AlignedJob, recorded: RecordedSchedules, *, with_hosts: bool) -> _OpsAsRecorded:
    kept = _KEPT.setdefault(recorded, {})
    known = kept.get(with_hosts)
    if known is None:
        known = _find(result, recorded, with_hosts=with_hosts)
        if known.size <= _MOST_KEPT:
            kept[with_hosts] = known
    return known


def _find(result: AlignedJob, recorded: RecordedSchedules, *, with_hosts: bool) -> _OpsAsRecorded:
    schedules, hosts = recorded.schedules, dict[int, RecordedHost]()
    if with_hosts and recorded.with_hosts is not None:
        schedules = recorded.with_hosts
        sides = zip(schedules.ranks, recorded.lanes, strict=True)
        issuing = _issuing_ns(result, recorded)
        hosts = {rank: recorded_host(result.partials[rank].progress, side, issuing[rank]) for rank, side in sides}
    own = {}
    for rank in schedules.ranks:
        if rank not in hosts:
            progress = np.concatenate(([0], np.cumsum(schedules.own_ns[schedules.slice_of(rank)])))
            own[rank] = recorded.rows_between(result, rank, progress).astype(np.float64)
    kinds, late_ns = {int(kind): kind for kind in OpKind}, _late_ns(result, schedules)
    times_ns = zip(schedules.gap_ns.tolist(), (schedules.transfer_ns - late_ns).tolist(), late_ns.tolist(), strict=True)
    return _OpsAsRecorded(
        schedules=schedules,
        kinds=[kinds[kind] for kind in schedules.kind.tolist()],
        operands=schedules.operand.tolist(),
        lags_ns=schedules.lag_ns.tolist(),
        own_ns=own,
        hosts=hosts,
        instances=schedules.instance.tolist(),
        lanes=_lanes(schedules),
        issued_in=_issued_in(result, recorded),
        times_ns=list(times_ns),
        sends=_sends(result, recorded),
    )


def _collectives(result: AlignedJob, schedules: Schedules) -> list[Collective]:
    """One for each instance of the schedules; those beyond the matched ones are a single rank's."""
    known = result.matched_before.instances
    between = between_steps(result.partials, result.matched_before)
    of_loop = collectives_of_loop(result.partials, result.matched_before)
    returned = returned_gradients(result.partials, result.matched_before)
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
                whole=bool(known.complete[number]),
                floor_ns=NEVER if known.complete[number] else int(known.last_arrival_ns[number]),
                mostly=floor == NEVER,
                between=bool(between[number]),
                of_loop=bool(of_loop[number]),
                returned=bool(returned[number]),
                chained=schedules.chained.get(number, {}),
                instance=number,
            )
        )
    return collectives


def _late_ns(result: AlignedJob, schedules: Schedules) -> Int64:
    """How much later than the recorded ranks others seem to have come, for each rank op."""
    matched = result.matched_before
    late = np.zeros(len(schedules.floor_ns), dtype=np.int64)
    late[: len(matched.instances)] = instance_transfer_ns(matched) - transfers_ns(matched)
    return np.minimum(late[schedules.instance], schedules.transfer_ns)


def _wait_for_others(schedules: Schedules, rank_ops: Mapping[int, RankOp]) -> None:
    """Note which rank ops (by their number) wait for one of another stream."""
    if schedules.after is None or schedules.after_gap_ns is None:
        return
    for number, rank_op in rank_ops.items():
        if (other := int(schedules.after[number])) != NONE:
            rank_op.after, rank_op.after_gap_ns = rank_ops.get(other), float(schedules.after_gap_ns[number])


def _issued_in(result: AlignedJob, recorded: RecordedSchedules) -> list[tuple[bool, bool, bool, bool, bool]]:
    """For each rank op: (did autograd issue it, was it issued once the step's last backward was over, in a forward that
    runs again, is it a layer's own, and a batch normalization's)?
    """
    found = [(False, False, False, False, False)] * len(recorded.row)
    for rank, rank_ops in _issued(recorded):
        collectives, rows = result.partials[rank].collectives, recorded.row[rank_ops]
        phases_of = collectives.backward, collectives.after_backward, collectives.again
        columns = *phases_of, collectives.of_layers, collectives.of_norms
        phases = zip(*(column[rows].tolist() for column in columns), strict=True)
        for rank_op, phase in zip(rank_ops.tolist(), phases, strict=True):
            found[rank_op] = phase
    return found


def _sends(result: AlignedJob, recorded: RecordedSchedules) -> dict[int, bool]:
    """Of the rank ops that are messages: does the rank send it?"""
    ways = {"send": True, "recv": False}
    found: dict[int, bool] = {}
    for rank, rank_ops in _issued(recorded):
        own = result.partials[rank].collectives
        way_of = {kind: ways[name] for kind, name in enumerate(own.kinds) if name in ways}
        if way_of:
            kinds = own.kind[recorded.row[rank_ops]].tolist()
            found |= {op: way_of[kind] for op, kind in zip(rank_ops.tolist(), kinds, strict=True) if kind in way_of}
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
