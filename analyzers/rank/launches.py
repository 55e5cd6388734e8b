"""Which call launched which device work, and which calls return only when the device is done.

Where no call of the runtime is recorded, the operator that the profiler names for the work stands for it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.rank.intervals import Intervals
from perfscope.frozen import dataclass
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import DEVICE_WORK, NONE, Bool, Category, Int64, Trace

GRAPH_LAUNCH: Final = re.compile(r"^(cuda|hip|cu)GraphLaunch")
"""Calls that launch a whole graph."""

_BLOCKS: Final = re.compile(
    r"^(cuda|hip)(Stream|Device|Event|Thread)Synchronize|^cu(Ctx|Stream|Event)Synchronize"
    r"|^(cuda|hip)Memcpy(2D|3D|(To|From)Symbol|DtoH|HtoD|WithStream)?(_spt|_ptsz|_ptds)?$"
    r"|^cuMemcpy(2D|3D|DtoH|HtoD)?(_v2)?(_ptds)?$|^(cuda|hip)Free$|^cuMemFree(_v2)?$"
)
"""Calls that block by definition. CUDA Runtime API, "API synchronization behavior"; HIP's ``hipMemcpyWithStream`` is
``hipMemcpyAsync`` and ``hipStreamSynchronize``; freeing memory waits for the whole device."""

_ASYNCHRONOUS: Final = re.compile(r"^(cuda|hip|cu)Memcpy\w*Async")
_TO_OR_FROM_HOST: Final = re.compile(r"^(?!.*Pinned).*(HtoD|DtoH|Host)", re.IGNORECASE)
"""Copies between the device and memory of the host that is not pinned, by kineto's names. CUPTI's and ROCm's agree."""

_ACROSS: Final = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost", re.IGNORECASE)
"""Copies between the device and its host."""

_LONG_WAIT_NS: Final = 500_000
"""A call that blocks for this long waits for the device: what it does itself takes less."""

_QUEUED_NS: Final = 100_000
"""Work that starts this long after its launch has returned is queued: an idle device takes some 10 µs."""

_AT_ONCE_NS: Final = 20_000
_LONG_NS: Final = 50_000
_MANY: Final = 10
_HALF: Final = 0.5
_MOST: Final = 0.9
_LAST_PART: Final = 0.3
_EVEN: Final = 0.02
"""Launches are made up where so many kernels, and half of all, follow at once on one of at least that length, and most
of these were launched in the last part of it, or half of them as long before their start but for that share of it."""

_WAITS_TIMES: Final = 5
_WAITS_NS: Final = 30_000
"""A launch takes 3 to 20 µs. One that takes this long, and so many times as long as others, waits."""

_FAR_AHEAD: Final = 500
"""Pieces of work in front of a launch from which the queue, which takes about a thousand, may have been full."""

_THOUSAND_NS: Final = 1_000_000
"""A thousand kernels take at least this long."""


@dataclass(frozen=True, eq=False)
class DeviceWork:
    """Every piece of work on the device in order of its start, with the call that launched it.

    Parallel arrays; ``launch`` is a row of the trace: of a runtime call, or of an operator where there are no such
    calls; NONE where it is not recorded.
    """

    row: Int64
    start_ns: Int64
    end_ns: Int64
    launch: Int64
    made_up: bool = False
    """The recorded launches are not those of a host, and left out."""
    incomplete: bool = False
    """Of every step some is missing: what the device did between two pieces of work is not known."""

    def __len__(self) -> int:
        return len(self.row)

    def part(self, chosen: Bool) -> DeviceWork:
        """Some of the work."""
        return replace(
            self,
            row=self.row[chosen],
            start_ns=self.start_ns[chosen],
            end_ns=self.end_ns[chosen],
            launch=self.launch[chosen],
        )

    def time_of(self, chosen: Bool) -> Intervals:
        """The time of some of the work."""
        return Intervals.of(self.start_ns[chosen], self.end_ns[chosen])

    def launch_start_ns(self, trace: Trace) -> Int64:
        """Start of the launching call; the work's own start where the call is unknown."""
        return np.where(self.launch == NONE, self.start_ns, trace.start_ns[self.launch])


def device_work(trace: Trace) -> DeviceWork:
    """Kernels, copies and memsets of one rank.

    Several pieces of work may share a correlation id (the nodes of one CUDA graph): one call launched them all. Where
    several runtime calls share one (a runtime call and the driver call inside it), the outermost counts: it starts
    first, and rows are in time order.
    """
    rows = trace.rows(*DEVICE_WORK)
    start = trace.start_ns[rows]
    calls = trace.rows(Category.RUNTIME)
    calls = calls[trace.correlation[calls] != NONE]
    ids, first = np.unique(trace.correlation[calls], return_index=True)
    wanted = trace.correlation[rows]
    launch = np.full(len(rows), NONE, dtype=np.int64)
    if len(ids):
        position = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
        known = (ids[position] == wanted) & (wanted != NONE)
        launch[known] = calls[first[position[known]]]
    _find_graphs(trace, start, launch)
    if (launch == NONE).all():
        launch = _by_operator(trace, rows)
    work = DeviceWork(rows, start, start + trace.duration_ns[rows], launch)
    return replace(work, launch=np.full(len(rows), NONE), made_up=True) if _are_made_up(trace, work) else work


def _are_made_up(trace: Trace, work: DeviceWork) -> bool:
    """Were the calls placed by whoever wrote the trace, in relation to the kernels?

    A host knows nothing of when its device will be done. Where it is ahead, kernels lie in the queue for any time. It
    does not call shortly before the kernel in front ends, nor as long before each kernel, time and again; nor after the
    kernel has begun.
    """
    order = np.lexsort((work.start_ns, trace.stream[work.row]))
    stream, start, launch = trace.stream[work.row][order], work.start_ns[order], work.launch[order]
    length, known = work.end_ns[order] - start, launch != NONE
    called = np.where(known, trace.start_ns[launch], start)
    if known.sum() >= _MANY and np.mean(called[known] > start[known]) >= _HALF:
        return True
    queued = (stream[1:] == stream[:-1]) & known[1:] & (launch[1:] != launch[:-1])
    before_end = start[:-1] + length[:-1] - called[1:]
    queued &= (start[1:] - start[:-1] - length[:-1] <= _AT_ONCE_NS) & (before_end > 0) & (length[:-1] >= _LONG_NS)
    if queued.sum() < max(_MANY, _HALF * len(work)):
        return False  # a host whose device waits for it most of the time may be as regular
    ran, before_end, delay = length[:-1][queued], before_end[queued], (start - called)[1:][queued]
    even = np.diff(np.quantile(delay, (0.3, 0.7)))[0] <= _EVEN * np.median(ran)
    return bool(even or np.mean(before_end <= _LAST_PART * ran) >= _MOST)


def _by_operator(trace: Trace, rows: Int64) -> Int64:
    """The operator with the external id of each piece of work, where it had begun by then; NONE without one."""
    operators = trace.rows(Category.CPU_OP)
    operators = operators[trace.external_id[operators] != NONE]
    ids, first = np.unique(trace.external_id[operators], return_index=True)
    if len(ids) == 0:
        return np.full(len(rows), NONE, dtype=np.int64)
    wanted = trace.external_id[rows]
    position = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    launch = operators[first[position]]
    known = (ids[position] == wanted) & (trace.start_ns[launch] <= trace.start_ns[rows])
    return np.where(known, launch, NONE)


def full_queue(trace: Trace, work: DeviceWork) -> Intervals:
    """The time in launches that wait for a place in the device's queue, which takes about a thousand: they last many
    times as long as a launch does, which copies and graphs, whose calls do more, are not.
    """
    calls = _launches_of_kernels(trace, work)
    if len(calls) == 0:
        return Intervals.of(calls, calls)
    usual = _usual_launch_ns(trace, work, calls)
    # Behind short kernels no launch waits for long, but all of them do.
    least = 2 * usual if _is_always_full(trace, work, calls) else max(_WAITS_TIMES * usual, _WAITS_NS)
    waits = calls[trace.duration_ns[calls] > least]
    return Intervals.of(trace.start_ns[waits], trace.ends_ns(waits))


def launch_ns(trace: Trace, work: DeviceWork, queue: Intervals) -> int:
    """What a launch takes (median) that is not in the time of the full ``queue``. Where any may wait for a place in it,
    the shortest have waited, too.
    """
    calls = _launches_of_kernels(trace, work)
    if len(queue) and len(calls) and _is_always_full(trace, work, calls):
        return int(_usual_launch_ns(trace, work, calls))
    free = work.launch[work.launch != NONE]
    free = free[~queue.covers(trace.start_ns[free])]
    return int(np.median(trace.duration_ns[free])) if len(free) else 0


def _launches_of_kernels(trace: Trace, work: DeviceWork) -> Int64:
    """Rows of the calls of the runtime that launch one kernel each."""
    calls = distinct(work.launch[(work.launch != NONE) & (trace.category[work.row] == Category.KERNEL)])
    each: Int64 = calls[(trace.category[calls] == Category.RUNTIME) & ~np.isin(calls, graph_launches(trace))]
    return each


def _usual_launch_ns(trace: Trace, work: DeviceWork, calls: Int64) -> float:
    """What a launch among ``calls`` takes where it waits for no place in the queue: a tenth of them take less."""
    soon = _started_soon(trace, work, calls)
    usual = float(np.quantile(trace.duration_ns[soon if len(soon) >= _MANY else calls], 0.1))
    return min(usual, _WAITS_NS / _WAITS_TIMES) if _is_always_full(trace, work, calls) else usual


def _is_always_full(trace: Trace, work: DeviceWork, calls: Int64) -> bool:
    """A host that nothing stops fills its device's queue: then any of its launches may wait."""
    return len(_started_soon(trace, work, calls)) < _MANY and _furthest_ahead(trace, work) >= _FAR_AHEAD


def _furthest_ahead(trace: Trace, work: DeviceWork) -> int:
    """Most pieces of work that were launched and had not begun."""
    known = work.launch != NONE
    launched, begun = np.sort(work.launch_start_ns(trace)[known]), np.sort(work.start_ns[known])
    return int((np.arange(len(launched)) - np.searchsorted(begun, launched)).max(initial=0))


def _started_soon(trace: Trace, work: DeviceWork, calls: Int64) -> Int64:
    """Those of the ``calls`` whose work started so soon that no thousand kernels were in front of it."""
    launched = work.part(np.isin(work.launch, calls))
    streams, count = np.unique(trace.stream[launched.row], return_counts=True)
    # On another stream work starts at once, however full the queue.
    behind = trace.stream[launched.row] == streams[count.argmax()]
    soon: Int64 = launched.launch[behind & (launched.start_ns - launched.launch_start_ns(trace) < _THOUSAND_NS)]
    return soon


def done_ns(called_ns: Int64, end_ns: Int64, time_ns: Int64) -> Int64:
    """When all work that was launched before each of these times has ended; the least int64 where none was.

    ``called_ns``, ascending, and ``end_ns`` are the work's.
    """
    ended = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(end_ns))
    return np.asarray(ended[np.searchsorted(called_ns, time_ns)], dtype=np.int64)


def graph_launches(trace: Trace) -> Int64:
    """Rows of the calls that launch a CUDA graph."""
    return trace.rows(Category.RUNTIME, named=GRAPH_LAUNCH.match)


def unlisted_graphs(trace: Trace) -> Int64:
    """Rows of those graph launches whose correlation id no device work has."""
    graphs = graph_launches(trace)
    if len(graphs) == 0:
        return graphs
    return graphs[~np.isin(trace.correlation[graphs], trace.correlation[trace.rows(*DEVICE_WORK)])]


def _find_graphs(trace: Trace, start_ns: Int64, launch: Int64) -> None:
    """Work without a recorded launch after the launch of a graph of which no node is recorded: these are its nodes."""
    graphs = unlisted_graphs(trace)
    nameless = np.flatnonzero(launch == NONE)
    if len(graphs):
        last = np.searchsorted(trace.start_ns[graphs], start_ns[nameless], side="right") - 1
        launch[nameless[last >= 0]] = graphs[last[last >= 0]]


def launched_before_recording(trace: Trace, work: DeviceWork) -> Bool:
    """Work that was launched before the recording began: a stream's first, up to the first with a recorded launch.

    A stream without any recorded launch is compared with the first launch of all.
    """
    stream = trace.stream[work.row]
    known = np.flatnonzero(work.launch != NONE)
    if len(known) == 0:
        return np.zeros(len(work), dtype=np.bool_)
    streams, earliest = np.unique(stream[known], return_index=True)
    position = np.minimum(np.searchsorted(streams, stream), len(streams) - 1)
    first = np.where(streams[position] == stream, known[earliest[position]], known[0])
    return np.asarray((work.launch == NONE) & (np.arange(len(work)) < first))


def blocking_calls(trace: Trace, work: DeviceWork, threads: Int64) -> Int64:
    """Rows of the blocking calls on the given threads, ascending.

    An asynchronous copy from or to pageable memory blocks as well, unless it is so small that the driver sets it aside:
    it blocked where it began before its call returned.
    """
    named = trace.rows(Category.RUNTIME, named=_BLOCKS.match, threads=threads)
    copies = np.flatnonzero((trace.category[work.row] == Category.MEMCPY) & (work.launch != NONE))
    copies = copies[trace.names_where(_TO_OR_FROM_HOST.match, work.row[copies])]
    calls = work.launch[copies]
    waited = (work.start_ns[copies] < trace.ends_ns(calls)) & trace.names_where(_ASYNCHRONOUS.match, calls)
    waited &= np.isin(trace.thread[calls], threads)
    return np.union1d(named, calls[waited])


def earlier_work_done_ns(trace: Trace, work: DeviceWork) -> int:
    """Until when the device shows that it did work of before the recording, none of which is recorded; the least int64
    where it shows nothing.

    The first work of a stream starts long after it was launched, or a blocking call before all launches waits, and
    nothing recorded ends meanwhile for which they may have waited. Copies between host and device, as of batches that
    are sent ahead on another stream, may: unless one ends as the work starts, it did not wait for them.
    """
    known = np.flatnonzero(work.launch != NONE)
    never = int(np.iinfo(np.int64).min)
    if len(known) == 0:
        return never
    called = trace.start_ns[work.launch[known]]
    known = known[np.argsort(called, kind="stable")]
    first = known[np.unique(trace.stream[work.row[known]], return_index=True)[1]]
    start, call = work.start_ns[first], work.launch[first]
    # A call that returns after its work has begun, as a copy of pageable memory does, may have been at work itself.
    returned = trace.ends_ns(call)
    since = np.where(returned <= start, returned, trace.start_ns[call])
    queued = start - since >= np.where(since == returned, _QUEUED_NS, _LONG_WAIT_NS)
    calls = blocking_calls(trace, work, distinct(trace.thread).astype(np.int64))
    launches = np.zeros(len(trace), dtype=np.bool_)
    launches[work.launch[known]] = True
    calls = calls[(trace.start_ns[calls] <= called.min()) & ~launches[calls]]
    waited = trace.duration_ns[calls] >= _LONG_WAIT_NS
    since = np.concatenate((since[queued], trace.start_ns[calls[waited]]))
    done = np.concatenate((start[queued], trace.ends_ns(calls[waited])))
    across = _is_across(trace, work)
    recorded = _any_ends(work.end_ns[~across], since, done)
    recorded |= _any_ends(work.end_ns[across], np.maximum(since, done - _AT_ONCE_NS), done)
    return int(done[~recorded].max(initial=never))


def _any_ends(end_ns: Int64, since_ns: Int64, until_ns: Int64) -> Bool:
    """Whether some of these ends lie behind each begin and no later than its end."""
    ends = np.sort(end_ns)
    counts = (np.searchsorted(ends, edge, side="right") for edge in (until_ns, since_ns))
    return np.asarray(np.greater(*counts), dtype=np.bool_)


def _is_across(trace: Trace, work: DeviceWork) -> Bool:
    """Which work copies between host and device."""
    copies = trace.category[work.row] == Category.MEMCPY
    return np.asarray(copies & trace.names_where(_ACROSS.search)[work.row], dtype=np.bool_)


def copied_beside_ns(trace: Trace, work: DeviceWork, step: Int64, steps: int) -> Int64:
    """For each step (``step`` has that of each piece of work, -1: of none), how long its copies between host and device
    take on another stream than most kernels: on the one where they take longest.
    """
    kernel, copy = trace.category[work.row] == Category.KERNEL, _is_across(trace, work) & (step >= 0)
    streams, stream = np.unique(trace.stream[work.row], return_inverse=True)
    took = np.zeros((len(streams), steps), dtype=np.int64)
    np.add.at(took, (stream[copy], step[copy]), (work.end_ns - work.start_ns)[copy])
    took[np.bincount(stream[kernel], minlength=len(streams)).argmax()] = 0
    return np.asarray(took[took.sum(axis=1).argmax()], dtype=np.int64)
