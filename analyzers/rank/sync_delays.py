"""Which idle time of the device each host synchronization causes.

A call that blocks the host delays everything that the host launches after it. Without the call the host would be ahead
by the time that it blocked: its *credit*. Each gap after it that ends with a late launch would be shorter by the credit
that is left, and uses up as much, until the credit is gone: from then on the queue would have been empty without the
call too, and what is idle is the fault of slow launches alone. Example with a call that blocks for 50::

    device  ####|<--- 30 --->|#|<- 15 ->|#|<- 15 ->|###
    caused by      sync 30       sync 15    sync 5, then launches 10

A device's queue bounds how far a host can be ahead, so credit beyond that is lost.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from perfscope.analyzers.rank.host_activity import HostActivity
from perfscope.analyzers.rank.implied.inserted_calls import OF_COLLECTIVE
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.frozen import dataclass
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Int64, Trace

QUEUE: Final = 1024
"""Launches that a device's queue holds; the next one blocks the host. Not documented: recordings of CUDA end at this
number. AMD's queues hold more."""


@dataclass(frozen=True, eq=False)
class SyncDelays:
    """Parts of idle gaps that a synchronization caused: parallel arrays in time order, disjoint.

    ``row`` is the row of the trace of the blocking call.
    """

    start_ns: Int64
    end_ns: Int64
    row: Int64

    def intervals(self) -> Intervals:
        """All of that time."""
        return Intervals.of(self.start_ns, self.end_ns)


def sync_delays(
    trace: Trace, work: DeviceWork, host: HostActivity, start_ns: Int64, end_ns: Int64, launched_ns: Int64
) -> SyncDelays:
    """Divide gaps of the device among the blocking calls before the launch that each gap ends with.

    The gaps ``[start_ns, end_ns)``, ascending, are those whose next work was launched, at ``launched_ns``, after the
    gap had begun. Later calls are charged before earlier ones.
    """
    launched = np.maximum.accumulate(launched_ns)
    calls = _Credits.of(trace, work, host)
    before = np.searchsorted(calls.end_ns, launched, side="right")
    most = calls.most_left(trace, work, launched)
    left: deque[tuple[int, int]] = deque()
    """(credit left, row of the call), the earliest call first."""
    given = list(zip(calls.credit_ns.tolist(), calls.row.tolist(), strict=True))
    total, seen = 0, 0
    parts: list[tuple[int, int, int]] = []
    gaps = (start_ns.tolist(), end_ns.tolist(), before.tolist(), most.tolist())
    for at, end, until, bound in zip(*gaps, strict=True):
        if until > seen:
            left += given[seen:until]
            total += sum(credit for credit, _ in given[seen:until])
            seen = until
        while left and total > bound:
            credit, row = left.popleft()
            total -= credit
            if total < bound:
                left.appendleft((bound - total, row))
                total = bound
        while left and at < end:
            credit, row = left[-1]
            if credit > end - at:
                parts.append((at, end, row))
                left[-1], total = (credit - (end - at), row), total - (end - at)
                break
            left.pop()
            parts.append((at, at + credit, row))
            at, total = at + credit, total - credit
    table = np.array(parts, dtype=np.int64).reshape(-1, 3)
    return SyncDelays(table[:, 0], table[:, 1], table[:, 2])


@dataclass(frozen=True, eq=False)
class _Credits:
    """The blocking calls in the order of their ends, each with how much earlier the host would have gone on."""

    end_ns: Int64
    credit_ns: Int64
    row: Int64

    @classmethod
    def of(cls, trace: Trace, work: DeviceWork, host: HostActivity) -> _Credits:
        """The calls, those without a launch between them as one, by the name of the longest.

        A call that another thread launched in counts from that launch; where calls overlap, time counts once. Calls up
        to the first recorded launch wait for work of before the recording, most often because its start synchronizes.
        """
        order = np.argsort(host.blocked_end_ns, kind="stable")
        # Nothing frees a host from waiting for a collective that it carries out itself.
        order = order[~trace.names_where(OF_COLLECTIVE.__eq__, host.blocked_row[order])]
        begin, end, row = host.blocked_start_ns[order], host.blocked_end_ns[order], host.blocked_row[order]
        launches = np.sort(trace.start_ns[distinct(work.launch[work.launch != NONE])])
        if len(launches) == 0 or len(row) == 0:
            return cls(end[:0], end[:0], row[:0])
        launched = np.searchsorted(launches, end)
        begin = np.where(launched > 0, np.maximum(begin, launches[np.maximum(launched - 1, 0)]), end)
        begin[1:] = np.maximum(begin[1:], np.maximum.accumulate(end)[:-1])
        credit = np.where(host.blocked_start_ns[order] > launches[0], np.maximum(end - begin, 0), 0)
        first = np.flatnonzero(np.concatenate(([True], launched[1:] > launched[:-1])))
        owner = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(row))))
        last = np.append(first[1:], len(row)) - 1
        longest = np.lexsort((credit, owner))[last]
        return cls(end[last], np.add.reduceat(credit, first), row[longest])

    def most_left(self, trace: Trace, work: DeviceWork, launched: Int64) -> Int64:
        """The most credit that can be left when each gap's work is launched.

        A launch has to wait until the one ``QUEUE`` launches before it has begun to run. The credit that this costs is
        lost for later launches too.
        """
        unbounded = np.iinfo(np.int64).max
        calls, first = np.unique(work.launch, return_index=True)
        first, calls = first[calls != NONE], calls[calls != NONE]
        if len(calls) <= QUEUE or len(launched) == 0:
            return np.full(len(launched), unbounded, dtype=np.int64)
        called = trace.start_ns[calls]
        room = np.maximum(called[QUEUE:] - np.maximum.accumulate(work.start_ns[first])[:-QUEUE], 0)
        granted = np.concatenate(([0], np.cumsum(self.credit_ns)))
        spare = room - granted[np.searchsorted(self.end_ns, called[QUEUE:], side="right")]
        # The least since the gap before it.
        until = np.searchsorted(called[QUEUE:], launched, side="right")
        since = np.concatenate(([0], until[:-1]))
        at_launch = granted[np.searchsorted(self.end_ns, launched, side="right")]
        most = np.full(len(launched), unbounded, dtype=np.int64)
        some = np.flatnonzero(until > since)
        if len(some):
            least = np.minimum.reduceat(spare[: int(until[some[-1]])], since[some])
            most[some] = np.maximum(least + at_launch[some], 0)
        return most
