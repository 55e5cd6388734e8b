"""Tells a slow step from the others: by the running median, which a few slow steps do not move."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

WINDOW: Final = 64
"""Undisturbed steps that the median is taken of."""

ENOUGH: Final = 16
"""Steps from which there is a median to compare with."""

FEW: Final = 3
"""Steps from which the shortest stands for all: the first ones take long, and too short an answer does no harm."""

EVERY: Final = 8
"""Steps after which the median is taken anew: sorting the window at every one would cost more than all else."""


class SlowSteps:
    """Compares every undisturbed step with the median of those before it."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._window: deque[int] = deque(maxlen=WINDOW)
        self._since = 0
        self._median_ns = math.inf
        self._threshold = math.inf

    def step(self, duration_ns: int) -> float | None:
        """A step has ended: how many times the median it took, where that is ``factor`` or more, else None."""
        slow = duration_ns / self._median_ns if duration_ns >= self._threshold else None
        self._window.append(duration_ns)
        self._since += 1
        if self._since >= EVERY and len(self._window) >= ENOUGH:
            self._since = 0
            # Not by the statistics module: importing that takes as long as ten thousand of these.
            self._median_ns = sorted(self._window)[len(self._window) // 2]
            self._threshold = self._factor * self._median_ns
        return slow

    def typical_ns(self) -> float | None:
        """What a step takes: the median, the shortest one while there are few, None while there are hardly any."""
        if math.isfinite(self._median_ns):
            return self._median_ns
        seen = list(self._window)
        return min(seen) if len(seen) >= FEW else None
