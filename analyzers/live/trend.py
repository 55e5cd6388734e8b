"""The step time over all that was watched, in a bounded number of parts."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.trace.trace import Float32

MOST: Final = 240
"""Parts: where there would be more, each two become one."""


class Trend:
    """Means of equal numbers of consecutive steps."""

    def __init__(self) -> None:
        self._width = 1
        self._means: list[float] = []
        self._open: list[float] = []
        self.last = -1
        """The last step that is in it."""

    def add(self, last: int, fresh: Float32) -> None:
        """The steps up to number ``last`` that are new, (ranks, steps, columns)."""
        self.last = last  # a smaller one: the job was restarted
        steps = fresh[..., 0]
        known = steps[:, np.isfinite(steps).any(axis=0)]
        for value in np.nanmedian(known, axis=0).tolist() if known.size else []:
            self._open.append(value)
            if len(self._open) == self._width:
                self._means.append(sum(self._open) / self._width)
                self._open.clear()
        if len(self._means) >= MOST:
            self._width *= 2
            self._open.clear()
            self._means = [(self._means[i] + self._means[i + 1]) / 2 for i in range(0, len(self._means) - 1, 2)]

    def values(self) -> tuple[float, ...]:
        """The mean step time of each part, the oldest first, µs."""
        return tuple(self._means)
