"""Puts ranges that overlap in any way on lanes in which they nest, as a track of slices demands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.trace import Bool, Int64

ROUNDING_NS: Final = 1_000
"""Recorders that write whole µs let neighbours overlap by up to one; such an overlap is cut off, not shown."""


@dataclass(frozen=True, eq=False)
class Stacked:
    """Where each range lies: parallel arrays in the ranges' own order.

    ``depth`` is how many ranges of its lane lie around it. ``instant`` marks those without a duration.
    """

    lane: Int64
    depth: Int64
    start_ns: Int64
    end_ns: Int64
    instant: Bool
    lanes: int


def stacked(start_ns: Int64, end_ns: Int64, around: Int64 | None = None) -> Stacked:
    """Give each range the first lane in which it nests: inside whatever is open there, or after it.

    ``around``, where given, is the index of the range that a range lies in, which comes before it and decides the lane;
    -1 where it lies in none that is known.

    Example: [0, 10), [2, 4), [3, 12) go to lanes 0, 0, 1; the second lies at depth 1.
    """
    size = len(start_ns)
    lane, depth = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    end = end_ns.copy()
    stacks: list[list[int]] = [[]]
    starts, ends = start_ns.tolist(), end_ns.tolist()
    for index in np.lexsort((-end_ns, start_ns)).tolist():
        begin = starts[index]
        known = int(lane[around[index]]) if around is not None and around[index] >= 0 else None
        for number, stack in enumerate(stacks):
            if (known is None or known == number) and _fits(stack, index, begin, ends):
                break
        else:
            number, stack = len(stacks), []
            stacks.append(stack)
        lane[index], depth[index] = number, len(stack)
        stack.append(index)
    end[:] = ends
    return Stacked(lane, depth, start_ns, end, end <= start_ns, len(stacks))


def _fits(stack: list[int], index: int, begin: int, ends: list[int]) -> bool:
    """Close what has ended by ``begin``; then, does the range nest in what is open? Overlaps by rounding are cut."""
    while stack:
        top = ends[stack[-1]]
        over = ends[index] - top
        if top <= begin or (over > 0 and top - begin <= ROUNDING_NS):
            ends[stack[-1]] = min(top, begin)
            stack.pop()
        elif over <= 0:
            return True
        elif over <= ROUNDING_NS:
            ends[index] = top
            return True
        else:
            return False
    return True
