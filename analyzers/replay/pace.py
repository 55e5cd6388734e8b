"""Schedules with some ranks at their peers' pace: what stragglers cost is found by replaying these.

``peers`` cuts the own time of ranks that do the same work into segments that can be compared. A rank at its peers' pace
takes for every segment what its peers usually take; its waits, the collectives and the order of all it does stay as
recorded, so what could be replayed before can be replayed then. Where hosts are replayed beside their devices, both
take what the peers' take, and what only this host waited for it does not wait for any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np

from perfscope.analyzers.rank.host_lane import HostTime, pauses_as_other
from perfscope.analyzers.replay.engine import OpKind, Schedules
from perfscope.analyzers.replay.lanes import LaunchPoints, RankLane
from perfscope.analyzers.replay.peers import Peers, progress_at
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.frozen import dataclass
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NEVER, NONE, Float64, Int64

_AS_SLOW: Final = 1.5
"""Loaders are equally slow where the time between their batches, of which few may be known, differs by less."""

_OF_LOADER: Final = 0.5
"""Part of how much later a rank came that the longest wait for a batch is, from which its loader made it late."""

_OF_PYTHON: Final = [HostTime.OTHER, HostTime.PAUSES]

_WAITS: Final = (OpKind.SYNC, OpKind.LIMIT, OpKind.JOIN)


@dataclass(frozen=True, eq=False)
class Pace:
    """What changes in one rank's ops at its peers' pace; ``with_hosts``: of the schedules with hosts.

    Own time before each op is ``own`` times as long, plus ``more_ns``. The ops ``holds`` have the lags ``hold_lag_ns``
    and are held until ``hold_until_ns``. The rank starts ``sooner_ns`` sooner. ``host`` is None without hosts.
    """

    own: Float64
    more_ns: Float64
    holds: Int64
    hold_lag_ns: Int64
    hold_until_ns: Int64
    sooner_ns: int
    host: HostPace | None = None


@dataclass(frozen=True, eq=False)
class HostPace:
    """The same of its host: the time before each op is ``own`` [op, HostTime] times as long, plus ``more_ns``, and that
    until each launch ``launches`` [piece, HostTime] times. The waits ``unusual`` (ops) are gone. What the ops
    ``sooner`` issue is ready ``sooner_lag_ns`` after the device came to them. It starts ``lead_ns`` before its rank.
    """

    own: Float64
    more_ns: Float64
    launches: Float64
    unusual: Int64
    sooner: Int64
    sooner_lag_ns: Int64
    lead_ns: int


def at_peers_pace(
    recorded: RecordedSchedules, peers: Mapping[int, Peers], paced: Sequence[int], *, even: bool = False,
    with_hosts: bool = False,
) -> Schedules:  # fmt: skip
    """Schedules in which the ranks ``paced`` take their peers' own time; those among them do not count as peers.
    ``even``: the mean of it, not the median. ``with_hosts``: those with hosts beside their devices.

    Where its own work made such a rank come later to its first window than its peers, it comes that much sooner. Every
    rank of ``paced`` must have peers.
    """
    paces = {rank: pace_of(recorded, peers[rank], rank, paced, even=even, with_hosts=with_hosts) for rank in paced}
    schedules = recorded.with_hosts if with_hosts else recorded.schedules
    assert schedules is not None
    start, kind, operand = schedules.start_ns.copy(), schedules.kind.copy(), schedules.operand.copy()
    own, lag, hold = schedules.own_ns.copy(), schedules.lag_ns.copy(), schedules.hold_ns.copy()
    lanes = schedules.lanes
    if lanes is not None:
        own, lag, hold = lanes.work_ns.copy(), lanes.host_lag_ns.copy(), lanes.hold_ns.copy()
        host, reach, lead = lanes.host_ns.copy(), lanes.reach_ns.copy(), lanes.lead_ns.copy()
        device_lag = lanes.device_lag_ns.copy()
    for rank, pace in paces.items():
        span, index = schedules.slice_of(rank), schedules.line_of(rank)
        own[span] = _whole(own[span] * pace.own + pace.more_ns)
        held = span.start + pace.holds
        lag[held], hold[operand[held]] = pace.hold_lag_ns, pace.hold_until_ns
        start[index] -= pace.sooner_ns
        if pace.host is not None:
            side, mine = recorded.lanes[index], pace.host
            unusual = span.start + mine.unusual
            kind[unusual], operand[unusual] = OpKind.NOTE, NONE
            host[span] = _whole((side.rows_ns * mine.own + mine.more_ns).sum(axis=1))
            reach[span] = _points_at(side.points, pace.own, mine).reach_ns(len(pace.own))
            lead[index] = mine.lead_ns
            device_lag[span.start + mine.sooner] = mine.sooner_lag_ns
    changed = replace(schedules, start_ns=start, kind=kind, operand=operand)
    if lanes is None:
        return replace(changed, own_ns=own, lag_ns=lag, hold_ns=hold)
    lanes = replace(
        lanes, work_ns=own, host_lag_ns=lag, device_lag_ns=device_lag, hold_ns=hold, host_ns=host, reach_ns=reach,
        lead_ns=lead,
    )  # fmt: skip
    return replace(changed, own_ns=own, lanes=lanes)


def _points_at(points: LaunchPoints, device: Float64, host: HostPace) -> LaunchPoints:
    return replace(
        points,
        rows_ns=np.rint(points.rows_ns * host.launches).astype(np.int64),
        work_ns=np.rint(points.work_ns * device[points.op]).astype(np.int64),
    )


def pace_of(
    recorded: RecordedSchedules, peers: Peers, rank: int, paced: Sequence[int], *, even: bool = False,
    with_hosts: bool = False, own_ns_of: Mapping[int, Int64] | None = None,
) -> Pace:  # fmt: skip
    """The pace of one rank of ``paced`` (see ``at_peers_pace``).

    ``own_ns_of``: the own time before each op of every rank, where that, and ``peers`` with it, is not as recorded; not
    with hosts.
    """
    index, line = recorded.schedules.line_of(rank), peers.line_of(rank)
    others = [recorded.schedules.line_of(peers.ranks[other]) for other in peers.others(rank, paced)]
    schedules, host = recorded.schedules, None
    own_ns = schedules.own_ns[schedules.slice_of(rank)] if own_ns_of is None else own_ns_of[rank]
    of = peers.segments
    if with_hosts and recorded.with_hosts is not None and peers.on_device is not None:
        schedules, own_ns, of = recorded.with_hosts, recorded.lanes[index].lanes.work_ns, peers.on_device
        host = _host_pace(recorded, peers, rank, paced, even=even)
    own, more = _repaced(own_ns[:, None], of.anchors[line], peers.usual_ns(of, rank, paced, even=even))
    holds, stalls, until = _usual_holds(recorded, schedules, index, others)
    sooner_ns = late_by(recorded, index, others)
    if even and recorded.deliveries[rank].longest_ns >= _OF_LOADER * sooner_ns:
        sooner_ns = 0  # work that is spread evenly leaves loaders as slow as they are
    return Pace(own[:, 0], more[:, 0], holds, stalls, until, sooner_ns, host)


def _host_pace(recorded: RecordedSchedules, peers: Peers, rank: int, paced: Sequence[int], *, even: bool) -> HostPace:
    """That of the host. In no step it takes longer for anything than it did: of what its peers' did while they waited,
    not all is known as waiting. Where the work of devices is spread evenly, it does what it did: it launches as many
    kernels for less work, and its pauses are none of that.
    """
    assert peers.on_host is not None
    index, line = recorded.schedules.line_of(rank), peers.line_of(rank)
    side, of, mine = recorded.lanes[index], peers.on_host, peers.on_host.own_ns[line]
    usual = mine.copy() if even else peers.usual_ns(of, rank, paced)
    steps = np.searchsorted(of.step, np.arange(of.step[-1] + 2))
    for first, last in pairwise(steps.tolist()):
        kept = usual[first:last].sum(axis=0) >= mine[first:last].sum(axis=0)
        usual[first:last, kept] = mine[first:last, kept]
    own, more = _repaced(pauses_as_other(side.rows_ns), of.anchors[line], usual)
    launches = own[side.points.op]
    own[:, _OF_PYTHON], launches[:, _OF_PYTHON] = _shortened(side, of.anchors[line], usual[:, HostTime.OTHER])
    others = [recorded.lanes[recorded.schedules.line_of(peers.ranks[other])] for other in peers.others(rank, paced)]
    # It begins as far ahead of its device as its peers' hosts do.
    lead = int(side.lanes.lead_ns[0])
    usually = float(np.median([other.lanes.lead_ns[0] for other in others]))
    unusual, sooner = _unusual_waits(recorded, peers, rank, paced), _issued_sooner(recorded, peers, rank, paced)
    return HostPace(own, more, launches, unusual, *sooner, max(lead, round(usually)))


def _shortened(side: RankLane, anchors: Int64, target_ns: Int64) -> tuple[Float64, Float64]:
    """(factor of the host's other time and pauses before each op, and of those until each launch), each as a column,
    once the segments between ``anchors`` take ``target_ns`` or less of them: the longest of what the host does is
    shortened first, since a pause is no part of the rest.
    """
    row, ops, points = HostTime.OTHER, np.arange(len(side.rows_ns)), side.points
    rows, at_launch = pauses_as_other(side.rows_ns), pauses_as_other(points.rows_ns)
    passed = np.concatenate((np.zeros((1, rows.shape[1]), dtype=np.int64), np.cumsum(rows, axis=0)))
    launched = passed[points.op] + at_launch
    # All moments in the host's order; an op comes behind what is launched before it.
    op, total = np.append(ops, points.op), np.append(passed[1:].sum(axis=1), launched.sum(axis=1))
    order = np.lexsort((np.append(np.ones(len(ops)), np.zeros(len(points.op))), total, op))
    came = np.maximum.accumulate(np.append(passed[1:, row], launched[:, row])[order])
    parts = np.diff(came, prepend=0)
    segment = np.searchsorted(anchors, op[order], side="left") - 1
    bounds = np.searchsorted(segment, np.arange(len(target_ns) + 1))
    for number, (first, last) in enumerate(pairwise(bounds.tolist())):
        parts[first:last] = _capped(parts[first:last], int(target_ns[number]))
    new = np.empty(len(order))
    new[order] = np.cumsum(parts)
    before = np.append(0.0, new[: len(ops)])
    of_op = np.divide(np.diff(before), rows[:, row], out=np.ones(len(ops)), where=rows[:, row] > 0)
    until, had = new[len(ops) :] - before[points.op], at_launch[:, row]
    return of_op[:, None], np.divide(until, had, out=np.ones(len(had)), where=had > 0)[:, None]


def _capped(parts_ns: Int64, target_ns: int) -> Int64:
    """The parts, none longer than what makes them add up to ``target_ns``; as they are where they do not exceed it."""
    ascending = np.sort(parts_ns)
    left = len(ascending) - np.arange(len(ascending))
    # With the cap at a part: all shorter ones, and as often as there are longer ones the cap.
    sums = np.concatenate(([0], np.cumsum(ascending)))[:-1] + ascending * left
    place = int(np.searchsorted(sums, target_ns))
    if place == len(ascending):
        return parts_ns
    cap = (target_ns - ascending[:place].sum()) // left[place]
    return np.asarray(np.minimum(parts_ns, cap), dtype=np.int64)


def _unusual_waits(recorded: RecordedSchedules, peers: Peers, rank: int, paced: Sequence[int]) -> Int64:
    """Ops in which the host of ``rank`` waits and most of its peers' do not: beyond their number in a segment, those
    that come at another point of its work than theirs.
    """
    assert peers.on_host is not None
    known = peers.found_waits
    if not known:
        for other, anchors in zip(peers.ranks, peers.on_host.anchors, strict=True):
            known[other] = _waits_in_segments(recorded, other, anchors)
    found = list(known.values())
    mine = peers.line_of(rank)
    ops, where = found[mine]
    others = [line for line in peers.others(rank, paced) if line != mine]
    gone = []
    for segment in distinct(where.astype(np.int64)).tolist():
        inside = np.flatnonzero(where.astype(np.int64) == segment)
        theirs = [at[at.astype(np.int64) == segment] for _, at in (found[line] for line in others)]
        usual = int(np.median([len(at) for at in theirs])) if theirs else len(inside)
        if len(inside) > usual:
            usually = np.concatenate(theirs)
            apart = np.array([np.abs(usually - at).min(initial=1.0) for at in where[inside]])
            gone.append(ops[inside[np.argsort(apart, kind="stable")[usual:]]])
    return np.sort(np.concatenate(gone)) if gone else np.empty(0, dtype=np.int64)


def _issued_sooner(recorded: RecordedSchedules, peers: Peers, rank: int, paced: Sequence[int]) -> tuple[Int64, Int64]:
    """(ops of ``rank`` that issue what was ready sooner after the device came there on most of its peers, that lag of
    theirs): a host that is late issues what waits for nothing, as FSDP's gathers ahead of their use, when its device
    has nothing left to do, which looks as if it waited for that.
    """
    of = peers.on_host
    assert of is not None
    assert recorded.with_hosts is not None
    lags = [
        recorded.lanes[recorded.with_hosts.line_of(other)].lanes.device_lag_ns[anchors[1:-1]]
        for other, anchors in zip(peers.ranks, of.anchors, strict=True)
    ]
    line = peers.line_of(rank)
    others = [lags[other] for other in peers.others(rank, paced) if other != line]
    if not others:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    usual = np.sort(others, axis=0)[len(others) // 2]  # the later of two
    sooner = usual < lags[line]
    return of.anchors[line, 1:-1][sooner], usual[sooner]


def _waits_in_segments(recorded: RecordedSchedules, rank: int, anchors: Int64) -> tuple[Int64, Float64]:
    """(ops of one rank in which its host waits, segment of each and how far into its host's time it is)."""
    schedules = recorded.with_hosts
    assert schedules is not None
    ops = np.flatnonzero(np.isin(schedules.kind[schedules.slice_of(rank)], _WAITS))
    ops = ops[ops < anchors[-1]]
    passed = np.cumsum(recorded.lanes[schedules.line_of(rank)].rows_ns.sum(axis=1))
    bounds = progress_at(np.diff(passed, prepend=0), anchors)
    segment = np.searchsorted(anchors, ops, side="right") - 1
    length = np.maximum(bounds[segment + 1] - bounds[segment], 1)
    return ops, segment + np.clip((passed[ops] - bounds[segment]) / length, 0.0, 0.999)


def _usual_holds(
    recorded: RecordedSchedules, schedules: Schedules, index: int, others: Sequence[int]
) -> tuple[Int64, Int64, Int64]:
    """(holds of rank ``index``, a line; their lags; their moments) with the loader of ``others``: the median of theirs
    where most of them have holds in the same steps, its own where they have them in other steps. Where they have none,
    none, because their loaders do not make it stall.
    """
    lag, hold = schedules.lag_ns, schedules.hold_ns
    if schedules.lanes is not None:
        lag, hold = schedules.lanes.host_lag_ns, schedules.lanes.hold_ns
    places = {line: _holds(recorded, schedules, line) for line in (index, *others)}
    holds, steps = places[index]
    alike = [places[other][0] for other in others if np.array_equal(places[other][1], steps)]
    place = holds - schedules.first[index]
    if 2 * len(alike) <= len(others) or len(holds) == 0:
        nothing = np.zeros(len(holds), dtype=np.int64)
        if _loads_like(recorded, index, others):
            return place, nothing, hold[schedules.operand[holds]]
        return place, nothing, np.full(len(holds), NEVER)
    stalls = np.median([lag[theirs] for theirs in alike], axis=0)
    until = np.median([hold[schedules.operand[theirs]] for theirs in alike], axis=0)
    return place, stalls.astype(np.int64), until.astype(np.int64)


def _loads_like(recorded: RecordedSchedules, index: int, others: Sequence[int]) -> bool:
    """Do the loaders of most ``others`` (lines) set their pace, and is that of rank ``index`` no slower?

    Loaders that set the pace of one job deliver at the same. Those of hosts that run ahead may be busy, and quicker.
    """
    own, *theirs = (recorded.deliveries[recorded.schedules.ranks[line]] for line in (index, *others))
    paces = [found.batch_ns for found in theirs if found.longest_ns and found.batch_ns is not None]
    return (
        own.batch_ns is not None and 2 * len(paces) > len(theirs) and own.batch_ns <= _AS_SLOW * float(np.median(paces))
    )


def _holds(recorded: RecordedSchedules, schedules: Schedules, index: int) -> tuple[Int64, Int64]:
    """(ops of ``schedules``, recorded steps in or before which they are) of one rank's holds, as they happened.

    ``schedules`` are those that were recorded, with hosts or without.
    """
    key = index, schedules is recorded.with_hosts
    if key not in recorded.found_holds:
        recorded.found_holds[key] = _find_holds(recorded, schedules, index)
    return recorded.found_holds[key]


def _find_holds(recorded: RecordedSchedules, schedules: Schedules, index: int) -> tuple[Int64, Int64]:
    happened, rank = recorded.schedules, recorded.schedules.ranks[index]
    kind, operand = happened.kind[happened.slice_of(rank)], happened.operand[happened.slice_of(rank)]
    holds = np.flatnonzero(kind == OpKind.HOLD)
    begins = np.flatnonzero((kind == OpKind.MARK) & np.isin(operand, recorded.begin[index]))
    span = schedules.slice_of(rank)
    places = np.flatnonzero(schedules.kind[span] == OpKind.HOLD)
    order = np.argsort(schedules.operand[span][places], kind="stable")
    found = np.searchsorted(schedules.operand[span][places], operand[holds], sorter=order)
    return span.start + places[order[found]], np.searchsorted(begins, holds)


def came_later_ns(later_ns: Int64 | Float64, lead_ns: Int64 | Float64) -> Float64:
    """By how much ranks came later to their first window than at their peers' pace.

    ``later_ns`` [..., bound] is by how much each came later than its peers to each of ``RecordedSchedules.bound_ns``:
    the first counts as far as a later one is as large, for what delays a rank in the recording did so before, too; or
    as far as the host took longer to the first launch, by ``lead_ns``, while the device waited for it.
    """
    evident = np.maximum(later_ns[..., 1:].max(axis=-1), lead_ns)
    return np.asarray(np.maximum(np.minimum(later_ns[..., 0], evident), 0.0), dtype=np.float64)


def late_by(recorded: RecordedSchedules, index: int, others: Sequence[int] = ()) -> int:
    """By how much later rank ``index`` (a line) came to its first window than at the pace of ``others``: all if none
    are named.
    """
    others = others or [other for other in range(len(recorded.late)) if other != index] or [index]
    later = recorded.bound_ns[index] - np.median(recorded.bound_ns[others], axis=0)
    lead = recorded.lead_ns[index] - np.median(recorded.lead_ns[others]) if recorded.late[index] else 0.0
    return int(came_later_ns(later, np.float64(lead)))


def without_holds(schedules: Schedules) -> tuple[Schedules, bool]:
    """(schedules in which no rank waits where workers that set the pace held it up, did any)."""
    lanes = schedules.lanes
    hold = schedules.hold_ns if lanes is None else lanes.hold_ns
    free = np.full(len(hold), NEVER)
    if lanes is None:
        return replace(schedules, hold_ns=free), bool((hold != NEVER).any())
    return replace(schedules, lanes=replace(lanes, hold_ns=free)), bool((hold != NEVER).any())


def shortened(recorded: RecordedSchedules, peers: Mapping[int, Peers], by_ns: Mapping[int, Int64]) -> Schedules:
    """Schedules in which the own time of each of these ranks is so much shorter [recorded step], longer where that is
    negative, in proportion in each step.
    """
    targets = {}
    for rank, by in by_ns.items():
        mine = peers[rank]
        line = mine.line_of(rank)
        in_step = mine.in_step_ns[line]
        left = 1 - np.divide(by, in_step, out=np.zeros(len(in_step)), where=in_step > 0)
        targets[rank] = mine, (mine.own_ns[line] * np.maximum(left, 0.0)[mine.step]).astype(np.int64)
    return with_own_time(recorded, targets)


def with_own_time(recorded: RecordedSchedules, targets: Mapping[int, tuple[Peers, Int64]]) -> Schedules:
    """Schedules in which each of these ranks has that own time in each segment between it and its peers, ns."""
    own = recorded.schedules.own_ns.copy()
    for rank, (peers, target) in targets.items():
        span = recorded.schedules.slice_of(rank)
        factor, more = _repaced(own[span][:, None], peers.anchors[peers.line_of(rank)], target[:, None])
        own[span] = _whole(own[span] * factor[:, 0] + more[:, 0])
    return replace(recorded.schedules, own_ns=own)


def scaled(schedules: Schedules, ranks: Sequence[int], factor: float) -> Schedules:
    """Schedules in which all own time of ``ranks`` takes ``factor`` times as long."""
    own = schedules.own_ns.copy()
    for rank in ranks:
        span = schedules.slice_of(rank)
        own[span] = _whole(own[span] * factor)
    return replace(schedules, own_ns=own)


def scaled_beside(
    recorded: RecordedSchedules, schedules: Schedules, ranks: Sequence[int], device: float, host: Float64
) -> Schedules:
    """``schedules``, which have hosts, in which the devices' work of ``ranks`` takes ``device`` times as long, and what
    their hosts do ``host`` [HostTime] times.
    """
    lanes = schedules.lanes
    assert lanes is not None
    work, of_host, reach = lanes.work_ns.copy(), lanes.host_ns.copy(), lanes.reach_ns.copy()
    for rank in ranks:
        span, side = schedules.slice_of(rank), recorded.lanes[schedules.line_of(rank)]
        work[span] = _whole(work[span] * device)
        of_host[span] = _whole((side.rows_ns * host).sum(axis=1))
        points = replace(
            side.points,
            rows_ns=np.rint(side.points.rows_ns * host).astype(np.int64),
            work_ns=np.rint(side.points.work_ns * device).astype(np.int64),
        )
        reach[span] = points.reach_ns(len(side.rows_ns))
    return replace(
        schedules, own_ns=work, lanes=replace(lanes, work_ns=work, host_ns=of_host, reach_ns=reach)
    )  # fmt: skip


def _repaced(own_ns: Int64, anchors: Int64, target_ns: Int64) -> tuple[Float64, Float64]:
    """(factor of the own time before each op, ns that are added to it), each [op, part], once the segments between
    ``anchors`` take ``target_ns`` [segment, part]; outside all segments nothing changes.

    Inside a segment the ops stay where they are relative to its length; where it had no time, it comes at its end.
    """
    passed = np.vstack((np.zeros(own_ns.shape[1], dtype=np.int64), np.cumsum(own_ns, axis=0)))
    length = np.diff(passed[anchors + 1], axis=0)
    change = np.divide(target_ns, length, out=np.ones(length.shape), where=length > 0)
    ops = np.arange(len(own_ns))
    segment = np.searchsorted(anchors, ops, side="left") - 1
    inside = (segment >= 0) & (segment < len(target_ns))
    factor, more = np.ones(own_ns.shape), np.zeros(own_ns.shape)
    factor[inside] = change[segment[inside]]
    more[anchors[1:]] = np.where(length > 0, 0, target_ns)
    return factor, more


def _whole(ns: Float64) -> Int64:
    """In whole ns; rounding errors do not add up."""
    return np.diff(np.rint(np.cumsum(ns)), prepend=0).astype(np.int64)
