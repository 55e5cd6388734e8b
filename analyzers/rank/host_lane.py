"""One rank's host beside its device: when the host launched what, and what it waited for.

A device starts work when the host has launched it and the work before it has ended. So its time is either its own or
the host's, and which of the two it would be after a change shows only with both at hand::

    host     launch a | launch b | launch c | .item() waits . . . . . .| launch d
    device            |    a     |          b           |      c       |         | d
                                  b and c were queued: a quicker device starts them earlier; d was not
"""

from __future__ import annotations

import enum
from dataclasses import fields
from typing import Final

import numpy as np

from perfscope.analyzers.rank.intervals import Intervals
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NEVER, NONE, Bool, Int64

LATER: Final = -NEVER
"""A time after all others."""

OF_HOST: Final = (TimeCategory.DATALOADER, TimeCategory.SYNC, TimeCategory.LAUNCH, TimeCategory.HOST)
"""Idle time of a device that its host causes; other own time is the device's."""

OF_DEVICE: Final = tuple(
    category
    for category in TimeCategory
    if category not in (*OF_HOST, TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER)
)


class HostTime(enum.IntEnum):
    """What a host does when it does not wait for its device."""

    LOADER = 0
    COLLECTION = 1
    OPERATORS = 2
    OTHER = 3
    PAUSES = 4
    """In no operator and no call for long."""
    SEARCH = 5
    """DistributedDataParallel's search for unused parameters: one operator, however quick launches are."""


def pauses_as_other(rows_ns: Int64) -> Int64:
    """Times by ``HostTime`` (columns) with pauses as other time: how long one must be to count hardly tells ranks
    apart.
    """
    merged: Int64 = rows_ns.copy()
    merged[:, HostTime.OTHER] += merged[:, HostTime.PAUSES]
    merged[:, HostTime.PAUSES] = 0
    return merged


@dataclass(frozen=True, eq=False)
class HostWaits:
    """Calls in which the host waited, in order: parallel arrays, own clock. Launches that a full queue delayed, too.

    Each is entered after the moment ``entered_ns`` and returns at ``returned_ns``. ``collective`` is the one whose end
    it waited for (NONE: none), ``device`` whether it returns only when own work of the device has ended: that launched
    before ``noted_ns``, ``device_end_ns`` being when it had. ``queue``: it is a launch; ``limit``: FSDP's limit on
    gathers.
    """

    entered_ns: Int64
    returned_ns: Int64
    collective: Int64
    device: Bool
    noted_ns: Int64
    device_end_ns: Int64
    queue: Bool
    limit: Bool

    def beside(self, other: HostWaits) -> HostWaits:
        """Both."""
        order = np.argsort(np.concatenate((self.returned_ns, other.returned_ns)), kind="stable")
        columns = ((getattr(self, column.name), getattr(other, column.name)) for column in fields(HostWaits))
        return HostWaits(*(np.concatenate(pair)[order] for pair in columns))


@dataclass(frozen=True, eq=False)
class HostLane:
    """Moments of the host in the order of the program, own clock: parallel arrays, ``at_ns`` ascending.

    At a moment the host launches a piece of own work, which could start ``latency_ns`` later (NONE: it launches none)
    and did at ``start_ns``; ``end_ns`` is by when all own work launched before the next moment had ended, or the next
    had started. ``rows_ns`` [moment, HostTime] is the host's time up to the moment, waits not counted. Not all work is
    listed, but in every stretch what the device had to wait for, or would first have to.

    ``issued_ns`` and ``called_ns`` are begin and end of the call that launched each collective (NONE: not known),
    ``cost_ns`` what issuing it takes its host. ``behind_ns`` is, of a collective that waited for own work and not
    for all that had been launched before it (an event recorded earlier), the moment right behind that; else NONE.
    ``blocked_ns`` has for each blocked stretch of the ``Progress`` the moment before which the device waits, or the
    host (``joined``), and ``resumed_ns`` when that went on. ``call_ns`` is what a call that launches work takes.
    ``loading`` is the time in the loader. ``stream_waits_ns`` are the ends of the calls that make a stream wait for an
    event, but for those in operators that issue a collective: they make a stream wait for its result.
    """

    at_ns: Int64
    rows_ns: Int64
    latency_ns: Int64
    start_ns: Int64
    end_ns: Int64
    issued_ns: Int64
    called_ns: Int64
    cost_ns: Int64
    behind_ns: Int64
    blocked_ns: Int64
    resumed_ns: Int64
    joined: Bool
    call_ns: int
    waits: HostWaits
    loading: Intervals
    stream_waits_ns: Int64

    def begins_at(self, device_ns: int) -> int:
        """Where the host is when its schedule begins with the device at that time: at the launch of what starts next,
        and not later.
        """
        return int(self.moment_of(np.array([device_ns]))[0])

    def done_ns(self, moment_ns: Int64) -> Int64:
        """When the own work launched before each moment had ended; NEVER where there is none."""
        place = np.searchsorted(self.at_ns, moment_ns, side="left") - 1
        return np.where(place >= 0, self.end_ns[np.maximum(place, 0)], NEVER)

    def moment_of(self, device_ns: Int64) -> Int64:
        """The launch of the first listed work that starts at or after each time of the device; LATER: of none."""
        launches = np.flatnonzero(self.latency_ns != NONE)
        place = np.searchsorted(self.start_ns[launches], device_ns, side="left")
        known = place < len(launches)
        found = np.full(len(device_ns), LATER, dtype=np.int64)
        found[known] = self.at_ns[launches[place[known]]]
        return found

    def rows_at(self, moment_ns: Int64) -> Int64:
        """The host's time up to each moment by ``HostTime`` (columns)."""
        first = self.at_ns[0]
        at, known = np.clip(moment_ns, first, self.at_ns[-1]) - first, self.at_ns - first
        return np.stack([np.rint(np.interp(at, known, column)) for column in self.rows_ns.T], axis=1).astype(np.int64)

    def passed_ns(self, moment_ns: Int64) -> Int64:
        """The host's time up to each moment, waits not counted."""
        return np.asarray(self.rows_at(moment_ns).sum(axis=1), dtype=np.int64)

    def moment_after(self, passed_ns: Int64) -> Int64:
        """The moment up to which the host has taken each of these times, waits not counted."""
        first = self.at_ns[0]
        at = np.interp(passed_ns, self.rows_ns.sum(axis=1), self.at_ns - first)
        return np.asarray(first + np.rint(at).astype(np.int64), dtype=np.int64)
