"""One rank's own progress: what it does without waiting for other ranks, and where it waits for them.

Exposed communication does not always block: while a collective runs alone on the device, the host may be busy with the
loader or with launches, and then the rank does not wait for the collective's end. A rank is *blocked* by communication
where its next compute was already queued, or its host was in a synchronizing call, until a collective ended::

    device   compute |          all-reduce          | compute
    host     launches of the next compute |  . . . .
             ^own    ^ own: the host is late ^blocked ^own
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives.collectives import POINT_TO_POINT, Collectives
from perfscope.analyzers.rank.collectives.communication import device_communication, in_order_of_collectives
from perfscope.analyzers.rank.collectives.waiting_copies import WaitingCopies, waiting_copies
from perfscope.analyzers.rank.host_activity import HostActivity
from perfscope.analyzers.rank.host_lane import LATER, HostLane
from perfscope.analyzers.rank.idle import LATENCY_NS, QUEUED_NS, idle_layers, queued_gap_ns
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.launch_order import host_lane
from perfscope.analyzers.rank.launches import DeviceWork, copied_beside_ns, full_queue
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.timeline import Progress, Timeline
from perfscope.results.categories import TimeCategory
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NEVER, NONE, Bool, Category, Int64, Trace

_AT_ONCE_NS: Final = 50_000
"""A backend's thread begins its next queued collective within this time."""

_LONG_GAP_NS: Final = 1_000_000
"""A thread that is idle for this long while a collective runs waits; it is not just between two operators."""

_GAPS: Final = 2.0
_LONGEST_GAP_NS: Final = 5_000
_MANY: Final = 20
"""Gaps between queued kernels are up to so many times their median long, and no longer than this, where so many of them
show it."""

_COLLECTIVE_OPERATOR: Final = re.compile(r"^c10d::(?!barrier|monitored)[a-z_]+$")
"""torch.distributed's operators that issue a collective to a backend."""

_NEXT_WAIT_NS: Final = 100_000
"""A wait for a message that is there returns within this time of the wait before it."""

_ROUNDED_NS: Final = 1_000
"""Traces round starts and durations: to a nanosecond each, and doubles of microseconds since 1970 to 250. What begins
as something ends may seem to begin so much before that end."""

_WAKING_NS: Final = 500_000
"""A thread that waited for a collective continues within this time of its end, on a busy machine too."""


def progress(
    trace: Trace, work: DeviceWork, host: HostActivity, collectives: Collectives, timeline: Timeline, steps: Steps
) -> Progress:
    """Own progress of one rank over the time that ``timeline`` (its time breakdown) covers."""
    queue = full_queue(trace, work)
    away = host.loading.union(Intervals.of(host.blocked_start_ns, host.blocked_end_ns)).union(queue)
    busy = steps.host_end_ns - steps.host_start_ns - away.within(steps.host_start_ns, steps.host_end_ns)
    if work.made_up or (steps.marked and not len(trace.rows(Category.CPU_OP, Category.RUNTIME, Category.PYTHON))):
        busy = np.zeros_like(busy)  # nothing shows what the host did in its step
    copy_ns = np.zeros(len(collectives), dtype=np.int64)
    if len(timeline) == 0:
        # Nothing in the window has a duration.
        nothing = np.empty(0, dtype=np.int64)
        none = np.zeros(len(steps), dtype=np.int64)
        late = np.zeros(len(steps), dtype=np.bool_)
        return Progress(timeline, nothing, collectives.start_ns, none, none, late, busy, none, copy_ns)
    if len(work) == 0:
        own = _own_timeline_of_threads(host, collectives, timeline, _turns_ns(trace, host, collectives))
        none = np.zeros(len(steps), dtype=np.int64)
        ready = _issued_at(trace, host, collectives)
        late = np.ones(len(steps), dtype=np.bool_)
        return Progress(own, _blockers(own, collectives), ready, none, none, late, busy, none, copy_ns)
    is_communication = device_communication(trace, work)
    copies = waiting_copies(trace, work, is_communication)
    not_own = is_communication | copies.is_copy
    own_work = work.part(~not_own)
    own = _own_timeline(trace, own_work, host, collectives, timeline)
    first = np.minimum(np.searchsorted(work.start_ns, steps.start_ns), len(work) - 1)
    launched = work.launch_start_ns(trace)[first]
    behind = work.start_ns[first] - launched
    lane = host_lane(trace, work, is_communication, copies, host, queue, collectives, own, steps)
    return Progress(
        own=own,
        blocker=_blockers(own, collectives),
        ready_ns=_ready(trace, work, is_communication, copies, collectives, lane),
        lead_ns=launched - steps.host_start_ns,
        behind_ns=behind,
        late=(work.launch[first] != NONE) & (behind < LATENCY_NS),
        host_busy_ns=busy,
        beside_ns=copied_beside_ns(trace, work, _launched_in(trace, work, steps), len(steps)),
        copy_ns=copies.took_ns,
        host=lane,
    )


def _launched_in(trace: Trace, work: DeviceWork, steps: Steps) -> Int64:
    """Index of the step that launches each piece of work, or in which it starts where that is not known; -1: none."""
    in_device_time = steps.of_device_time(work.start_ns)
    return np.where(work.launch == NONE, in_device_time, steps.of_host_time(work.launch_start_ns(trace)))


def _own_timeline(
    trace: Trace, own: DeviceWork, host: HostActivity, collectives: Collectives, timeline: Timeline
) -> Timeline:
    begin, end = int(timeline.start_ns[0]), timeline.end_ns
    is_kernel = trace.category[own.row] == Category.KERNEL
    gaps = Intervals.of(own.start_ns, own.end_ns).complement(begin, end)
    blocked = _blocked(trace, own, host, collectives, gaps)
    layers = [
        (TimeCategory.COMPUTE, own.time_of(is_kernel)),
        (TimeCategory.COPY, own.time_of(~is_kernel)),
        (TimeCategory.COMM_TRANSFER, blocked),
        (TimeCategory.DEPENDENCY, _turnarounds(trace, own, gaps)),
        *idle_layers(trace, own, host, gaps.subtract(blocked)),
    ]
    return Timeline.of(begin, end, layers, TimeCategory.UNKNOWN)


def _turnarounds(trace: Trace, own: DeviceWork, gaps: Intervals) -> Intervals:
    """What a device would be idle for in each gap if the work behind it had been launched earlier."""
    return Intervals.of(gaps.start_ns, np.minimum(gaps.start_ns + queued_gap_ns(trace, own, gaps), gaps.end_ns))


def _own_timeline_of_threads(
    host: HostActivity, collectives: Collectives, timeline: Timeline, turns_ns: Int64
) -> Timeline:
    """On CPUs, the training threads are blocked where they do nothing until a collective ends, and then continue: with
    compute, or with the next collective or wait (``turns_ns``).

    A thread that continues long after the last end had something else to do. One that continues a little before the end
    of a collective that had been running was waiting too: the backend's thread signals first and closes its range when
    it is scheduled again. Not so of a message: the thread that waits for it closes its range (``_is_message``).
    """
    compute = timeline.where(TimeCategory.COMPUTE)
    gaps = compute.union(host.loading).complement(int(timeline.start_ns[0]), timeline.end_ns)
    begin, until = _cut(gaps, turns_ns)
    length = until - begin
    order = np.argsort(collectives.end_ns, kind="stable")
    ends, place = collectives.end_ns[order], np.searchsorted(collectives.end_ns[order], until, side="right")
    waits = _until_last_end(ends, begin, until)
    last = np.concatenate(([np.iinfo(np.int64).min], ends))[place]
    inside = (last > begin) & (until - last <= np.maximum(_WAKING_NS, length // 10))
    following, started = np.append(ends, LATER)[place], np.append(collectives.start_ns[order], LATER)[place]
    # It is issued as the gap begins; the backend's thread begins it a little later.
    running = (started <= begin + length // 2) & ~np.append(_is_message(collectives)[order], False)[place]
    before_end = ~inside & running & (length >= _LONG_GAP_NS) & (following - until <= length // 2)
    whole = Intervals.of(begin[inside | before_end], until[inside | before_end])
    layers = [
        (TimeCategory.COMPUTE, compute),
        (TimeCategory.DATALOADER, host.loading),
        (TimeCategory.COMM_TRANSFER, whole.union(waits.intersect(gaps)) if len(waits) else whole),
    ]
    return Timeline.of(int(timeline.start_ns[0]), timeline.end_ns, layers, TimeCategory.HOST)


def _turns_ns(trace: Trace, host: HostActivity, collectives: Collectives) -> Int64:
    """When the training threads turn to something else than the wait that they are in: they issue a collective, or a
    message has ended, and another one that was issued before ends at once: programs wait for them one after another.
    """
    rows = trace.rows(Category.CPU_OP, named=_COLLECTIVE_OPERATOR.match, threads=host.threads)
    is_message = _is_message(collectives)
    start, end = collectives.start_ns[is_message], collectives.end_ns[is_message]
    order = np.argsort(end, kind="stable")
    start, end = start[order], end[order]
    in_turn = (np.diff(end) > 0) & (np.diff(end) <= _NEXT_WAIT_NS) & (start[1:] < end[:-1])
    return np.concatenate((trace.start_ns[rows], end[:-1][in_turn]))


def _is_message(collectives: Collectives) -> Bool:
    """Which are sends and recvs. gloo's range around one ends in the training thread's wait for it
    (c10d's ProcessGroupGloo.cpp: SendWork and RecvWork), those of collectives in a thread of the backend.
    """
    return np.isin(np.array(collectives.kinds or ("",))[collectives.kind], POINT_TO_POINT)


def _cut(gaps: Intervals, at_ns: Int64) -> tuple[Int64, Int64]:
    """(starts, ends) of the gaps, cut at these moments. What follows a cut begins 1 ns later, so that two waits, one
    after the other, stay two.
    """
    at_ns = distinct(at_ns)
    inside = at_ns[gaps.covers(at_ns) & ~np.isin(at_ns, gaps.start_ns) & ~np.isin(at_ns + 1, gaps.end_ns)]
    return np.sort(np.append(gaps.start_ns, inside + 1)), np.sort(np.append(gaps.end_ns, inside))


def _issued_at(trace: Trace, host: HostActivity, collectives: Collectives) -> Int64:
    """When a training thread issued each collective to the backend's threads: the end of its c10d operator.

    Only their order links the two. Where their numbers differ, only the collectives' own starts are known; one that
    begins as soon as its thread has finished another was issued no later than that one began.
    """
    rows = trace.rows(Category.CPU_OP, named=_COLLECTIVE_OPERATOR.match, threads=host.threads)
    if len(rows) != len(collectives):
        return _queued_behind(collectives)
    return np.minimum(trace.ends_ns(rows), collectives.start_ns)


def _queued_behind(collectives: Collectives) -> Int64:
    """The start of each collective, or of the first one in a row that its thread carried out without a pause."""
    ready = collectives.start_ns.copy()
    order = np.lexsort((collectives.start_ns, collectives.stream))
    same_thread = collectives.stream[order][1:] == collectives.stream[order][:-1]
    at_once = collectives.start_ns[order][1:] - collectives.end_ns[order][:-1] <= _AT_ONCE_NS
    follows = np.concatenate(([False], same_thread & at_once))
    first = np.maximum.accumulate(np.where(follows, 0, np.arange(len(order))))
    ready[order] = ready[order[first]]
    return np.asarray(ready, dtype=np.int64)


def _blocked(trace: Trace, own: DeviceWork, host: HostActivity, collectives: Collectives, gaps: Intervals) -> Intervals:
    """In each gap between the rank's own work, the time that only an earlier end of a collective could shorten."""
    if len(gaps) == 0 or len(collectives) == 0:
        return Intervals.empty()
    ends = np.sort(collectives.end_ns)
    following = np.searchsorted(own.start_ns, gaps.end_ns)
    known = following < len(own)
    launched = gaps.end_ns.copy()
    launched[known] = own.launch_start_ns(trace)[following[known]]
    # Where the launch is not recorded, the work counts as queued for the whole gap.
    unknown = ~known
    unknown[known] = own.launch[following[known]] == NONE
    launched[unknown] = gaps.start_ns[unknown]
    queued_from = np.maximum(launched, gaps.start_ns)
    waits = gaps.end_ns - gaps.start_ns > _usual_gap_ns((gaps.end_ns - gaps.start_ns)[launched <= gaps.start_ns])
    queued = _until_last_end(ends, queued_from[waits], gaps.end_ns[waits])
    late = launched > gaps.start_ns
    synced = _in_sync(host, ends, gaps.start_ns[late], np.minimum(launched, gaps.end_ns)[late])
    return queued.union(synced).intersect(gaps)


def _usual_gap_ns(gaps_ns: Int64) -> float:
    """What passes between two kernels of a device that has the next one in its queue. In so short a gap a collective
    ends by chance: among hundreds of kernels in a backward some begin just then.
    """
    return min(_GAPS * float(np.median(gaps_ns)), _LONGEST_GAP_NS) if len(gaps_ns) >= _MANY else 0.0


def _until_last_end(ends: Int64, begin: Int64, until: Int64) -> Intervals:
    """For each stretch, its part up to the last collective's end inside it; nothing where none ends inside."""
    if len(ends) == 0:
        return Intervals.empty()
    last = np.searchsorted(ends, until, side="right") - 1
    end = np.where(last >= 0, ends[np.maximum(last, 0)], begin)
    return Intervals.of(begin, np.maximum(end, begin))


def _in_sync(host: HostActivity, ends: Int64, gap_start: Int64, launched: Int64) -> Intervals:
    """In each gap before its launch, the time inside the host's last blocking call, up to a collective's end."""
    if len(host.blocked_end_ns) == 0 or len(gap_start) == 0:
        return Intervals.empty()
    begin, end = host.blocked_by_end()
    last = np.searchsorted(end, launched, side="right") - 1
    some = (last >= 0) & (end[np.maximum(last, 0)] > gap_start)
    return _until_last_end(ends, np.maximum(begin[last[some]], gap_start[some]), end[last[some]])


def _blockers(own: Timeline, collectives: Collectives) -> Int64:
    """For each blocked stretch, the collective that ended last before its end.

    Where none ended inside it (the timeline ends there, or its thread continued before the range was closed), the one
    that ends next: it was running, or the stretch would not be one.
    """
    stretches = own.where(TimeCategory.COMM_TRANSFER)
    if len(stretches) == 0:
        return np.empty(0, dtype=np.int64)
    order = np.argsort(collectives.end_ns, kind="stable")
    position = np.searchsorted(collectives.end_ns[order], stretches.end_ns, side="right")
    ended, following = order[np.maximum(position - 1, 0)], order[np.minimum(position, len(order) - 1)]
    inside = (position > 0) & (collectives.end_ns[ended] > stretches.start_ns)
    return np.where(inside, ended, following).astype(np.int64)


def _queued_on_device(work: DeviceWork, is_communication: Bool, collectives: Collectives) -> Int64:
    """When each collective can have become ready, where no launch is recorded. One that begins as soon as another has
    ended, on its stream or another one, has waited for that. It was ready when the work before it was done; of a row
    on one stream, between the start of the first and the end of the last work before the last, by their bytes.

    Example: four buckets of gradients, the first ready at 5. The others reduce it only from 20 on, so the rest follow
    then; the backward ended at 11. The buckets are taken to be ready at 5, 7, 9 and 11.
    """
    if len(collectives) == 0:
        return collectives.start_ns
    ready = collectives.start_ns.copy()
    done, ended = np.sort(work.end_ns[~is_communication]), np.sort(collectives.end_ns)
    order = np.lexsort((collectives.start_ns, collectives.stream))
    start, end, stream = collectives.start_ns[order], collectives.end_ns[order], collectives.stream[order]
    follows = (stream[1:] == stream[:-1]) & (start[1:] - end[:-1] <= QUEUED_NS)
    begins = np.flatnonzero(np.concatenate(([True], ~follows)))
    able = _last_until(done, start)
    awaited = _last_until(ended, start)
    begun = np.where((start - awaited <= QUEUED_NS) & (awaited > able + QUEUED_NS) & (able > NEVER), able, start)
    for first, last in zip(begins.tolist(), np.append(begins[1:], len(order)).tolist(), strict=True):
        until = max(int(able[last - 1]), int(begun[first]))
        size = collectives.bytes[order[first:last]].astype(np.float64)
        passed = np.cumsum(size if (size > 0).all() else np.ones(len(size)))
        share = (passed - passed[0]) / max(passed[-1] - passed[0], 1.0)
        ready[order[first:last]] = begun[first] + ((until - begun[first]) * share).astype(np.int64)
    return np.asarray(np.minimum(ready, collectives.start_ns), dtype=np.int64)


def _last_until(ascending: Int64, time_ns: Int64) -> Int64:
    """The last of these moments up to each time; ``NEVER`` without one."""
    return np.append(NEVER, ascending)[np.searchsorted(ascending, time_ns, side="right")]


def _ready(
    trace: Trace, work: DeviceWork, is_communication: Bool, copies: WaitingCopies, collectives: Collectives,
    lane: HostLane | None,
) -> Int64:  # fmt: skip
    """When each communication kernel had been launched and the compute kernel launched last before it had ended.

    A kernel that started before that compute kernel's end did not need it (a prefetch): only its launch counts, and
    what it waited for instead (``HostLane.behind_ns``). Copies into its buffer that waited for another collective take
    the time from there to when it was ready. On one stream none is ready before those in front of it, so
    that all ranks issue them in one order.
    """
    chosen = in_order_of_collectives(work, is_communication)
    launch = work.launch[chosen]
    called = np.where(launch == NONE, _queued_on_device(work, is_communication, collectives), trace.ends_ns(launch))
    ready = np.minimum(called, work.start_ns[chosen])
    is_own = ~is_communication & ~copies.is_copy
    kernels = np.flatnonzero(is_own & (work.launch != NONE) & (trace.category[work.row] == Category.KERNEL))
    if len(kernels):
        kernels = kernels[np.argsort(trace.start_ns[work.launch[kernels]], kind="stable")]
        before = np.searchsorted(trace.start_ns[work.launch[kernels]], work.launch_start_ns(trace)[chosen]) - 1
        tail = np.where(before >= 0, work.end_ns[kernels[np.maximum(before, 0)]], ready)
        needed = (launch != NONE) & (tail <= collectives.start_ns + _ROUNDED_NS)
        ready = np.where(needed, np.maximum(ready, np.minimum(tail, collectives.start_ns)), ready)
    ready = np.minimum(ready + copies.took_ns, collectives.start_ns)
    if lane is not None:
        awaited = np.minimum(lane.done_ns(lane.behind_ns) + copies.took_ns, collectives.start_ns)
        ready = np.where(lane.behind_ns != NONE, np.maximum(ready, awaited), ready)
    for stream in distinct(collectives.stream).tolist():
        of_stream = np.flatnonzero(collectives.stream == stream)
        ready[of_stream] = np.maximum.accumulate(ready[of_stream])
    return ready
