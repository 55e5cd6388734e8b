"""What is shown of a rank: everything that the comparison of the ranks found out about it, ready to be written.

All times but those of the trace are ns since the file's zero on the lowest rank's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from perfscope.analyzers.merging.pftrace import Args, Unit
from perfscope.clock import Clocks
from perfscope.trace import Bool, Float64, Int8, Int64

LANES: Final = ("compute", "comm", "copy", "host", "loader", "counters", "python")
"""What of a rank can be shown, besides its steps and its account."""

DEFAULT_LANES: Final = tuple(lane for lane in LANES if lane != "python")
"""Python's function calls are many times all the rest."""


@dataclass(frozen=True, eq=False)
class Windows:
    """Stretches of time that are shown: ascending, disjoint."""

    start_ns: Int64
    end_ns: Int64

    @property
    def hull(self) -> tuple[int, int]:
        """From the first start to the last end."""
        return int(self.start_ns[0]), int(self.end_ns[-1])

    def shows(self, start_ns: Int64, end_ns: Int64) -> Bool:
        """Which ranges lie in a window, at least in part; those without a duration count too."""
        place = np.searchsorted(self.end_ns, start_ns, side="right")
        inside = place < len(self.start_ns)
        begins = self.start_ns[np.minimum(place, len(self.start_ns) - 1)]
        return inside & ((begins < end_ns) | (begins <= start_ns))

    def clipped(self, start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64]:
        """Ranges cut at the first and the last moment shown: what lasts longer must not stretch the picture."""
        first, last = self.hull
        return np.clip(start_ns, first, last), np.clip(end_ns, first, last)


@dataclass(frozen=True, eq=False)
class Communication:
    """The collectives and messages of a rank that are shown, in the order of ``Collectives``: parallel.

    ``row`` is the place in the rank's ``Collectives``. ``begin_flows`` and ``end_flows`` are as in ``Slices``.
    """

    row: Int64
    start_ns: Int64
    end_ns: Int64
    last_arrival_ns: Int64
    """When the last one it waited for arrived; its start where it waited for none, or that is not known."""
    done_ns: Int64
    waited_for: Int64
    names: Sequence[str]
    args: Sequence[Args]
    begin_flows: Sequence[Sequence[int]]
    end_flows: Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class Counter:
    """Values over time, each until the next."""

    name: str
    unit: Unit
    time_ns: Int64
    values: Float64


@dataclass(frozen=True, eq=False)
class RankView:
    """One rank, as far as the worker that reads its trace has to know."""

    rank: int
    path: Path
    part: str | None
    title: str
    summary: str
    """One line about the rank: its step and where that went."""
    windows: Windows
    clocks: Clocks
    zero_ns: int
    """On the lowest rank's clock."""
    lanes: frozenset[str]
    steps: Mapping[str, tuple[int, int]]
    """What a step is called -> window of its account."""
    account_start_ns: Int64
    account_end_ns: Int64
    account_row: Int8
    communication: Communication
    counters: tuple[Counter, ...]

    def shown_ns(self, own_ns: Int64) -> Int64:
        """Times of the rank's own clock as the file has them."""
        return self.clocks.to_common(self.rank, own_ns) - self.zero_ns
