"""Sets of time on the ns axis: sorted, disjoint, half-open intervals, and exact algebra on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfscope.frozen import dataclass
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import Bool, Int8, Int64, Trace


@dataclass(frozen=True, eq=False)
class Intervals:
    """A set of time: ``[start_ns[i], end_ns[i])``, ascending, disjoint, not touching, none empty.

    Make one with ``of``; the constructor trusts its arguments.
    """

    start_ns: Int64
    end_ns: Int64

    @classmethod
    def of(cls, start_ns: Int64, end_ns: Int64) -> Intervals:
        """The union of any intervals, in any order; empty and reversed ones are left out."""
        keep = end_ns > start_ns
        # Most often there is nothing to leave out and nothing to sort: large arrays are not copied for it.
        start, end = (start_ns, end_ns) if keep.all() else (start_ns[keep], end_ns[keep])
        if len(start) == 0:
            return cls.empty()
        if (start[1:] < start[:-1]).any():
            order = np.argsort(start, kind="stable")
            start, end = start[order], end[order]
        end = np.maximum.accumulate(end)
        first = np.concatenate(([True], start[1:] > end[:-1]))
        last = np.concatenate((first[1:], [True]))
        return cls(start[first], end[last])

    @classmethod
    def of_rows(cls, trace: Trace, rows: Int64) -> Intervals:
        """The time of some events of a trace."""
        start_ns = trace.start_ns[rows]
        return cls.of(start_ns, start_ns + trace.duration_ns[rows])

    @classmethod
    def empty(cls) -> Intervals:
        """No time at all."""
        nothing = np.empty(0, dtype=np.int64)
        return cls(nothing, nothing)

    def __len__(self) -> int:
        return len(self.start_ns)

    def measure(self) -> int:
        """Total length in ns."""
        return int((self.end_ns - self.start_ns).sum())

    def before(self, time_ns: Int64) -> Int64:
        """For each time, the measure in ns of the part of this set that lies before it."""
        lengths = np.concatenate(([0], np.cumsum(self.end_ns - self.start_ns)))
        index = np.searchsorted(self.start_ns, time_ns, side="right")
        inside = np.zeros(len(time_ns), dtype=np.int64)
        some = index > 0
        overshoot = self.end_ns[index[some] - 1] - time_ns[some]
        inside[some] = np.maximum(overshoot, 0)
        return np.asarray(lengths[index] - inside, dtype=np.int64)

    def within(self, start_ns: Int64, end_ns: Int64) -> Int64:
        """For each window, the measure in ns of this set inside it."""
        return self.before(end_ns) - self.before(start_ns)

    def union(self, *others: Intervals) -> Intervals:
        """Time in this set or any of the others."""
        sets = (self, *others)
        return Intervals.of(
            np.concatenate([part.start_ns for part in sets]), np.concatenate([part.end_ns for part in sets])
        )

    def complement(self, start_ns: int, end_ns: int) -> Intervals:
        """The part of ``[start_ns, end_ns)`` that is not in this set."""
        start = np.concatenate(([start_ns], np.clip(self.end_ns, start_ns, end_ns)))
        end = np.concatenate((np.clip(self.start_ns, start_ns, end_ns), [end_ns]))
        return Intervals.of(start, end)

    def intersect(self, other: Intervals) -> Intervals:
        """Time in both sets."""
        if len(self) == 0 or len(other) == 0:
            return Intervals.empty()
        # Of the other set, the intervals from `first` up to `past` overlap each of this one.
        first = np.searchsorted(other.end_ns, self.start_ns, side="right")
        past = np.searchsorted(other.start_ns, self.end_ns, side="left")
        count = np.maximum(past - first, 0)
        mine = np.repeat(np.arange(len(self)), count)
        theirs = np.arange(len(mine)) + np.repeat(first - (np.cumsum(count) - count), count)
        return Intervals(
            np.maximum(self.start_ns[mine], other.start_ns[theirs]), np.minimum(self.end_ns[mine], other.end_ns[theirs])
        )

    def subtract(self, other: Intervals) -> Intervals:
        """Time in this set and not in the other."""
        if len(self) == 0 or len(other) == 0:
            return self
        return self.intersect(other.complement(int(self.start_ns[0]), int(self.end_ns[-1])))

    def covers(self, time_ns: Int64) -> Bool:
        """For each time: whether it is in this set."""
        if len(self) == 0:
            return np.zeros(len(time_ns), dtype=np.bool_)
        before = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        # A time before all of them has the last one's end for the place -1, and lies before the first one's start.
        covered: Bool = (time_ns < self.end_ns[before]) & (time_ns >= self.start_ns[0])
        return covered


def _painted(layer: Intervals, edges: Int64) -> Bool:
    """``layer.covers(edges)`` where the layer begins and ends at edges, apart from what lies before or after all."""
    first, past = np.searchsorted(edges, layer.start_ns), np.searchsorted(edges, layer.end_ns)
    inside = past > first
    change = np.zeros(len(edges) + 1, dtype=np.int8)
    # Intervals do not touch: no edge begins one of them and ends another.
    change[first[inside]] = 1
    change[past[inside]] = -1
    covered: Bool = np.cumsum(change[:-1], dtype=np.int8).view(np.bool_)
    return covered


def paint(start_ns: int, end_ns: int, layers: Sequence[tuple[int, Intervals]], ground: int) -> tuple[Int64, Int8]:
    """Cut ``[start_ns, end_ns)`` into stretches that each belong to the first layer covering them, else to ``ground``.

    Returns the stretches' starts (ns, ascending, the first is ``start_ns``) and their labels; neighbours differ.

    Example: layers ``(0, {[0, 4)}), (1, {[2, 6)})`` painted on ``[0, 10)`` over ground 9 give starts ``0, 4, 6`` and
    labels ``0, 1, 9``.
    """
    points = [np.array([start_ns], dtype=np.int64)]
    for _, layer in layers:
        points += [layer.start_ns, layer.end_ns]
    edges = distinct(np.concatenate(points))
    edges = edges[(edges >= start_ns) & (edges < end_ns)]
    labels = np.full(len(edges), ground, dtype=np.int8)
    free = np.ones(len(edges), dtype=np.bool_)
    for label, layer in layers:
        covered = free & _painted(layer, edges)
        labels[covered] = label
        free &= ~covered
    changes = np.concatenate(([True], labels[1:] != labels[:-1])) if len(labels) else np.empty(0, dtype=np.bool_)
    return edges[changes], labels[changes]
