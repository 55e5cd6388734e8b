"""Finds a rank's host lane: which of its device's work was launched when, and what its blocking calls waited for."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives.collectives import Collectives
from perfscope.analyzers.rank.collectives.communication import in_order_of_collectives
from perfscope.analyzers.rank.collectives.waiting_copies import WaitingCopies
from perfscope.analyzers.rank.extra.extra_work import cost_of_issuing
from perfscope.analyzers.rank.host_activity import COLLECTING, LIMIT, HostActivity
from perfscope.analyzers.rank.host_lane import LATER, OF_DEVICE, OF_HOST, HostLane, HostTime, HostWaits
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.launches import DeviceWork, launch_ns
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.time_breakdown import COMMUNICATION_OPERATOR
from perfscope.analyzers.rank.timeline import Timeline
from perfscope.results.categories import TimeCategory
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NEVER, NONE, Bool, Category, Int64, Trace

_BLOCKS: Final = 128
"""A step is cut into about so many stretches; of the work in each, three pieces are kept."""

_PROMPT_NS: Final = 20_000
"""From a launch to the start of its work no more passes, where nothing else keeps that waiting; nor from the end of
work to that of the call that waits for it."""

_LONG_WAIT_TIMES: Final = 10
"""A wait for a place in the device's queue so many times as long as most is for more than one kernel."""

_EVENT_CALL: Final = re.compile("EventSynchronize")

_STREAM_WAIT: Final = re.compile("^(cuda|hip|cu)StreamWaitEvent")

_LIMIT: Final = re.compile(f"^{re.escape(LIMIT)}$")

_MOST_UNKNOWN: Final = 0.5
"""Share of a device's work whose launches may be missing."""


def host_lane(
    trace: Trace, work: DeviceWork, is_communication: Bool, copies: WaitingCopies, host: HostActivity, queue: Intervals,
    collectives: Collectives, own: Timeline, steps: Steps,
) -> HostLane | None:  # fmt: skip
    """The lane of one rank; ``own`` is its own timeline, ``queue`` its ``full_queue``. None where too few launches are
    recorded.
    """
    mine = np.flatnonzero(~is_communication & ~copies.is_copy)
    if len(mine) == 0 or (work.launch[mine] == NONE).mean() > _MOST_UNKNOWN:
        return None
    return _Builder(trace, work, mine, is_communication, copies, host, queue, collectives, own, steps).lane()


class _Builder:
    def __init__(
        self, trace: Trace, work: DeviceWork, mine: Int64, is_communication: Bool, copies: WaitingCopies,
        host: HostActivity, queue: Intervals, collectives: Collectives, own: Timeline, steps: Steps,
    ) -> None:  # fmt: skip
        self._trace, self._host, self._collectives, self._own, self._steps = trace, host, collectives, own, steps
        index = np.arange(len(mine))
        self._launched = work.launch_start_ns(trace)[mine]
        # In the order of their starts; what starts later was not launched before, as far as the device is concerned.
        self._at = np.minimum.accumulate((self._launched - index)[::-1])[::-1] + index
        self._start = work.start_ns[mine]
        ended = np.maximum.accumulate(work.end_ns[mine])
        self._ended = ended
        self._gap = np.concatenate(([False], self._start[1:] > ended[:-1]))
        self._end = np.minimum(ended, np.append(self._start[1:], LATER))
        is_event = trace.names_where(_EVENT_CALL.search, host.blocked_row)
        by_end = np.argsort(host.blocked_end_ns, kind="stable")
        self._copied = _places_of(work.launch[mine], host.blocked_row[by_end])
        limits = trace.rows(Category.ANNOTATION, named=_LIMIT.match, threads=host.threads)
        self._limits = Intervals.of_rows(trace, limits)
        self._of_event = is_event[by_end]
        self._call_ns = launch_ns(trace, work.part(~is_communication & ~copies.is_copy), queue)
        # What is left is the launch.
        self._queue = Intervals.of(queue.start_ns, np.maximum(queue.end_ns - self._call_ns, queue.start_ns))
        launched = work.launch != NONE
        passed = work.start_ns[launched] - trace.start_ns[work.launch[launched]]
        self._least_ns = min(max(int(passed.min()), 0), _PROMPT_NS)
        chosen = in_order_of_collectives(work, is_communication)
        known = work.launch[chosen] != NONE
        self._issued = np.where(known, trace.start_ns[work.launch[chosen]], NONE)
        self._called = np.where(known, trace.ends_ns(work.launch[chosen]), NONE)
        self._cost = cost_of_issuing(trace, host, self._issued, self._called)
        self._behind = self._behind_events(copies)

    def lane(self) -> HostLane:
        waits, waiting = self._waits()
        blocked_ns, joined = self._blocking(waits)
        for_queue = self._queue_waits()
        late, latency = self._late()
        arrived = np.where(late, self._start, np.minimum(self._at + latency, self._start))
        cuts = distinct(
            np.concatenate((
                self._issued[self._issued != NONE], self._behind[self._behind != NONE],
                blocked_ns[blocked_ns < LATER], waits.entered_ns, waits.noted_ns,
                for_queue.entered_ns, for_queue.noted_ns,
                self._host.loading.end_ns, self._steps.host_start_ns,
                *(self._next_launch(edges) for edges in (self._steps.start_ns, self._steps.end_ns)),
            ))
        )  # fmt: skip
        cuts = cuts[(cuts > NEVER) & (cuts < LATER)]
        ends = np.concatenate((cuts, self._at[:1], self._at[-1:]))  # no step may have an edge: there may be no cut
        begin, end = int(ends.min()), int(ends.max()) + 1
        rows = _HostRows(self._host, waiting.union(self._queue), begin, end)
        kept = self._kept(arrived, rows.total_before(self._at), cuts)
        at = np.concatenate((self._at[kept], cuts))
        at, first = np.unique(at, return_index=True)
        launches = first < len(kept)
        place = kept[np.where(launches, first, 0)]
        ends = self._end[np.append(kept[1:], len(self._at)) - 1]
        done = np.where(launches, ends[np.where(launches, first, 0)], NEVER)
        return HostLane(
            at_ns=at,
            rows_ns=rows.before(at),
            latency_ns=np.where(launches, arrived[place] - self._at[place], NONE),
            start_ns=np.where(launches, self._start[place], NONE),
            end_ns=np.maximum.accumulate(done),
            issued_ns=self._issued,
            called_ns=self._called,
            cost_ns=self._cost,
            behind_ns=self._behind,
            blocked_ns=blocked_ns,
            resumed_ns=self._resumed(late),
            joined=joined,
            call_ns=min(self._call_ns, latency),
            waits=waits.beside(for_queue),
            loading=self._host.loading,
            stream_waits_ns=_stream_waits(self._trace, self._host, self._issued),
        )

    def _next_launch(self, device_ns: Int64) -> Int64:
        """The launch of the first work that starts at or after each time; LATER where none does."""
        place = np.searchsorted(self._start, device_ns, side="left")
        return np.append(self._at, LATER)[place]

    def _late(self) -> tuple[Bool, int]:
        """(did the device wait for the launch of each piece of work, what then passes from launch to start). It did not
        where it could go on only later, when a collective had ended.
        """
        own, blocked = self._own, self._own.where(TimeCategory.COMM_TRANSFER)
        inside = (self._start > own.start_ns[0]) & (self._start <= own.end_ns) & self._gap
        # A gap may be the host's in one part and wait for something else in another.
        begin = np.minimum(np.append(self._start[:1], self._ended[:-1]), self._start)
        idle = inside & (own.where(*OF_HOST).within(begin, self._start) > 0)
        last = np.searchsorted(blocked.end_ns, self._start, side="right") - 1
        until = np.where(last >= 0, np.append(blocked.end_ns, NEVER)[last], NEVER)
        behind = until > np.maximum(begin, self._launched)
        took = self._start - self._launched
        latency = int(np.median(took[idle & ~behind])) if (idle & ~behind).any() else self._least_ns
        return idle & (~behind | (took <= latency)), latency

    def _resumed(self, late: Bool) -> Int64:
        """When the device went on after each blocked stretch: idle time right behind it is a part of it, unless that
        was for a launch.
        """
        stretches = self._own.where(TimeCategory.COMM_TRANSFER)
        own, until = self._own, stretches.end_ns
        following = np.clip(np.searchsorted(own.start_ns, until, side="right") - 1, 0, len(own) - 1)
        idle = np.isin(own.category[following], OF_HOST) & (own.start_ns[following] == until)
        place = np.searchsorted(self._start, until, side="left")
        idle &= ~np.append(late, True)[place]
        return np.where(idle, own.ends_ns[following], until)

    def _kept(self, arrived: Int64, host_ns: Int64, cuts: Int64) -> Int64:
        """Indices of the work that is listed: in every stretch the first piece, the last, and the one that the device
        waited for or came nearest to.
        """
        own = self._own
        passed = own.where(*OF_DEVICE).before(self._start)
        slack = host_ns + (arrived - self._at) - passed
        cut = np.searchsorted(cuts, self._at, side="right")
        block = self._block(self._start)
        begins = np.flatnonzero(np.concatenate(([True], (np.diff(cut) != 0) | (np.diff(block) != 0))))
        most = np.maximum.reduceat(slack, begins)
        number = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(slack))))
        binding = np.flatnonzero(slack == most[number])
        last = np.append(begins[1:], len(slack)) - 1
        _, latest = np.unique(number[binding][::-1], return_index=True)
        return distinct(np.concatenate((begins, binding[::-1][latest], last)))

    def _block(self, time_ns: Int64) -> Int64:
        """The number of the stretch of each time."""
        length = (int(self._start[-1]) - int(self._start[0])) // (_BLOCKS * max(len(self._steps), 1))
        return time_ns // max(length, 1)

    def _behind_events(self, copies: WaitingCopies) -> Int64:
        """``HostLane.behind_ns``: of a collective that could have started, but did so only as such work ended, and no
        other collective. FSDP's gathers wait for the unit before to have copied its parameters out of their buffer. And
        of one whose buffer could have been filled earlier (``WaitingCopies``), for the work in front of these copies.
        """
        own = self._collectives
        able = np.maximum(self._called, _end_before(own))
        place = np.searchsorted(self._end, own.start_ns, side="right") - 1
        end, at = self._end[np.maximum(place, 0)], self._at[np.maximum(place, 0)]
        waited = (place >= 0) & (end > able) & (own.start_ns - able > _PROMPT_NS) & (own.start_ns - end <= _PROMPT_NS)
        ended = np.sort(own.end_ns)
        other = np.append(NEVER, ended)[np.searchsorted(ended, own.start_ns, side="right")]
        earlier = place < np.searchsorted(self._at, self._issued, side="left") - 1
        behind = np.where((self._issued != NONE) & waited & earlier & (other < end), at + 1, NONE)
        before = np.searchsorted(self._at, copies.launched_ns, side="left") - 1
        filled = (copies.launched_ns != NONE) & (before >= 0)
        behind = np.where(filled, self._at[np.maximum(before, 0)] + 1, behind)
        return _in_order(behind, self._issued, own.stream)

    def _queue_waits(self) -> HostWaits:
        """Launches that wait until the device has begun earlier work and so taken it out of its full queue: of those in
        one stretch, between the same two collectives, the last, which is behind all they wait for; and those that wait
        so long that it is for more than the next kernel: for a collective, and so for another rank. What is launched,
        a collective or work on a stream that is free, follows the wait. Where no own work begins as the wait ends, but
        a collective has just ended, the one behind it was taken out of the queue: the wait is for that end.
        """
        begin, until = self._queue.start_ns, self._queue.end_ns
        entered, waited = begin - 1, until - begin
        # How long the launch itself takes varies, so the work that it waited for may begin a little after the wait.
        taken = np.searchsorted(self._start, until + self._call_ns, side="right") - 1
        following = np.minimum(taken + 1, len(self._at) - 1)
        issued = np.searchsorted(np.sort(self._issued), entered)
        last = np.append((np.diff(self._block(until)) != 0) | (np.diff(issued) != 0), True)[: len(until)]
        long = waited > _LONG_WAIT_TIMES * np.median(waited) if len(waited) else last
        begun = np.where(taken >= 0, self._start[np.maximum(taken, 0)], NEVER)
        ended = self._just_ended(entered, until, begun)
        of_own = (ended == NONE) & (last | long) & (taken >= 0) & (self._at[following] < entered)
        used = of_own | ((ended != NONE) & np.append(np.diff(ended) != 0, True)[: len(ended)])
        return HostWaits(
            entered_ns=entered[used],
            returned_ns=until[used],
            collective=ended[used],
            device=of_own[used],
            noted_ns=self._at[following[used]],
            device_end_ns=np.maximum(self._end[taken[used]], entered[used]),
            queue=np.ones(used.sum(), dtype=np.bool_),
            limit=np.zeros(used.sum(), dtype=np.bool_),
        )

    def _just_ended(self, entered_ns: Int64, until_ns: Int64, begun_ns: Int64) -> Int64:
        """The collective whose end each wait for a place in the queue was for: the last that was launched before it,
        and ended right before it did; NONE where own work, begun at ``begun_ns``, came later, or no collective ended.
        """
        own = self._collectives
        found = np.full(len(until_ns), NONE, dtype=np.int64)
        if len(own) == 0:
            return found
        order = np.argsort(own.end_ns, kind="stable")
        last = np.searchsorted(own.end_ns[order], until_ns + self._call_ns, side="right") - 1
        which = order[np.maximum(last, 0)]
        end_ns = np.where(last >= 0, own.end_ns[which], NEVER)
        waited_for = (end_ns > entered_ns) & (until_ns - end_ns <= _PROMPT_NS) & (begun_ns < end_ns)
        waited_for &= (self._issued[which] != NONE) & (self._issued[which] <= entered_ns)
        return np.where(waited_for, which, found)

    def _blocking(self, waits: HostWaits) -> tuple[Int64, Bool]:
        """(moment of each blocked stretch, is it the host's)."""
        stretches = self._own.where(TimeCategory.COMM_TRANSFER)
        place = np.searchsorted(self._start, stretches.end_ns, side="left")
        moment = np.append(self._at, LATER)[place]
        launched = np.append(self._launched, NEVER)[place]
        # Launched after the wait, so it was the host that waited.
        call = np.searchsorted(waits.returned_ns, stretches.end_ns, side="left")
        some = call < len(waits.returned_ns)
        call = np.minimum(call, max(len(waits.returned_ns) - 1, 0))
        joined = np.zeros(len(stretches), dtype=np.bool_)
        if len(waits.returned_ns):
            joined = some & (launched >= stretches.end_ns) & (waits.entered_ns[call] <= stretches.end_ns)
            joined &= waits.collective[call] != NONE
            moment = np.where(joined, waits.entered_ns[call], moment)
        return moment, joined

    def _waits(self) -> tuple[HostWaits, Intervals]:
        """(what each blocking call waited for: the last that ended before it returned; all time in them)."""
        begin, until = self._host.blocked_by_end()
        before = np.searchsorted(self._at, begin + 1, side="left") - 1
        place = np.minimum(np.searchsorted(self._end, until, side="right") - 1, before)
        place = np.where(self._is_copying(until), self._copied, place)
        limit = self._limits.covers(begin)
        place, recent = self._before_gathers(place, limit, begin, until) if limit.any() else (place, limit)
        own_end = np.where(place >= 0, self._end[np.maximum(place, 0)], NEVER)
        order = np.argsort(self._collectives.end_ns, kind="stable")
        ended = np.searchsorted(self._collectives.end_ns[order], until, side="right") - 1
        last = order[np.maximum(ended, 0)] if len(order) else np.zeros(len(until), dtype=np.int64)
        comm_end = np.full(len(until), NEVER, dtype=np.int64)
        if len(order):
            known = (ended >= 0) & (self._issued[last] != NONE) & (self._issued[last] <= begin)
            comm_end = np.where(known, self._collectives.end_ns[last], NEVER)
        of_comm = (comm_end > begin) & (comm_end >= own_end) & ~limit
        waited = of_comm | ((own_end > begin) & ~recent)
        # It waited for work of before the recording, or for nothing.
        unseen = (place < 0) & ~of_comm
        whole = place == before
        # That the device had ended all when an event had long happened does not show which work the event was behind.
        passed = ~waited & (limit | (whole & self._of_event))
        device = (place >= 0) & ~passed & (whole | (waited & ~of_comm))
        used = device | of_comm
        noted = self._at[np.maximum(np.minimum(place, before), 0)] + 1  # before what else the device waits for
        return (
            HostWaits(
                entered_ns=begin[used] + 1,
                returned_ns=until[used],
                collective=np.where(of_comm, last, NONE)[used],
                device=device[used],
                noted_ns=np.where(whole, NEVER, noted)[used],
                device_end_ns=own_end[used],
                queue=np.zeros(used.sum(), dtype=np.bool_),
                limit=limit[used],
            ),
            Intervals.of(begin[waited | unseen] + 1, until[waited | unseen]),
        )

    def _is_copying(self, until_ns: Int64) -> Bool:
        """Which of the blocking calls return while the device still does what they told it to: one that copies from
        pageable memory first copies to a buffer, and returns when that is done (CUDA Runtime API, "API synchronization
        behavior").
        """
        copied = np.maximum(self._copied, 0)
        running = (self._start[copied] < until_ns) & (self._end[copied] > until_ns)
        return np.asarray((self._copied != NONE) & running, dtype=np.bool_)

    def _before_gathers(self, place: Int64, limit: Bool, begin: Int64, until: Int64) -> tuple[Int64, Bool]:
        """(``place`` of the work that each call waited for, is it too recent for FSDP's ``limit``?). A gather leaves
        two freed units, so it waits for work of before the gather in front of it. The host goes on some time after that
        has ended, when short kernels behind it may have ended, too. One that goes on much later, right behind work that
        is more recent, waited for that: other versions leave fewer units.
        """
        latest = self._before_last_gather(begin)
        recent = limit & (place > latest)
        ended = self._end[np.maximum(latest, 0)]
        woken = recent & (latest >= 0) & (until - ended <= _PROMPT_NS)
        shown = until - np.maximum(np.where(latest >= 0, ended, NEVER), begin) > _PROMPT_NS
        shown &= until - self._end[np.maximum(place, 0)] <= _PROMPT_NS
        return np.where(woken, latest, place), recent & ~woken & ~shown

    def _before_last_gather(self, time_ns: Int64) -> Int64:
        """Index of the last work launched before the last gather before each time; -1 where there is none."""
        own = self._collectives
        gathers = np.array([kind == "all_gather" for kind in own.kinds], dtype=np.bool_)[own.kind]
        issued = np.append(NEVER, np.sort(self._issued[gathers & (self._issued != NONE)]))
        return np.searchsorted(self._at, issued[np.searchsorted(issued, time_ns) - 1]) - 1


def _stream_waits(trace: Trace, host: HostActivity, issued_ns: Int64) -> Int64:
    """As in ``HostLane``."""
    calls = trace.rows(Category.RUNTIME, named=_STREAM_WAIT.match, threads=host.threads)
    operators = trace.rows(Category.CPU_OP, named=COMMUNICATION_OPERATOR.match, threads=host.threads)
    issued = np.sort(issued_ns[issued_ns != NONE])
    before, until = (np.searchsorted(issued, at) for at in (trace.start_ns[operators], trace.ends_ns(operators)))
    # torch's ``wait`` is an operator of the same name that may begin as the one that issues has ended.
    issuing = Intervals.of_rows(trace, operators[until > before])
    return np.sort(trace.ends_ns(calls[~issuing.covers(trace.start_ns[calls])]))


def _places_of(rows: Int64, chosen: Int64) -> Int64:
    """The last place of each chosen row among ``rows``; NONE where it is not there."""
    order = np.argsort(rows, kind="stable")
    place = np.searchsorted(rows[order], chosen, side="right") - 1
    found = order[np.maximum(place, 0)]
    return np.where((place >= 0) & (rows[found] == chosen), found, NONE)


def _end_before(collectives: Collectives) -> Int64:
    """The end of the collective before each on its stream; NEVER for the first."""
    before = np.full(len(collectives), NEVER, dtype=np.int64)
    order = np.argsort(collectives.stream, kind="stable")
    following = np.flatnonzero(np.diff(collectives.stream[order]) == 0)
    before[order[following + 1]] = collectives.end_ns[order[following]]
    return before


def _in_order(behind_ns: Int64, issued_ns: Int64, stream: Int64) -> Int64:
    """The moments ``behind_ns`` of collectives behind those of the ones in front of them on their streams: a rank that
    issued them in another order than the others would wait for these forever.
    """
    found: Int64 = behind_ns.copy()
    for each in distinct(stream):
        mine = np.flatnonzero(stream == each)
        moment = np.maximum.accumulate(np.where(behind_ns[mine] == NONE, issued_ns[mine], behind_ns[mine]))
        least = np.minimum(np.append(NONE, moment[:-1]) + 1, issued_ns[mine])
        found[mine] = np.where(behind_ns[mine] == NONE, NONE, np.maximum(behind_ns[mine], least))
    return found


class _HostRows:
    """The host's time by what it did, up to any moment."""

    def __init__(self, host: HostActivity, waiting: Intervals, begin_ns: int, end_ns: int) -> None:
        self._begin, self._waiting = begin_ns, waiting
        busy = waiting.complement(begin_ns, end_ns)
        collecting = host.named.get(COLLECTING, Intervals.empty())
        overhead = host.operators.subtract(host.computing)
        layers = (collecting, host.loading, host.searching, overhead, host.pauses)
        self._rows = []
        for layer in layers:
            mine = layer.intersect(busy)
            self._rows.append(mine)
            busy = busy.subtract(mine)

    def before(self, moment_ns: Int64) -> Int64:
        """[moment, HostTime]."""
        begin = np.full(1, self._begin)
        collection, loader, search, operators, pauses = (
            row.before(moment_ns) - row.before(begin) for row in self._rows
        )
        other = self.total_before(moment_ns) - collection - loader - search - operators - pauses
        columns = {
            HostTime.LOADER: loader,
            HostTime.COLLECTION: collection,
            HostTime.OPERATORS: operators,
            HostTime.OTHER: other,
            HostTime.PAUSES: pauses,
            HostTime.SEARCH: search,
        }
        return np.stack([columns[row] for row in HostTime], axis=1)

    def total_before(self, moment_ns: Int64) -> Int64:
        """All but waits."""
        begin = np.full(1, self._begin)
        return moment_ns - self._begin - (self._waiting.before(moment_ns) - self._waiting.before(begin))
