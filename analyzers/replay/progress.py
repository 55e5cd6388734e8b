"""One rank's own progress: what it would have done without waiting for anyone, and where it truly waited.

Exposed communication is not blocking: while a collective runs alone on the device, the host may be busy with the loader
or with launches, and then the collective's end is not what the rank waits for. A rank is *blocked* by communication
where its next work of its own was already queued, or its host sat in a synchronising call, and a collective ended
before that could go on::

    device   compute |          all-reduce          | compute
    host     launches of the next compute |  . . . .
             ^own    ^ own: the host is late ^blocked ^own
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.account import idle_layers
from perfscope.analyzers.collectives.communication import Collectives, device_communication
from perfscope.analyzers.host_activity import HostActivity
from perfscope.analyzers.intervals import Intervals
from perfscope.analyzers.launches import DeviceWork
from perfscope.analyzers.steps import Steps
from perfscope.analyzers.timeline import Row, Timeline
from perfscope.trace import NONE, Bool, Category, Int64, Trace

_AT_ONCE_NS: Final = 50_000
"""A backend's thread that has more to do begins it within this time."""

_LONG_GAP_NS: Final = 1_000_000
"""A thread that does nothing for this long while a collective runs is not between two operators: it waits."""

_PROMPT_NS: Final = 50_000
"""Work that starts within this time of its launch found the device idle: launches take 5 to 20 µs to get there."""

_COLLECTIVE_OPERATOR: Final = re.compile(r"^c10d::(?!barrier|monitored)[a-z_]+$")
"""torch.distributed's operators that hand work to a backend."""

_WAKING_NS: Final = 500_000
"""A thread that waited for a collective goes on within this time of its end, on a busy machine too."""


@dataclass(frozen=True, eq=False)
class Progress:
    """``own`` is the rank's account with COMM_TRANSFER where it was blocked by communication and by nothing else;
    everything else in it is the rank's own time, also under communication that ran meanwhile.

    ``blocker`` holds, for each blocked stretch of ``own`` in order, the collective whose end it waited for (a row of
    the rank's ``Collectives``); a thread on a CPU may go on a little before or after that end.

    ``ready_ns`` holds, for each collective, when the rank had all that it needed to begin it, its stream apart: never
    after its start.

    ``lead_ns`` holds, for each step, how long after the host's begin of the step it launched what the window begins
    with; ``late``: the device waited for that launch. ``host_busy_ns`` is, for each step, the host's time outside the
    loader and blocking calls: the step cannot be shorter, however quick the device.
    """

    own: Timeline
    blocker: Int64
    ready_ns: Int64
    lead_ns: Int64
    late: Bool
    host_busy_ns: Int64

    @property
    def blocked(self) -> Intervals:
        """When the rank was blocked by communication."""
        return self.own.where(Row.COMM_TRANSFER)

    def unblocked(self) -> Timeline:
        """The rank's own account alone: ``own`` without its blocked stretches, closed up, beginning at 0."""
        kept = self.own.row != Row.COMM_TRANSFER
        length = (self.own.ends_ns - self.own.start_ns)[kept]
        ends = np.cumsum(length)
        return Timeline(ends - length, self.own.row[kept], int(length.sum()))


def progress(
    trace: Trace, work: DeviceWork, host: HostActivity, collectives: Collectives, timeline: Timeline, steps: Steps
) -> Progress:
    """Own progress of one rank over the stretch that ``timeline`` (its account) covers."""
    held_up = host.loading.union(Intervals.of(host.blocked_start_ns, host.blocked_end_ns))
    busy = steps.host_end_ns - steps.host_start_ns - held_up.within(steps.host_start_ns, steps.host_end_ns)
    if len(timeline) == 0:
        # Nothing in the window takes any time.
        nothing = np.empty(0, dtype=np.int64)
        lead = np.zeros(len(steps), dtype=np.int64)
        return Progress(timeline, nothing, collectives.start_ns, lead, np.zeros(len(steps), dtype=np.bool_), busy)
    if len(work) == 0:
        own = _own_timeline_of_threads(host, collectives, timeline)
        lead = steps.start_ns - steps.host_start_ns
        ready = _handed_over(trace, host, collectives)
        return Progress(own, _blockers(own, collectives), ready, lead, np.ones(len(steps), dtype=np.bool_), busy)
    is_communication = device_communication(trace, work)
    own_work = DeviceWork(
        *(column[~is_communication] for column in (work.row, work.start_ns, work.end_ns, work.launch))
    )
    own = _own_timeline(trace, own_work, host, collectives, timeline)
    first = np.minimum(np.searchsorted(work.start_ns, steps.start_ns), len(work) - 1)
    launched = work.launch_start_ns(trace)[first]
    return Progress(
        own=own,
        blocker=_blockers(own, collectives),
        ready_ns=_ready(trace, work, is_communication, collectives),
        lead_ns=launched - steps.host_start_ns,
        late=(work.launch[first] != NONE) & (steps.start_ns - launched < _PROMPT_NS),
        host_busy_ns=busy,
    )


def _own_timeline(
    trace: Trace, own: DeviceWork, host: HostActivity, collectives: Collectives, timeline: Timeline
) -> Timeline:
    begin, end = int(timeline.start_ns[0]), timeline.end_ns
    is_kernel = trace.category[own.row] == Category.KERNEL

    def union(chosen: Bool) -> Intervals:
        return Intervals.of(own.start_ns[chosen], own.end_ns[chosen])

    gaps = union(np.ones(len(own), dtype=np.bool_)).complement(begin, end)
    blocked = _blocked(trace, own, host, collectives, gaps)
    layers = [
        (Row.COMPUTE, union(is_kernel)),
        (Row.COPY, union(~is_kernel)),
        (Row.COMM_TRANSFER, blocked),
        *idle_layers(trace, own, host, gaps),
    ]
    return Timeline.of(begin, end, layers, Row.UNKNOWN)


def _own_timeline_of_threads(host: HostActivity, collectives: Collectives, timeline: Timeline) -> Timeline:
    """On CPUs: the training threads are blocked where they do nothing until a collective ends, and then go on.

    A thread that goes on long after the last end had something else to do. One that goes on a little before the end was
    waiting all the same: the backend's thread signals first and closes its range when it is scheduled again.
    """
    compute = timeline.where(Row.COMPUTE)
    gaps = compute.union(host.loading).complement(int(timeline.start_ns[0]), timeline.end_ns)
    begin, until = gaps.start_ns, gaps.end_ns
    length = until - begin
    ends = np.sort(collectives.end_ns)
    waits = _until_last_end(ends, begin, until)
    last = np.concatenate(([np.iinfo(np.int64).min], ends))[np.searchsorted(ends, until, side="right")]
    inside = (last > begin) & (until - last <= np.maximum(_WAKING_NS, length // 10))
    following = np.append(ends, np.iinfo(np.int64).max)[np.searchsorted(ends, until, side="right")]
    started = np.sort(collectives.start_ns)
    # Handed over as the gap begins, it is begun by another thread a little later.
    running = np.searchsorted(started, begin + length // 2, side="right") > np.searchsorted(ends, until, side="right")
    before_end = ~inside & running & (length >= _LONG_GAP_NS) & (following - until <= length // 2)
    whole = Intervals.of(begin[inside | before_end], until[inside | before_end])
    layers = [
        (Row.COMPUTE, compute),
        (Row.DATALOADER, host.loading),
        (Row.COMM_TRANSFER, whole.union(waits.intersect(gaps)) if len(waits) else whole),
    ]
    return Timeline.of(int(timeline.start_ns[0]), timeline.end_ns, layers, Row.HOST)


def _handed_over(trace: Trace, host: HostActivity, collectives: Collectives) -> Int64:
    """When a training thread handed each collective to the backend's threads: the end of its c10d operator.

    Nothing links the two but their order. Where their numbers differ only the collectives' own starts are known, and
    one that begins as soon as its thread has ended another was handed over no later than that one began.
    """
    hit = trace.names_where(lambda name: _COLLECTIVE_OPERATOR.match(name) is not None)
    rows = np.flatnonzero(hit & (trace.category == Category.CPU_OP) & np.isin(trace.thread, host.threads))
    if len(rows) != len(collectives):
        return _queued_behind(collectives)
    return np.minimum(trace.end_ns[rows], collectives.start_ns)


def _queued_behind(collectives: Collectives) -> Int64:
    """The start of each collective, or of the first of those that its thread carried out one right after the other."""
    ready = collectives.start_ns.copy()
    order = np.lexsort((collectives.start_ns, collectives.stream))
    same_thread = collectives.stream[order][1:] == collectives.stream[order][:-1]
    at_once = collectives.start_ns[order][1:] - collectives.end_ns[order][:-1] <= _AT_ONCE_NS
    follows = np.concatenate(([False], same_thread & at_once))
    first = np.maximum.accumulate(np.where(follows, 0, np.arange(len(order))))
    ready[order] = ready[order[first]]
    return np.asarray(ready, dtype=np.int64)


def _blocked(trace: Trace, own: DeviceWork, host: HostActivity, collectives: Collectives, gaps: Intervals) -> Intervals:
    """In each gap between pieces of the rank's own work, the time that only a collective's end could shorten."""
    if len(gaps) == 0 or len(collectives) == 0:
        return Intervals.empty()
    ends = np.sort(collectives.end_ns)
    following = np.searchsorted(own.start_ns, gaps.end_ns)
    known = following < len(own)
    launched = gaps.end_ns.copy()
    launched[known] = own.launch_start_ns(trace)[following[known]]
    # A launch that is not recorded says nothing of the host: the work counts as queued all along.
    unknown = ~known
    unknown[known] = own.launch[following[known]] == NONE
    launched[unknown] = gaps.start_ns[unknown]
    queued_from = np.maximum(launched, gaps.start_ns)
    queued = _until_last_end(ends, queued_from, gaps.end_ns)
    late = launched > gaps.start_ns
    synced = _in_sync(host, ends, gaps.start_ns[late], np.minimum(launched, gaps.end_ns)[late])
    return queued.union(synced).intersect(gaps)


def _until_last_end(ends: Int64, begin: Int64, until: Int64) -> Intervals:
    """For each stretch, its part up to the last collective's end inside it; nothing where none ends inside."""
    if len(ends) == 0:
        return Intervals.empty()
    last = np.searchsorted(ends, until, side="right") - 1
    end = np.where(last >= 0, ends[np.maximum(last, 0)], begin)
    return Intervals.of(begin, np.maximum(end, begin))


def _in_sync(host: HostActivity, ends: Int64, gap_start: Int64, launched: Int64) -> Intervals:
    """The part of each gap before its launch in which the host sat in its last blocking call, up to a collective's
    end.
    """
    if len(host.blocked_end_ns) == 0 or len(gap_start) == 0:
        return Intervals.empty()
    order = np.argsort(host.blocked_end_ns, kind="stable")
    begin, end = host.blocked_start_ns[order], host.blocked_end_ns[order]
    last = np.searchsorted(end, launched, side="right") - 1
    some = (last >= 0) & (end[np.maximum(last, 0)] > gap_start)
    return _until_last_end(ends, np.maximum(begin[last[some]], gap_start[some]), end[last[some]])


def _blockers(own: Timeline, collectives: Collectives) -> Int64:
    """For each blocked stretch, the collective that ended last before its end.

    Where none ended inside it (it was cut short by the account's end, or its thread went on before the range was
    closed), the one that ends next.
    """
    stretches = own.where(Row.COMM_TRANSFER)
    if len(stretches) == 0:
        return np.empty(0, dtype=np.int64)
    order = np.argsort(collectives.end_ns, kind="stable")
    position = np.searchsorted(collectives.end_ns[order], stretches.end_ns, side="right")
    ended, following = order[np.maximum(position - 1, 0)], order[np.minimum(position, len(order) - 1)]
    inside = (position > 0) & (collectives.end_ns[ended] > stretches.start_ns)
    return np.where(inside, ended, following).astype(np.int64)


def _ready(trace: Trace, work: DeviceWork, is_communication: Bool, collectives: Collectives) -> Int64:
    """When each communication kernel had been launched and the compute kernel launched last before it had ended.

    A kernel that started before that compute kernel's end did not need it (a prefetch): only its launch counts.
    """
    chosen = np.flatnonzero(is_communication)
    chosen = chosen[np.lexsort((work.end_ns[chosen], work.start_ns[chosen]))]
    launch = work.launch[chosen]
    called = np.where(launch == NONE, work.start_ns[chosen], trace.end_ns[launch])
    ready = np.minimum(called, work.start_ns[chosen])
    kernels = np.flatnonzero(~is_communication & (work.launch != NONE) & (trace.category[work.row] == Category.KERNEL))
    if len(kernels):
        kernels = kernels[np.argsort(trace.start_ns[work.launch[kernels]], kind="stable")]
        before = np.searchsorted(trace.start_ns[work.launch[kernels]], work.launch_start_ns(trace)[chosen]) - 1
        tail = np.where(before >= 0, work.end_ns[kernels[np.maximum(before, 0)]], ready)
        needed = (launch != NONE) & (tail <= collectives.start_ns)
        ready = np.where(needed, np.maximum(ready, tail), ready)
    return ready
