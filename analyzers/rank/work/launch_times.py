"""One rank's kernel launches: how many, how long they take, how full the device's queue is."""

from __future__ import annotations

import numpy as np

from perfscope.analyzers.rank.launches import DeviceWork, unlisted_graphs
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.work.tables import SHORT_NS, LaunchTimes
from perfscope.trace.trace import NONE, Category, Float64, Int32, Int64, Trace


def launch_times(trace: Trace, work: DeviceWork, steps: Steps) -> LaunchTimes:
    """Launches that begin in each step's host window; the queue over the step's device window."""
    depth = _depth(trace, work, steps)  # needs the most memory: nothing else is there yet
    # Work is in order of its start: a call's delay ends with its first piece.
    calls, first = np.unique(work.launch, return_index=True)
    calls, first = calls[calls != NONE], first[calls != NONE]
    start, end = trace.start_ns[calls], trace.ends_ns(calls)
    step = steps.of_host_time(start)
    here = np.flatnonzero(step >= 0)
    delay = np.maximum(work.start_ns[first] - end, 0)
    median, p95 = _quantiles(step[here], delay[here].astype(np.float64), len(steps), (0.5, 0.95))
    is_kernel = trace.category[work.row] == Category.KERNEL
    kernel_step = steps.of_device_time(work.start_ns)
    length = work.end_ns - work.start_ns
    graphs = unlisted_graphs(trace)
    if len(graphs):
        graphs = np.setdiff1d(graphs, work.launch)
    return LaunchTimes(
        calls=steps.count(step),
        call_ns=steps.count(step, trace.duration_ns[calls]),
        delay_median_ns=median,
        delay_p95_ns=p95,
        depth_median=depth,
        starved=steps.count(step[_starved(work, calls, start)]),
        kernels=steps.count(kernel_step[is_kernel]),
        short=steps.count(kernel_step[is_kernel & (length < SHORT_NS)]),
        unlisted_graphs=steps.count(steps.of_host_time(trace.start_ns[graphs])),
    )


def _starved(work: DeviceWork, calls: Int64, start_ns: Int64) -> Int64:
    """Indices of the calls at whose start the device is idle and nothing is queued; without the first call."""
    place = np.full(len(work), NONE, dtype=np.int64)
    known = work.launch != NONE
    place[known] = np.searchsorted(calls, work.launch[known])
    last_end = np.zeros(len(calls), dtype=np.int64)
    np.maximum.at(last_end, place[known], work.end_ns[known])
    order = np.argsort(start_ns, kind="stable")
    ended = np.maximum.accumulate(last_end[order])
    return order[1:][ended[:-1] <= start_ns[order[1:]]]


def _depth(trace: Trace, work: DeviceWork, steps: Steps) -> Float64:
    """Median, over the time of each step's device window, of the number of pieces launched and not yet begun."""
    known = np.flatnonzero(work.launch != NONE)
    if len(known) == 0:
        return np.full(len(steps), np.nan)
    begun = work.start_ns[known]
    # Work may begin before its call returns; it was launched then.
    launched = np.minimum(trace.ends_ns(work.launch[known]), begun)
    edges = np.concatenate((launched, begun, steps.start_ns, steps.end_ns))
    change = np.repeat(np.array([1, -1, 0], dtype=np.int8), (len(known), len(known), 2 * len(steps)))
    del known, begun, launched
    order = np.argsort(edges, kind="stable")
    edges, depth = edges[order], np.cumsum(change[order], dtype=np.int32)
    del order, change
    length = np.diff(edges)
    stretch = np.flatnonzero(length > 0)
    step = steps.of_device_time(edges[stretch])
    stretch, step = stretch[step >= 0], step[step >= 0]
    return _weighted_median(step, depth[stretch], length[stretch], len(steps))


def _weighted_median(group: Int64, value: Int32, weight: Int64, groups: int) -> Float64:
    order = np.lexsort((value, group))
    group, value, weight = group[order], value[order], weight[order]
    total = np.bincount(group, weights=weight, minlength=groups)
    before = np.concatenate(([0.0], np.cumsum(total)))[:-1]
    until = np.cumsum(weight)
    at = np.searchsorted(until, before + total / 2)
    result = np.full(groups, np.nan)
    result[total > 0] = value[at[total > 0]]
    return result


def _quantiles(group: Int64, value: Float64, groups: int, shares: tuple[float, ...]) -> tuple[Float64, ...]:
    """For each share, the quantile of each group: the smallest value that at least this share does not exceed."""
    order = np.lexsort((value, group))
    ranked = value[order]
    counts = np.bincount(group, minlength=groups)
    before = np.concatenate(([0], np.cumsum(counts)))[:-1]
    results = []
    for share in shares:
        result = np.full(groups, np.nan)
        at = before + np.maximum(np.ceil(share * counts).astype(np.int64) - 1, 0)
        result[counts > 0] = ranked[at[counts > 0]]
        results.append(result)
    return tuple(results)
