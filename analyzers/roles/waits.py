"""Roles on one clock: their common window, who is idle while whom is busy, and whole iterations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.roles.activity import JobActivity, without_pauses
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.trace.trace import Int64

_SHORTEST_PAUSE_NS: Final = 100_000
_LONGEST_PAUSE_NS: Final = 5_000_000
"""Between two launches, requests or decoding steps a role may pause that long without waiting for another."""
_PAUSES: Final = 2000
"""Pauses count from the window / this on."""
_COMMON: Final = 0.1
"""Roles were recorded together if they share this part of the shortest recording of a role."""


@dataclass(frozen=True, eq=False)
class SideBySide:
    """Roles in the window ``[start_ns, end_ns)``, pauses shorter than ``pause_ns`` closed."""

    start_ns: int
    end_ns: int
    pause_ns: int
    together: bool
    busy: Mapping[str, Intervals]
    recorded: Mapping[str, Intervals]
    """When each role was recorded at all."""
    waits: Mapping[str, Mapping[str, Intervals]]
    """Role -> other role -> when the first is idle while the second is busy; no moment twice of one role."""
    cycles: int
    """Whole iterations in the window; 0 where fewer than two show."""

    @property
    def length_ns(self) -> int:
        """Length of the window."""
        return self.end_ns - self.start_ns

    def share(self, intervals: Intervals) -> float:
        """The part of the window that ``intervals`` take."""
        return intervals.intersect(window(self.start_ns, self.end_ns)).measure() / max(self.length_ns, 1)

    def alone(self, role: str) -> Intervals:
        """When only this role is busy."""
        others = [busy for name, busy in self.busy.items() if name != role]
        return self.busy[role].subtract(Intervals.empty().union(*others))

    def idle(self, role: str) -> Intervals:
        """When this role was recorded, is idle, and waits for no other."""
        free = self.recorded[role].intersect(window(self.start_ns, self.end_ns)).subtract(self.busy[role])
        return free.subtract(Intervals.empty().union(*self.waits[role].values()))


def window(start_ns: int, end_ns: int) -> Intervals:
    """One interval."""
    return Intervals.of(np.array([start_ns], dtype=np.int64), np.array([end_ns], dtype=np.int64))


def side_by_side(jobs: Sequence[JobActivity], main: str, least_ns: int = 0) -> SideBySide:
    """Put the roles of all jobs on one clock; ``main`` is the role whose turns count the iterations.

    Roles that were recorded at the same time for no longer than ``least_ns`` were not recorded together.
    """
    by_role = grouped((job.role, job) for job in jobs)
    recorded = {
        role: Intervals.empty().union(*(window(job.start_ns, job.end_ns) for job in mine))
        for role, mine in by_role.items()
    }
    start, end, together = _common(recorded, least_ns)
    pause = min(max((end - start) // _PAUSES, _SHORTEST_PAUSE_NS), _LONGEST_PAUSE_NS)
    busy = {
        role: without_pauses(Intervals.empty().union(*(job.busy for job in mine)), pause)
        for role, mine in by_role.items()
    }
    cycles = 0
    if together:
        starts = _begins(busy, main, start, end)
        if len(starts) > 2:
            start, end, cycles = starts[0], starts[-1], len(starts) - 1
    busy = {role: intervals.intersect(window(start, end)) for role, intervals in busy.items()}
    waits = {role: _waits(role, busy, start, end) if together else {} for role in busy}
    return SideBySide(start, end, pause, together, busy, recorded, waits, cycles)


def _common(recorded: Mapping[str, Intervals], least_ns: int) -> tuple[int, int, bool]:
    """Begin and end of the window in which all roles were recorded; of any, and False, where they share none."""
    starts = [int(each.start_ns[0]) for each in recorded.values()]
    ends = [int(each.end_ns[-1]) for each in recorded.values()]
    shortest = min(end - start for start, end in zip(starts, ends, strict=True))
    if min(ends) - max(starts) > max(_COMMON * shortest, least_ns):
        return max(starts), min(ends), True
    return min(starts), max(ends), False


def _begins(busy: Mapping[str, Intervals], main: str, start_ns: int, end_ns: int) -> list[int]:
    """When the main role takes its turn in the window: it begins to be busy, and others were since its last."""
    others = Intervals.empty().union(*(intervals for role, intervals in busy.items() if role != main))
    mine = busy[main]
    between = others.within(mine.end_ns[:-1], mine.start_ns[1:]) > 0
    begins = mine.start_ns[1:][between]
    return [int(begin) for begin in begins if start_ns <= begin < end_ns]


def _waits(role: str, busy: Mapping[str, Intervals], start_ns: int, end_ns: int) -> dict[str, Intervals]:
    """In each stretch in which a role is idle, the busy time of others: of several that of the one that ends last."""
    idle = busy[role].complement(start_ns, end_ns)
    others = [name for name in busy if name != role]
    last = np.stack([_last_end(busy[name], idle) for name in others])
    waits = {name: Intervals.empty() for name in others}
    latest_first = np.argsort(-last, axis=0, kind="stable").T
    for order in np.unique(latest_first, axis=0).tolist():
        chosen = (latest_first == np.array(order)).all(axis=1)
        free = Intervals(idle.start_ns[chosen], idle.end_ns[chosen])
        for at in order:
            covered = free.intersect(busy[others[at]])
            waits[others[at]] = waits[others[at]].union(covered)
            free = free.subtract(covered)
    return {name: intervals for name, intervals in waits.items() if len(intervals)}


def _last_end(busy: Intervals, idle: Intervals) -> Int64:
    """For each idle stretch, until when the other is busy inside it; its begin where it is not."""
    if len(busy) == 0 or len(idle) == 0:
        begins: Int64 = idle.start_ns.copy()
        return begins
    at = np.searchsorted(busy.start_ns, idle.end_ns, side="left") - 1
    ends: Int64 = np.where(at >= 0, busy.end_ns[np.maximum(at, 0)], idle.start_ns)
    clipped: Int64 = np.clip(ends, idle.start_ns, idle.end_ns)
    return clipped
