"""Timeline: one rank's time as consecutive stretches of one category each; every total is read from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfscope.analyzers.rank.host_lane import HostLane
from perfscope.analyzers.rank.intervals import Intervals, paint
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import Bool, Int8, Int64


@dataclass(frozen=True, eq=False)
class Timeline:
    """Stretch i covers ``[start_ns[i], start_ns[i + 1])``, the last one ends at ``end_ns``. Every ns is in exactly one.

    ``category`` holds ``TimeCategory`` values. Until the ranks are compared, all exposed communication is
    COMM_TRANSFER; ``split`` then moves the waits to COMM_WAIT.
    """

    start_ns: Int64
    category: Int8
    end_ns: int

    @classmethod
    def of(
        cls, start_ns: int, end_ns: int, layers: Sequence[tuple[TimeCategory, Intervals]], ground: TimeCategory
    ) -> Timeline:
        """Each moment belongs to the first layer that covers it; what no layer covers belongs to ``ground``."""
        starts, labels = paint(start_ns, end_ns, [(int(category), layer) for category, layer in layers], int(ground))
        return cls(starts, labels, end_ns)

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def ends_ns(self) -> Int64:
        """End of every stretch."""
        ends = np.empty_like(self.start_ns)
        ends[:-1] = self.start_ns[1:]
        ends[-1:] = self.end_ns
        return ends

    def where(self, *categories: TimeCategory) -> Intervals:
        """The time that belongs to any of ``categories``."""
        chosen = np.zeros(len(TimeCategory), dtype=np.bool_)
        chosen[list(categories)] = True
        hit = chosen[self.category]
        return Intervals.of(self.start_ns[hit], self.ends_ns[hit])

    def split(self, category: TimeCategory, part: Intervals, into: TimeCategory) -> Timeline:
        """A timeline in which the time of ``category`` inside ``part`` belongs to ``into``."""
        moved = self.where(category).intersect(part)
        if len(moved) == 0:
            return self
        edges = distinct(np.concatenate((self.start_ns, moved.start_ns, moved.end_ns)))
        edges = edges[(edges >= self.start_ns[0]) & (edges < self.end_ns)]
        changed = self.category[np.searchsorted(self.start_ns, edges, side="right") - 1].copy()
        changed[moved.covers(edges)] = into
        starts = np.concatenate(([True], changed[1:] != changed[:-1]))
        return Timeline(edges[starts], changed[starts], self.end_ns)

    def totals(self, start_ns: Int64, end_ns: Int64) -> Int64:
        """Ns of each category (columns, in ``TimeCategory`` order) inside each window (rows)."""
        before = self._before(np.concatenate((start_ns, end_ns)))
        return before[len(start_ns) :] - before[: len(start_ns)]

    def _before(self, time_ns: Int64) -> Int64:
        """Ns of each category (columns) before each time (rows)."""
        # The stretch that contains each time counts up to that time; before the first one nothing does.
        index = np.searchsorted(self.start_ns, time_ns, side="right")
        whole = np.maximum(index - 1, 0)
        # Sums of stretches between those, then of all before each. Times below 2^53 ns add up exactly as float64.
        cut = np.zeros(len(self) + 1, dtype=np.int64)
        cut[whole] = 1
        between, kinds, ends_ns = np.cumsum(cut), len(TimeCategory), self.ends_ns
        sums = np.bincount(
            between[:-1] * kinds + self.category,
            weights=ends_ns - self.start_ns,
            minlength=(int(between[-1]) + 1) * kinds,
        )
        before = sums.reshape(-1, kinds).astype(np.int64).cumsum(axis=0)[between[whole] - 1]
        inside = np.flatnonzero(index > 0)
        holding = index[inside] - 1
        before[inside, self.category[holding]] += np.minimum(time_ns[inside], ends_ns[holding]) - self.start_ns[holding]
        return np.asarray(before, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Progress:
    """What one rank does without waiting for other ranks, and where it waits for them.

    ``own`` is the rank's time breakdown with COMM_TRANSFER only where the rank is blocked by communication and by
    nothing else. All other time in it is the rank's own, also where communication runs meanwhile.

    ``blocker`` has, for each blocked stretch of ``own`` in order, the collective whose end the rank waits for (a row of
    its ``Collectives``); a thread on a CPU may continue a little before or after that end.

    ``ready_ns`` has, for each collective, when the rank had everything to begin it, apart from a free stream; never
    after its start.

    ``lead_ns`` is, for each step, the time from the step's start on the host to the launch of the first work in the
    step's window; ``behind_ns`` from that launch to the work's start. ``late`` is whether the device waited for it.
    ``host_busy_ns`` is, for each step, the host's time outside the loader and blocking calls, 0 where nothing shows it:
    a lower bound of the step, however fast the device.

    ``beside_ns`` is, for each step, how long the copies between host and device take that it launches on another stream
    than most kernels, on the one where they take longest: they run one after the other, whatever the device computes
    meanwhile.

    ``copy_ns`` is, for each collective, what the copies into its buffer take that waited for another collective
    (``WaitingCopies``): no part of ``own``.

    ``host`` is the rank's host beside its device; None on a rank without device work, or where its launches are not
    recorded.
    """

    own: Timeline
    blocker: Int64
    ready_ns: Int64
    lead_ns: Int64
    behind_ns: Int64
    late: Bool
    host_busy_ns: Int64
    beside_ns: Int64
    copy_ns: Int64
    host: HostLane | None = None

    @property
    def blocked(self) -> Intervals:
        """When the rank is blocked by communication."""
        return self.own.where(TimeCategory.COMM_TRANSFER)

    def unblocked(self) -> Timeline:
        """The rank's own time alone: ``own`` without its blocked stretches, joined without gaps, beginning at 0."""
        kept = self.own.category != TimeCategory.COMM_TRANSFER
        length = (self.own.ends_ns - self.own.start_ns)[kept]
        ends = np.cumsum(length)
        return Timeline(ends - length, self.own.category[kept], int(length.sum()))
