"""Own times of ranks that do the same work above their peers', step by step, and the noise of that.

Noise is what no cause explains. A delayed rank is above its peers, so noise is looked for below them, and of two ranks,
each of which is below the other by what that is above it, in the quicker steps and where their differences are densest.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from perfscope.trace.medians import SIGMA_OF_MAD, densest
from perfscope.trace.trace import Float32

_QUICK: Final = 0.25
"""Quantile of steps: below it nothing is slow that is not so nearly always."""

_SIGMAS_BELOW_QUICK: Final = 0.4758
"""Standard deviations of a normal distribution between that quantile and half of it."""

_APART: Final = 2.0
"""Standard deviations from 0 at which absolute differences have a middle of their own; noise is densest at 0."""


def above_peers(own: Float32) -> Float32:
    """Own times (steps x ranks) above the lower median of each step: with half of the ranks slow it is still that of
    those that are not.

    Of two ranks, above the other: what varies on both is then as often below 0.
    """
    if own.shape[1] == 2:
        return own - own[:, ::-1]
    place = (own.shape[1] - 1) // 2
    middle: Float32 = np.partition(own, place, axis=1)[:, place]
    return own - middle[:, None]


def noise_of(own: Float32, excess: Float32) -> float:
    """Standard deviation of the excess in one group, from the quickest quarter of each rank's steps, which no cause
    slows; of two ranks, from how they differ.
    """
    if own.shape[1] > 2:
        below: Any = np.quantile(excess, _QUICK, axis=0) - excess
        below = below[below > 0]
        return float(np.median(below) / _SIGMAS_BELOW_QUICK) if below.size else 0.0
    if own.shape[1] < 2 or len(own) < 2:
        return 0.0
    # Of the quicker rank's steps, which a cause leaves alone, and a batch's size does not; or of the ranks' difference,
    # with which it is the other way round.
    changes = SIGMA_OF_MAD * np.median(np.abs(np.diff(own.min(axis=1))))
    difference = own[:, 0] - own[:, 1]
    found = [float(changes), densest(difference)[1]]
    # Where they are late in turn, half of the differences lie about a delay, and half about its opposite.
    middle, deviation = densest(np.abs(difference))
    if middle >= _APART * deviation:
        found.append(deviation)
    return min(found)
