"""How many events of one rank's training threads the profiler recorded, over time: each of them cost the host time."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.frozen import dataclass
from perfscope.trace.trace import Category, Int64, Trace

_POINTS: Final = 4096
"""Moments that are stored at most: a recording with Python functions has millions of events."""


@dataclass(frozen=True, eq=False)
class HostEvents:
    """``at_ns`` are moments on the rank's own clock, ascending; at each ``each`` events were recorded."""

    at_ns: Int64
    each: float

    def within(self, start_ns: int, end_ns: int) -> float:
        """Events in ``[start_ns, end_ns)``."""
        first, last = np.searchsorted(self.at_ns, (start_ns, end_ns))
        return float(last - first) * self.each


def host_events(trace: Trace, threads: Int64) -> HostEvents:
    """Operators, ranges, Python functions and runtime calls of these threads, by their starts."""
    rows = trace.rows(
        Category.CPU_OP, Category.ANNOTATION, Category.PYTHON, Category.RUNTIME, threads=threads
    )  # fmt: skip
    stride = max(-(-len(rows) // _POINTS), 1)
    at_ns = trace.start_ns[rows[stride // 2 :: stride]]  # rows are in the order of their starts
    return HostEvents(at_ns.astype(np.int64), len(rows) / len(at_ns) if len(at_ns) else 0.0)
