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
from perfscope.analyzers.rank.host_activity import COMPILING, HostActivity
from perfscope.analyzers.rank.idle import idle_layers
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.analyzers.rank.timeline import Timeline
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Category, Int64, Trace

COMMUNICATION_OPERATOR: Final = re.compile(r"^(c10d|_c10d_functional|c10d_functional|symm_mem)::|^record_param_comms$")

NOT_COMPUTE: Final = re.compile(rf"{COMMUNICATION_OPERATOR.pattern}|^gloo:|^autograd::engine::")
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


def _of_host(trace: Trace, host: HostActivity, start_ns: int, end_ns: int) -> tuple[Timeline, Intervals]:
    communication = Intervals.of_rows(trace, host_communication_rows(trace))
    computing = Intervals.of_rows(trace, computing_rows(trace, host))
    computing = computing.subtract(host.loading).subtract(host.named[COMPILING])
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
    rows = trace.rows(Category.CPU_OP, named=COMMUNICATION_OPERATOR.match, threads=host.threads)
    return Intervals.of_rows(trace, rows)


def computing_rows(trace: Trace, host: HostActivity) -> Int64:
    """Operators on the training threads that compute.

    Left out: what runs while the compiler does, operators that start or wait for communication, and wrappers
    without a namespace (autograd nodes, custom functions) that contain other operators, because such a wrapper also
    covers the waits inside it.
    """
    rows = trace.rows(Category.CPU_OP, threads=host.threads)
    order = np.lexsort((-trace.duration_ns[rows], trace.start_ns[rows], trace.thread[rows]))
    rows = rows[order]
    holds = np.zeros(len(rows), dtype=np.bool_)
    if len(rows) > 1:
        same_thread = trace.thread[rows][1:] == trace.thread[rows][:-1]
        holds[:-1] = same_thread & (trace.start_ns[rows][1:] < trace.ends_ns(rows)[:-1])
    namespaced = trace.names_where(lambda name: "::" in name, rows)
    excluded = trace.names_where(NOT_COMPUTE.match, rows)
    compiling = host.named[COMPILING].covers(trace.start_ns[rows])
    return rows[~excluded & ~compiling & (namespaced | ~holds)]
