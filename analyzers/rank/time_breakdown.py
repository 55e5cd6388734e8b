"""The time breakdown of one rank: every nanosecond of its steps in exactly one category (``TimeCategory``).

On a rank with device work, the categories describe the device: compute, exposed communication, copies, and, while the
device is idle, what the host was doing (``idle_layers``). A rank without device work (gloo on CPU) has the same
categories, applied to its training threads.

Example: a kernel runs in [0, 4), an all-reduce in [2, 6), nothing in [6, 10). Compute gets 4 ns, exposed communication
2 ns (the overlapped 2 ns count as compute), and the idle 4 ns go to what the host was doing.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives.communication import device_communication, host_communication_rows
from perfscope.analyzers.rank.host_activity import HostActivity
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.analyzers.rank.timeline import Timeline
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NONE, Category, Int64, Trace

_COMMUNICATION_OPERATOR: Final = re.compile(r"^(c10d|_c10d_functional|c10d_functional|symm_mem)::|^record_param_comms$")

_NOT_COMPUTE: Final = re.compile(rf"{_COMMUNICATION_OPERATOR.pattern}|^gloo:|^autograd::engine::")
"""Host operators that start or wait for communication, or that only wrap other operators."""


def time_breakdown(
    trace: Trace, work: DeviceWork, host: HostActivity, start_ns: int, end_ns: int
) -> tuple[Timeline, Intervals]:
    """Divide the window ``[start_ns, end_ns)`` among the categories, in order of precedence.

    All exposed communication is COMM_TRANSFER in the timeline: which part of it is wait for a late rank shows only when
    the ranks are compared. The intervals are all time in which a collective ran, overlapped or exposed.
    """
    if len(work):
        return _of_device(trace, work, host, start_ns, end_ns)
    return _of_host(trace, host, start_ns, end_ns)


def _of_device(
    trace: Trace, work: DeviceWork, host: HostActivity, start_ns: int, end_ns: int
) -> tuple[Timeline, Intervals]:
    is_communication = device_communication(trace, work)
    is_kernel = trace.category[work.row] == Category.KERNEL
    communication = work.time_of(is_communication)
    gaps = Intervals.of(work.start_ns, work.end_ns).complement(start_ns, end_ns)
    layers = [
        (TimeCategory.COMPUTE, work.time_of(is_kernel & ~is_communication)),
        (TimeCategory.COMM_TRANSFER, communication),
        (TimeCategory.COPY, work.time_of(~is_kernel)),
        *idle_layers(trace, work, host, gaps),
    ]
    return Timeline.of(start_ns, end_ns, layers, TimeCategory.UNKNOWN), communication


def idle_layers(
    trace: Trace, work: DeviceWork, host: HostActivity, gaps: Intervals
) -> list[tuple[TimeCategory, Intervals]]:
    """Attribute each idle gap of the device to what the host did until it launched the work that ends the gap.

    ::

        device  ###|<--------------- gap ---------------->|###
        host            sync |  loader  | op op |  |launch|
                   ^a                              ^s     ^b
        category        sync   dataloader  launch/host  launch

    - The next work was launched before the gap began (it was queued): the whole gap is *dependency*.
    - Otherwise the time from that launch on is *launch*, and the time before it is, in this order: *dataloader* inside
      the loader's ``__next__``; *sync* where a host synchronization delayed the launch; *launch* inside operators and
      runtime calls; else *host*.

    A synchronization that blocks the host in ``[x, y)`` gets what its removal would save: the host would have launched
    ``y - x`` earlier, so min(gap before the launch, y - x) is *sync*. It counts only in the gap that the first launch
    after it ends. Where a launch is not recorded, the whole gap counts as before it.

    The layers come in order of precedence. Without host threads in the trace, they leave time uncovered (*unknown*).
    """
    if len(gaps) == 0:
        return []
    next_work = np.searchsorted(work.start_ns, gaps.end_ns)
    known = next_work < len(work)
    call = np.full(len(gaps), NONE, dtype=np.int64)
    call[known] = work.launch[next_work[known]]
    known = call != NONE
    launched = np.where(known, trace.start_ns[call], gaps.end_ns)
    queued = known & (launched <= gaps.start_ns)
    before_launch = Intervals.of(gaps.start_ns[~queued], np.minimum(launched, gaps.end_ns)[~queued])
    latency = Intervals.of(np.maximum(launched, gaps.start_ns)[known & ~queued], gaps.end_ns[known & ~queued])
    dependency = Intervals.of(gaps.start_ns[queued], gaps.end_ns[queued])
    awaited = known & ~queued
    drained = _drained_by_sync(host, gaps.start_ns[awaited], launched[awaited], _launch_times(trace, work))
    layers = [
        (TimeCategory.DEPENDENCY, dependency),
        (TimeCategory.LAUNCH, latency),
        (TimeCategory.DATALOADER, before_launch.intersect(host.loading)),
        (TimeCategory.SYNC, drained),
        (TimeCategory.LAUNCH, before_launch.intersect(host.operators)),
    ]
    return [*layers, (TimeCategory.HOST, before_launch)] if len(host.threads) else layers


def _launch_times(trace: Trace, work: DeviceWork) -> Int64:
    calls = np.unique(work.launch[work.launch != NONE])
    return np.sort(trace.start_ns[calls])


def _drained_by_sync(host: HostActivity, gap_start: Int64, launched: Int64, launches: Int64) -> Intervals:
    """The part of each gap that the last host synchronization before its launch caused."""
    if len(host.blocked_start_ns) == 0 or len(gap_start) == 0:
        return Intervals.empty()
    begin, end = host.blocked_by_end()
    last = np.searchsorted(end, launched, side="right") - 1
    some = last >= 0
    x, y = begin[np.maximum(last, 0)], end[np.maximum(last, 0)]
    launches_since = np.searchsorted(launches, launched) - np.searchsorted(launches, y)
    caused = some & (launches_since == 0) & (x < gap_start)
    share = np.minimum(launched - gap_start, y - x)
    return Intervals.of(gap_start[caused], (gap_start + share)[caused])


def _of_host(trace: Trace, host: HostActivity, start_ns: int, end_ns: int) -> tuple[Timeline, Intervals]:
    communication = Intervals.of_rows(trace, host_communication_rows(trace))
    computing = Intervals.of_rows(trace, _computing_rows(trace, host)).subtract(host.loading)
    layers = [
        (TimeCategory.COMPUTE, computing.subtract(_starting_or_waiting(trace, host))),
        (TimeCategory.COMM_TRANSFER, communication),
        (TimeCategory.DATALOADER, host.loading),
    ]
    return Timeline.of(start_ns, end_ns, layers, TimeCategory.HOST), communication


def _starting_or_waiting(trace: Trace, host: HostActivity) -> Intervals:
    """When the training threads start or wait for communication, which may be inside an operator that computes.

    The first operator that uses the result of a functional collective waits for it.
    """
    rows = trace.rows(Category.CPU_OP, named=_COMMUNICATION_OPERATOR.match, threads=host.threads)
    return Intervals.of_rows(trace, rows)


def _computing_rows(trace: Trace, host: HostActivity) -> Int64:
    """Operators on the training threads that compute.

    Left out: operators that start or wait for communication, and wrappers without a namespace (autograd nodes, custom
    functions) that contain other operators, because such a wrapper also covers the waits inside it.
    """
    rows = trace.rows(Category.CPU_OP, threads=host.threads)
    order = np.lexsort((-trace.duration_ns[rows], trace.start_ns[rows], trace.thread[rows]))
    rows = rows[order]
    holds = np.zeros(len(rows), dtype=np.bool_)
    if len(rows) > 1:
        same_thread = trace.thread[rows][1:] == trace.thread[rows][:-1]
        holds[:-1] = same_thread & (trace.start_ns[rows][1:] < trace.end_ns[rows][:-1])
    namespaced = trace.names_where(lambda name: "::" in name)[rows]
    excluded = trace.names_where(_NOT_COMPUTE.match)[rows]
    return rows[~excluded & (namespaced | ~holds)]
