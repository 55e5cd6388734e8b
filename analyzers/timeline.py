"""Timeline: the exclusive account of one rank as consecutive stretches, from which every total is read."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfscope.analyzers.intervals import Intervals, paint
from perfscope.summary import ROWS
from perfscope.trace import Int8, Int64


class Row(enum.IntEnum):
    """A row of the account; the order is the order of precedence of ``perfscope.summary.ROWS``."""

    COMPUTE = 0
    COMM_WAIT = 1
    COMM_TRANSFER = 2
    COPY = 3
    DATALOADER = 4
    SYNC = 5
    LAUNCH = 6
    HOST = 7
    DEPENDENCY = 8
    UNKNOWN = 9

    @property
    def label(self) -> str:
        """Its name in the summary, without ``_us``."""
        return ROWS[self]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Stretch i covers ``[start_ns[i], start_ns[i + 1])``, the last one ends at ``end_ns``. Every ns is in exactly one.

    ``row`` holds ``Row`` values. Until the ranks were compared, all exposed communication is COMM_TRANSFER; ``split``
    moves the waits out.
    """

    start_ns: Int64
    row: Int8
    end_ns: int

    @classmethod
    def of(cls, start_ns: int, end_ns: int, layers: Sequence[tuple[Row, Intervals]], ground: Row) -> Timeline:
        """The first layer covering an instant owns it; what no layer covers belongs to ``ground``."""
        starts, labels = paint(start_ns, end_ns, [(int(row), layer) for row, layer in layers], int(ground))
        return cls(starts, labels, end_ns)

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def ends_ns(self) -> Int64:
        """End of every stretch."""
        return np.append(self.start_ns[1:], self.end_ns) if len(self) else self.start_ns

    def where(self, *rows: Row) -> Intervals:
        """The time that belongs to any of ``rows``."""
        hit = np.isin(self.row, np.array(rows, dtype=np.int8))
        return Intervals.of(self.start_ns[hit], self.ends_ns[hit])

    def split(self, row: Row, part: Intervals, into: Row) -> Timeline:
        """A timeline in which the time of ``row`` inside ``part`` belongs to ``into``."""
        moved = self.where(row).intersect(part)
        if len(moved) == 0:
            return self
        edges = np.unique(np.concatenate((self.start_ns, moved.start_ns, moved.end_ns)))
        edges = edges[(edges >= self.start_ns[0]) & (edges < self.end_ns)]
        rows = self.row[np.searchsorted(self.start_ns, edges, side="right") - 1].copy()
        rows[moved.covers(edges)] = into
        changes = np.concatenate(([True], rows[1:] != rows[:-1]))
        return Timeline(edges[changes], rows[changes], self.end_ns)

    def totals(self, start_ns: Int64, end_ns: Int64) -> Int64:
        """Ns of each row (columns, in ``Row`` order) inside each window (lines)."""
        return self._before(end_ns) - self._before(start_ns)

    def _before(self, time_ns: Int64) -> Int64:
        """Ns of each row (columns) before each time (lines)."""
        length = np.zeros((len(self) + 1, len(Row)), dtype=np.int64)
        length[np.arange(1, len(self) + 1), self.row] = self.ends_ns - self.start_ns
        total = length.cumsum(axis=0)
        # The stretch that holds each time counts up to that time; NONE of them before the first.
        index = np.searchsorted(self.start_ns, time_ns, side="right")
        before = total[np.maximum(index - 1, 0)].copy()
        inside = np.flatnonzero(index > 0)
        holding = index[inside] - 1
        before[inside, self.row[holding]] += np.minimum(time_ns[inside], self.ends_ns[holding]) - self.start_ns[holding]
        return np.asarray(before, dtype=np.int64)
