"""The exact account of one rank: every nanosecond of its steps in exactly one row.

On a rank with device work the device is watched: compute, communication, copies, and what the host did while the device
was idle. A rank without one (gloo on CPU) has the same rows: its device is its own training threads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.collectives.communication import device_communication
from perfscope.analyzers.collectives.of_rank import host_communication_rows
from perfscope.analyzers.host_activity import HostActivity
from perfscope.analyzers.intervals import Intervals
from perfscope.analyzers.launches import DeviceWork
from perfscope.analyzers.timeline import Row, Timeline
from perfscope.trace import NONE, Bool, Category, Int64, Trace

_COMMUNICATION_OPERATOR: Final = re.compile(r"^(c10d|_c10d_functional|c10d_functional|symm_mem)::|^record_param_comms$")

_NOT_COMPUTE: Final = re.compile(rf"{_COMMUNICATION_OPERATOR.pattern}|^gloo:|^autograd::engine::")
"""Host operators that wait for or start communication, or that only wrap others."""


@dataclass(frozen=True, eq=False)
class RankAccount:
    """One rank's account before the ranks are compared.

    ``timeline`` covers ``[start, end)`` of the rank's windows with all exposed communication as COMM_TRANSFER;
    ``communication`` is all time in which a collective ran, hidden or exposed.
    """

    timeline: Timeline
    communication: Intervals


def account(trace: Trace, work: DeviceWork, host: HostActivity, start_ns: int, end_ns: int) -> RankAccount:
    """Paint the window ``[start_ns, end_ns)`` row by row, in order of precedence."""
    if len(work):
        return _device_account(trace, work, host, start_ns, end_ns)
    return _host_account(trace, host, start_ns, end_ns)


def _device_account(trace: Trace, work: DeviceWork, host: HostActivity, start_ns: int, end_ns: int) -> RankAccount:
    is_communication = device_communication(trace, work)
    is_kernel = trace.category[work.row] == Category.KERNEL

    def union(chosen: Bool) -> Intervals:
        return Intervals.of(work.start_ns[chosen], work.end_ns[chosen])

    communication = union(is_communication)
    gaps = union(np.ones(len(work), dtype=np.bool_)).complement(start_ns, end_ns)
    idle = idle_layers(trace, work, host, gaps)
    timeline = Timeline.of(
        start_ns,
        end_ns,
        [
            (Row.COMPUTE, union(is_kernel & ~is_communication)),
            (Row.COMM_TRANSFER, communication),
            (Row.COPY, union(~is_kernel)),
            *idle,
        ],
        Row.UNKNOWN,
    )
    return RankAccount(timeline, communication)


def idle_layers(trace: Trace, work: DeviceWork, host: HostActivity, gaps: Intervals) -> list[tuple[Row, Intervals]]:
    """Why the device was idle in each gap, by what the host did until it launched the work that ends the gap.

    ::

        device  ###|<--------------- gap ---------------->|###
        host            sync |  loader  | op op |  |launch|
                   ^a                              ^s     ^b
        row         sync       dataloader  sync?/launch/host launch

    A gap whose next work was launched before it began is a dependency: the work was queued. Otherwise the time from the
    launch on is launch latency, and the time before it belongs to the data loader, then to a sync that drained the
    device, then to launching where the host was in operators, then to the host.

    A sync is charged what its removal would bring: had the host not been blocked for ``y - x``, it would have launched
    that much earlier, so min(gap, y - x) of the idle time is the sync's. It is charged only in the gap that the first
    launch after it ends.
    """
    if len(gaps) == 0:
        return []
    following = np.searchsorted(work.start_ns, gaps.end_ns)
    known = following < len(work)
    call = np.full(len(gaps), NONE, dtype=np.int64)
    call[known] = work.launch[following[known]]
    known = call != NONE
    launched = np.where(known, trace.start_ns[call], gaps.end_ns)
    queued = known & (launched <= gaps.start_ns)
    before_launch = Intervals.of(gaps.start_ns[~queued], np.minimum(launched, gaps.end_ns)[~queued])
    latency = Intervals.of(np.maximum(launched, gaps.start_ns)[known & ~queued], gaps.end_ns[known & ~queued])
    dependency = Intervals.of(gaps.start_ns[queued], gaps.end_ns[queued])
    awaited = known & ~queued
    drained = _drained_by_sync(host, gaps.start_ns[awaited], launched[awaited], _launch_times(trace, work))
    layers = [
        (Row.DEPENDENCY, dependency),
        (Row.LAUNCH, latency),
        (Row.DATALOADER, before_launch.intersect(host.loading)),
        (Row.SYNC, drained),
        (Row.LAUNCH, before_launch.intersect(host.operators)),
    ]
    # Without any record of the host nothing can be said of it: the rest stays unknown.
    return [*layers, (Row.HOST, before_launch)] if len(host.threads) else layers


def _launch_times(trace: Trace, work: DeviceWork) -> Int64:
    calls = np.unique(work.launch[work.launch != NONE])
    return np.sort(trace.start_ns[calls])


def _drained_by_sync(host: HostActivity, gap_start: Int64, launched: Int64, launches: Int64) -> Intervals:
    """The part of each gap's wait for its launch that the last blocking wait before that launch is charged with."""
    if len(host.blocked_start_ns) == 0 or len(gap_start) == 0:
        return Intervals.empty()
    order = np.argsort(host.blocked_end_ns, kind="stable")
    begin, end = host.blocked_start_ns[order], host.blocked_end_ns[order]
    last = np.searchsorted(end, launched, side="right") - 1
    some = last >= 0
    x, y = begin[np.maximum(last, 0)], end[np.maximum(last, 0)]
    launches_since = np.searchsorted(launches, launched) - np.searchsorted(launches, y)
    charged = some & (launches_since == 0) & (x < gap_start)
    share = np.minimum(launched - gap_start, y - x)
    return Intervals.of(gap_start[charged], (gap_start + share)[charged])


def _host_account(trace: Trace, host: HostActivity, start_ns: int, end_ns: int) -> RankAccount:
    rows = host_communication_rows(trace)
    communication = Intervals.of(trace.start_ns[rows], trace.end_ns[rows])
    operators = _computing_rows(trace, host)
    compute = Intervals.of(trace.start_ns[operators], trace.end_ns[operators]).subtract(host.loading)
    compute = compute.subtract(_issuing_and_awaiting(trace, host))
    timeline = Timeline.of(
        start_ns,
        end_ns,
        [(Row.COMPUTE, compute), (Row.COMM_TRANSFER, communication), (Row.DATALOADER, host.loading)],
        Row.HOST,
    )
    return RankAccount(timeline, communication)


def _issuing_and_awaiting(trace: Trace, host: HostActivity) -> Intervals:
    """When the training threads start or await communication, which may be inside an operator that computes.

    A tensor that a functional collective has not delivered yet is awaited by the first operator that is given it.
    """
    named = trace.names_where(lambda name: _COMMUNICATION_OPERATOR.match(name) is not None)
    rows = np.flatnonzero(named & (trace.category == Category.CPU_OP) & np.isin(trace.thread, host.threads))
    return Intervals.of(trace.start_ns[rows], trace.end_ns[rows])


def _computing_rows(trace: Trace, host: HostActivity) -> Int64:
    """Operators on the training threads that compute.

    Left out: those that start or await communication, and wrappers without a namespace (autograd nodes, custom
    functions) that hold other operators, since such a wrapper also spans waits inside it.
    """
    rows = np.flatnonzero((trace.category == Category.CPU_OP) & np.isin(trace.thread, host.threads))
    order = np.lexsort((-trace.duration_ns[rows], trace.start_ns[rows], trace.thread[rows]))
    rows = rows[order]
    holds = np.zeros(len(rows), dtype=np.bool_)
    if len(rows) > 1:
        same_thread = trace.thread[rows][1:] == trace.thread[rows][:-1]
        holds[:-1] = same_thread & (trace.start_ns[rows][1:] < trace.end_ns[rows][:-1])
    namespaced = trace.names_where(lambda name: "::" in name)[rows]
    excluded = trace.names_where(lambda name: _NOT_COMPUTE.match(name) is not None)[rows]
    return rows[~excluded & (namespaced | ~holds)]
