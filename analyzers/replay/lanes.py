"""The recorded hosts and devices beside the ops of one rank's schedule, so that both replay as they were recorded.

An op has a *moment*: the host's time in the program at which it happens, or at which the work was launched that begins
with it. The host's time between two moments is its own, waits apart; the work launched between them is the device's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Final

import numpy as np

from perfscope.analyzers.rank.host_lane import OF_DEVICE, OF_HOST, HostLane, HostTime
from perfscope.analyzers.rank.timeline import Progress, Timeline
from perfscope.analyzers.replay.engine import Lanes, OpKind
from perfscope.frozen import dataclass
from perfscope.trace.trace import NEVER, NONE, Bool, Int64


@dataclass(frozen=True, eq=False)
class ProgramOps:
    """Ops of one rank in the order of the program, own clock: parallel arrays.

    ``time_ns`` is when each happened: readiness, end of a wait or stall, mark, return of a call. ``moment_ns`` is the
    host's; ``end_ns`` when what a WAIT or JOIN waits for had ended, when the call of an ISSUE did (NONE: not known),
    how long the loader took for a HOLD's batch. ``begun_ns`` is the start of an ISSUE's collective, ``sort`` the same
    for those of one kind in groups alike that the same pass issues (``PASSES``), on all ranks (NONE: the first of a
    forward, which follows the optimizer or a backward); ``waits`` is whether the rank waited there at all, ``idle_ns``
    how long its device then did nothing.
    """

    time_ns: Int64
    moment_ns: Int64
    kind: Int64
    operand: Int64
    lag_ns: Int64
    end_ns: Int64
    begun_ns: Int64
    sort: Int64
    waits: Bool
    idle_ns: Int64

    @classmethod
    def of(
        cls, kind: OpKind, time_ns: Int64, moment_ns: Int64, operand: Int64, *, lag_ns: Int64 | None = None,
        end_ns: Int64 | None = None, begun_ns: Int64 | None = None, sort: Int64 | None = None,
        waits: Bool | None = None, idle_ns: Int64 | None = None,
    ) -> ProgramOps:  # fmt: skip
        """Ops of one kind."""
        nothing = np.zeros(len(time_ns), dtype=np.int64)
        return cls(
            time_ns,
            moment_ns,
            np.full(len(time_ns), kind, dtype=np.int64),
            operand.astype(np.int64),
            nothing if lag_ns is None else lag_ns,
            nothing if end_ns is None else end_ns,
            nothing if begun_ns is None else begun_ns,
            nothing + NONE if sort is None else sort,
            np.ones(len(time_ns), dtype=np.bool_) if waits is None else waits,
            nothing if idle_ns is None else idle_ns,
        )

    def as_it_happened(self) -> ProgramOps:
        """Each op at its time, whenever the host came to it."""
        return replace(self, moment_ns=self.time_ns)

    @classmethod
    def in_order(cls, *parts: ProgramOps) -> ProgramOps:
        """All of them by their moments; at one moment as they happened: at one time first the ends of waits and stalls,
        then marks, then issues.
        """
        columns = [np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(cls)]
        order = np.lexsort((_AT_ONE_MOMENT[columns[2]], columns[0], columns[1]))
        return cls(*(column[order] for column in columns))


_AT_ONE_MOMENT: Final = np.argsort(
    [
        OpKind.NOTE,
        OpKind.WAIT,
        OpKind.HOLD,
        OpKind.MARK,
        OpKind.SYNC,
        OpKind.QUEUE,
        OpKind.LIMIT,
        OpKind.JOIN,
        OpKind.ISSUE,
    ]
)


PASSES: Final = 2
"""The forward, and the backward: sorts of collectives are numbered by twos, one for each."""

_ROUNDING_NS: Final = 2_000
"""Errors of clocks and of whole µs."""

_AT_ONCE_NS: Final = 10_000
"""A collective starts within this time of when it can."""

_HOST_WAITS: Final = (OpKind.SYNC, OpKind.QUEUE, OpKind.LIMIT, OpKind.JOIN)


@dataclass(frozen=True, eq=False)
class LaunchPoints:
    """Pieces of work launched before each op of one rank: parallel arrays.

    Piece i is listed at the lane's index ``listed[i]`` and comes before op ``op[i]``. It can start ``latency_ns[i]``
    after the host has done ``rows_ns[i]`` (by ``HostTime``, its launch included) since the op before; ``work_ns[i]`` is
    the work from it to the op.
    """

    op: Int64
    listed: Int64
    rows_ns: Int64
    latency_ns: Int64
    work_ns: Int64

    def reach_ns(self, ops: int) -> Int64:
        """As in ``Lanes``, for so many ops."""
        reach = np.full(ops, NEVER, dtype=np.int64)
        np.maximum.at(reach, self.op, self.rows_ns.sum(axis=1) + self.latency_ns + self.work_ns)
        return reach


@dataclass(frozen=True, eq=False)
class RankLane:
    """Both lanes of one rank. ``moment_ns`` and ``done_ns`` (own clock) have, behind their starts, where host and
    device are at each op; ``rows_ns`` [op, HostTime] is what the host does before it, ``waited_ns`` how long it waits
    there.
    """

    lanes: Lanes
    points: LaunchPoints
    rows_ns: Int64
    moment_ns: Int64
    done_ns: Int64
    waited_ns: Int64
    ahead: Bool
    """Issues that began while the device still had work that was launched before."""
    behind: Bool
    """Those that waited for work of the device. Of the others the recording does not show whether they would."""


def rank_lane(progress: Progress, lane: HostLane, ops: ProgramOps, first_ns: int) -> RankLane:
    """The lanes beside ``ops``; the rank's schedule starts at ``first_ns``."""
    base = lane.begins_at(first_ns)
    moment = np.maximum(ops.moment_ns, base)
    early = ops.moment_ns < base
    rows = lane.rows_at(np.append(base, moment))
    passed = rows.sum(axis=1)
    done = np.maximum.accumulate(np.append(first_ns, np.maximum(lane.done_ns(moment), first_ns)))
    worked = work_before(progress.own, done)
    # When the recorded host was at each op, and after it: waits add to its own time.
    waiting = ops.waits & np.isin(ops.kind, _HOST_WAITS) & ~early
    delays = np.where(waiting, ops.time_ns - base - (passed[1:] - passed[0]), 0)
    delayed = np.maximum.accumulate(np.append(0, delays))
    host = base + passed[1:] - passed[0] + delayed[:-1]
    until = np.where((ops.kind == OpKind.WAIT) & ops.waits, ops.time_ns + ops.idle_ns, NEVER)
    device = np.maximum(done[1:], np.maximum.accumulate(np.append(NEVER, until))[:-1])
    points = _points(progress.own, lane, moment, (base, first_ns), rows, delayed, (done, worked))
    called = np.where(ops.end_ns == NONE, NEVER, np.minimum(ops.end_ns, ops.time_ns))
    issue = ops.kind == OpKind.ISSUE
    ahead = issue & (ops.begun_ns < device - _ROUNDING_NS)
    at_once = ops.begun_ns <= ops.time_ns + _AT_ONCE_NS  # else it waited for its stream, and may have for that alone
    behind = issue & (ops.begun_ns >= device) & (called < ops.time_ns) & at_once
    host_lag, device_lag = _lags(progress.own, ops, host, device, until, early, first_ns)
    # A call that follows later in the program does so after waits of the host, which are replayed: only its own time.
    between = lane.passed_ns(np.where(issue, called, moment)) - passed[1:]
    host_lag = np.where(issue & (host_lag != NEVER), np.minimum(host_lag, np.maximum(between, 0)), host_lag)
    lanes = Lanes(
        host_ns=np.diff(passed),
        work_ns=np.diff(worked),
        reach_ns=points.reach_ns(len(moment)),
        host_lag_ns=host_lag,
        device_lag_ns=device_lag,
        hold_ns=np.empty(0, dtype=np.int64),
        lead_ns=np.array([first_ns - base], dtype=np.int64),
    )
    waited = np.where(waiting, np.maximum(ops.time_ns - host, 0), 0)
    return RankLane(lanes, points, np.diff(rows, axis=0), np.append(base, moment), done, waited, ahead, behind)


def work_before(own: Timeline, time_ns: Int64) -> Int64:
    """The device's own time before each time, without what its host caused."""
    return np.asarray(own.totals(np.full(len(time_ns), own.start_ns[0]), time_ns)[:, OF_DEVICE].sum(axis=1))


def ran_before(own: Timeline, lane: HostLane, moment_ns: Int64, end_ns: Int64) -> Bool:
    """Did own work that was launched behind each moment run before ``end_ns``?"""
    done = np.maximum(lane.done_ns(moment_ns), own.start_ns[0])
    ran = work_before(own, end_ns) - work_before(own, np.minimum(done, end_ns))
    return np.asarray(ran > _ROUNDING_NS, dtype=np.bool_)


def _points(
    own: Timeline, lane: HostLane, moment: Int64, begin: tuple[int, int], passed: Int64, delayed: Int64,
    device: tuple[Int64, Int64],
) -> LaunchPoints:  # fmt: skip
    """``begin`` is where (host, device) start, ``device`` when it had come to each op, and its work until then."""
    base, first = begin
    listed = np.flatnonzero((lane.latency_ns != NONE) & (lane.at_ns >= base) & (lane.start_ns >= first))
    op = np.searchsorted(moment, lane.at_ns[listed], side="right")
    listed, op = listed[op < len(moment)], op[op < len(moment)]
    at = lane.at_ns[listed]
    came = lane.rows_ns[listed]
    launched = base + (came - passed[0]).sum(axis=1) + delayed[op] + lane.call_ns
    left = device[1][op + 1] - work_before(own, np.minimum(lane.start_ns[listed], device[0][op + 1]))
    rows = came - passed[op]
    rows[:, HostTime.OPERATORS] += lane.call_ns
    return LaunchPoints(op, listed, rows, at + lane.latency_ns[listed] - launched, np.maximum(left, 0))


def _lags(
    own: Timeline, ops: ProgramOps, host: Int64, device: Int64, until: Int64, early: Bool, first_ns: int
) -> tuple[Int64, Int64]:
    """(of hosts, of devices) such that the later of the two is the recorded time."""
    count = len(host)
    of_host, of_device = np.full(count, NEVER, dtype=np.int64), np.full(count, NEVER, dtype=np.int64)
    time, kind = ops.time_ns, ops.kind
    issue = kind == OpKind.ISSUE
    called = np.where(ops.end_ns == NONE, NEVER, np.minimum(ops.end_ns, time))
    ahead = device > ops.begun_ns
    of_host[issue] = np.where(called == NEVER, NEVER, called - host)[issue]
    of_device[issue] = np.where(
        (called == NEVER) | (called < time),
        time - device,
        np.where(ahead & (time < device), NEVER, np.minimum(time - device, 0)),
    )[issue]
    mark = kind == OpKind.MARK
    by_host = mark & (time > device) & idle_before(own, time)
    of_host[mark] = np.minimum(time - host, 0)[mark]
    of_device[mark] = (time - device)[mark]
    of_host[by_host], of_device[by_host] = (time - host)[by_host], 0
    wait = (kind == OpKind.WAIT) & ops.waits
    of_device[wait] = (until - ops.end_ns)[wait]
    of_host[kind == OpKind.HOLD] = -ops.end_ns[kind == OpKind.HOLD]
    join = kind == OpKind.JOIN
    of_host[join] = (time - ops.end_ns)[join]
    slots = np.full(int(ops.operand.max(initial=0)) + 1, NEVER, dtype=np.int64)
    note = kind == OpKind.NOTE
    slots[ops.operand[note]] = device[note]
    sync = np.isin(kind, (OpKind.SYNC, OpKind.QUEUE, OpKind.LIMIT))
    reached = np.where(ops.operand == NONE, device, slots[np.maximum(ops.operand, 0)])
    of_host[sync] = np.where(ops.waits, time - reached, 0)[sync]
    began = early & (issue | mark)
    of_host[began], of_device[began] = NEVER, (time - first_ns)[began]
    return of_host, of_device


def issued_beside(ranks: Sequence[tuple[ProgramOps, RankLane]]) -> list[Bool]:
    """For each rank the issues of which its recording does not show whether they wait for own work, because the device
    had none left, where others of their sort do not, on any rank: gathers of parameters, where hosts run ahead. Those
    of forwards may wait for other work than those of backwards, as FSDP2's do; where neither waits, nor do the others.
    """
    ahead = np.concatenate([ops.sort[lane.ahead] for ops, lane in ranks])
    behind = np.append(np.concatenate([ops.sort[lane.behind] for ops, lane in ranks]), NONE)
    free, of_both = np.setdiff1d(ahead, behind), np.setdiff1d(ahead // PASSES, behind // PASSES)
    return [
        (ops.kind == OpKind.ISSUE) & ~lane.ahead & (np.isin(ops.sort, free) | np.isin(ops.sort // PASSES, of_both))
        for ops, lane in ranks
    ]


def idle_before(own: Timeline, time_ns: Int64) -> Bool:
    """Was the device idle because of its host right before each time?"""
    stretch = np.clip(np.searchsorted(own.start_ns, time_ns, side="left") - 1, 0, len(own) - 1)
    return np.isin(own.category[stretch], OF_HOST)


def side_by_side(ranks: Sequence[Lanes], hold_ns: Int64) -> Lanes:
    """Those of all ranks; ``hold_ns`` are the hosts' moments."""
    columns = {
        column.name: np.concatenate([getattr(lanes, column.name) for lanes in ranks]) for column in fields(Lanes)
    }
    return Lanes(**{**columns, "hold_ns": hold_ns})
