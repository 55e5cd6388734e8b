"""How far the mean of the few recorded steps may be from that of many, which is what a change is made for.

All steps vary a little, which their standard error shows. And now and then one is odd (a pause, a checkpoint): of few
steps one shows that there are such, not how often. Example: of four steps one takes 10 ms longer, so that 2.5 ms of the
mean are of it: with such a step in every eighth it would be 1.25, in every other one 5.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from perfscope.trace.trace import Int64

_PAIR: Final = 2
"""Of so many steps neither is the odd one."""

_UNSEEN: Final = 2
"""The quickest of n steps tells how quick a step may be to n of n + this many parts."""


def standard_error(steps: Int64, unseen: float) -> float:
    """Of the steps' mean, relative, the odd step apart: the one farthest from the median, of three or more. A few steps
    do not show how much steps vary: they count as if there were one more, which differs by ``unseen``.
    """
    count, mean = len(steps), float(steps.mean())
    usual = np.delete(steps, np.abs(steps - np.median(steps)).argmax()) if count > _PAIR else steps
    variance = (unseen**2 + (count - 1) * (float(usual.std(ddof=min(len(usual) - 1, 1))) / mean) ** 2) / count
    return math.sqrt(variance / count)


def of_odd_step(steps: Int64) -> float:
    """Share of the steps' mean that the odd one makes of it: as many steps may hold two such, or none."""
    count = len(steps)
    odd = float(np.abs(steps - np.median(steps)).max()) if count > _PAIR else 0.0
    return odd / float(steps.sum()) if odd else 0.0


def most_below(steps_ns: Int64, mid: float, correction: float) -> float:
    """How far the mean of all steps may be below ``mid``, relative: where pauses make some steps longer, the others are
    not much shorter than the quickest one. Of few steps the quickest says less.
    """
    quickest = float(steps_ns.min()) * correction * len(steps_ns) / (len(steps_ns) + _UNSEEN)
    return max(1 - quickest / mid, 0.0) if mid > 0 else 0.0
