"""The content of one rank's tracks, from the analysis of the whole job; the worker adds the rank's trace.

Times are ns since the zero of the file, on the lowest rank's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from perfscope.analyzers.merge.pftrace import Args, CounterUnit
from perfscope.frozen import dataclass
from perfscope.trace.clock import Clocks
from perfscope.trace.trace import Bool, Float64, Int8, Int64

LANES: Final = ("compute", "comm", "copy", "host", "loader", "counters", "python")
"""The lanes of a rank that can be chosen; its steps and its time breakdown are always shown."""

DEFAULT_LANES: Final = tuple(lane for lane in LANES if lane != "python")
"""Without Python's function calls, which are many times all the rest."""


@dataclass(frozen=True, eq=False)
class Windows:
    """Time windows to show: ascending, disjoint."""

    start_ns: Int64
    end_ns: Int64

    @property
    def hull(self) -> tuple[int, int]:
        """First start and last end."""
        return int(self.start_ns[0]), int(self.end_ns[-1])

    def shows(self, start_ns: Int64, end_ns: Int64) -> Bool:
        """Which ranges lie in a window, at least partly; ranges without a duration count, too."""
        place = np.searchsorted(self.end_ns, start_ns, side="right")
        inside = place < len(self.start_ns)
        begins = self.start_ns[np.minimum(place, len(self.start_ns) - 1)]
        return inside & ((begins < end_ns) | (begins <= start_ns))

    def clipped(self, start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64]:
        """Ranges cut at the first start and the last end of the windows."""
        first, last = self.hull
        return np.clip(start_ns, first, last), np.clip(end_ns, first, last)


@dataclass(frozen=True, eq=False)
class Communication:
    """The collectives and messages of a rank to show: parallel arrays.

    ``row`` is the index in the rank's ``Collectives``. ``begin_flows`` and ``end_flows`` are as in ``Slices``.
    """

    row: Int64
    start_ns: Int64
    end_ns: Int64
    last_arrival_ns: Int64
    """The last arrival; its own start where it did not wait, or where that is not known."""
    done_ns: Int64
    waited_for: Int64
    names: Sequence[str]
    args: Sequence[Args]
    begin_flows: Sequence[Sequence[int]]
    end_flows: Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class Counter:
    """Values over time, each valid until the next."""

    name: str
    unit: CounterUnit
    time_ns: Int64
    values: Float64


@dataclass(frozen=True, eq=False)
class RankView:
    """One rank: everything that the worker needs besides the rank's trace."""

    rank: int
    path: Path
    part: str | None
    title: str
    summary: str
    """One line about the rank: its step time and its time breakdown."""
    windows: Windows
    clocks: Clocks
    zero_ns: int
    """Zero of the file, on the lowest rank's clock."""
    lanes: frozenset[str]
    steps: Mapping[str, tuple[int, int]]
    """Name of a step -> its window."""
    breakdown_start_ns: Int64
    breakdown_end_ns: Int64
    breakdown_category: Int8
    communication: Communication
    counters: tuple[Counter, ...]

    def shown_ns(self, own_ns: Int64) -> Int64:
        """Times of the rank's own clock as times of the file."""
        return self.clocks.to_common(self.rank, own_ns) - self.zero_ns
