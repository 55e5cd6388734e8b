"""How ranges on host threads nest: which one called which, and which is innermost at a moment."""

from __future__ import annotations

import numpy as np

from perfscope.frozen import dataclass
from perfscope.trace.trace import NONE, Bool, Int32, Int64, Trace

_LAST = (1 << 63) - 1


@dataclass(frozen=True, eq=False)
class Nested:
    """Ranges of host threads in the order of (thread, start, longer first), with the range around each.

    Parallel arrays. ``row`` is a row of the trace; ``parent`` is an index into these arrays, NONE for an outermost
    range. ``start`` and ``end`` are ns on one axis that has the threads one after another, so that ranges of two
    threads never overlap. A range ends no later than its parent; where the recording has it end later (rounded times),
    it is clipped.
    """

    row: Int64
    parent: Int64
    start: Int64
    end: Int64
    _axis: _Axis

    def __len__(self) -> int:
        return len(self.row)

    @classmethod
    def of(cls, trace: Trace, rows: Int64) -> Nested:
        """Nest the ranges at ``rows`` (ascending rows of the trace)."""
        axis = _Axis.of(trace)
        start = axis.place(trace.thread[rows], trace.start_ns[rows])
        # Rows come in the order of (start, longer first); a stable sort keeps that among equals.
        order = np.argsort(start, kind="stable")
        start = start[order]
        duration = axis.within(start, trace.duration_ns[rows[order]])
        parent = _parents(start, duration)
        return cls(rows[order], parent, start, _clipped(parent, start + duration), axis)

    def innermost(self, threads: Int32, times_ns: Int64) -> Int64:
        """Index of the innermost range around each moment of each thread; NONE outside all."""
        moment = self._axis.place(threads, times_ns)
        around: Int64 = np.searchsorted(self.start, moment, side="right") - 1
        pending = np.flatnonzero(around >= 0)
        while len(pending):
            pending = pending[self.end[around[pending]] <= moment[pending]]
            around[pending] = self.parent[around[pending]]
            pending = pending[around[pending] >= 0]
        return around

    def around(self, trace: Trace, rows: Int64) -> Int64:
        """``innermost`` at the start of each event of a trace; NONE also where the row is NONE."""
        around = np.full(len(rows), NONE, dtype=np.int64)
        known = np.flatnonzero(rows != NONE)
        events = rows[known]
        around[known] = self.innermost(trace.thread[events], trace.start_ns[events])
        return around

    def nearest(self, places: Int64, wanted: Bool) -> Int64:
        """The nearest ``wanted`` range from each place outwards, itself included; NONE where there is none."""
        stops = np.append(wanted, True)  # the last is for NONE
        around: Int64 = places.copy()
        pending = np.flatnonzero(~stops[around])
        while len(pending):
            around[pending] = self.parent[around[pending]]
            pending = pending[~stops[around[pending]]]
        return around

    def own_ns(self) -> Int64:
        """Each range's length without the ranges directly inside it, ns."""
        length = self.end - self.start
        inner = self.parent >= 0
        inside = np.bincount(self.parent[inner], weights=length[inner], minlength=len(self))
        own: Int64 = np.maximum(length - inside.astype(np.int64), 0)
        return own

    def depth(self) -> Int64:
        """How many ranges are around each."""
        depth = np.zeros(len(self), dtype=np.int64)
        around = self.parent
        while (around >= 0).any():
            depth += around >= 0
            around = np.where(around >= 0, self.parent[around], NONE)
        return depth


def taken(column: Int32 | Int64, places: Int64) -> Int64:
    """The column's value at each place; NONE where that is NONE."""
    return np.append(column, NONE)[places].astype(np.int64)


@dataclass(frozen=True)
class _Axis:
    """All threads' time on one axis: thread t, ns after the recording's start, is at t × span + ns."""

    origin_ns: int
    span_ns: int
    is_cut: bool = False
    """Does the recording last longer, by damaged events years away?"""

    @classmethod
    def of(cls, trace: Trace) -> _Axis:
        if len(trace) == 0:
            return cls(0, 1)
        origin = int(trace.start_ns[0])
        span, most = int(trace.end_ns.max()) - origin + 2, _LAST // (int(trace.thread.max()) + 2)
        # The threads' parts must fit 64 bits one after another: months around most events do.
        return cls(origin, span) if span <= most else cls(int(np.median(trace.start_ns)) - most // 2, most, is_cut=True)

    def place(self, threads: Int32, times_ns: Int64) -> Int64:
        # A moment outside the recording would lie on another thread's part of the axis.
        own = np.clip(times_ns, self.origin_ns - 1, self.origin_ns + self.span_ns - 1) - self.origin_ns
        placed: Int64 = threads.astype(np.int64) * self.span_ns + own
        return placed

    def within(self, start: Int64, duration_ns: Int64) -> Int64:
        """The durations, as far as they lie on the thread's own part of the axis."""
        return np.minimum(duration_ns, self.span_ns - 1 - start % self.span_ns) if self.is_cut else duration_ns


def _parents(start: Int64, duration: Int64) -> Int64:
    """For each range, the nearest one before it (in the order of starts) that still runs at its middle.

    The middle decides, because rounded ends may be later than the parent's::

        parent |-------------|        order  p a b c
        a, b     |--| |-------|       b's parent is p, though it ends after p
        c                     |--|    c has no parent: b and p have ended at its middle

    Every range first points at the one before it. While some point at a range that has ended, they take over that
    range's own pointer: anything between the two has ended earlier still. Each round halves a row of siblings.
    """
    middle = start + duration // 2
    end = start + duration
    parent = np.arange(-1, len(start) - 1, dtype=np.int64)
    pending = np.arange(1, len(start), dtype=np.int64)
    while len(pending):
        pending = pending[end[parent[pending]] <= middle[pending]]
        parent[pending] = parent[parent[pending]]
        pending = pending[parent[pending] >= 0]
    return parent


def _clipped(parent: Int64, end: Int64) -> Int64:
    """Ends, clipped to the end of the range around each."""
    while True:
        inner = np.flatnonzero(parent >= 0)
        late = inner[end[inner] > end[parent[inner]]]
        if len(late) == 0:
            return end
        end[late] = end[parent[late]]
