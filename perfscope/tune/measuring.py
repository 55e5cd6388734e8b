"""What a step of a trial takes, how surely, and whether a gain is more than noise. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import hypot, sqrt
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from perfscope.frozen import dataclass
from perfscope.trace.medians import deviation

BLOCKS: Final = 6
"""Into this many blocks the measured steps of a trial are cut."""

SHORTEST_BLOCK: Final = 4

LEAST_GAIN: Final = 0.02
"""Share of the step time that a change must save to be worth a line of code."""

SIGMAS: Final = 2.5
"""Standard errors that a gain must exceed: one in 160 would by chance, and what helps is measured twice."""

_ERROR_OF_MEDIAN: Final = 1.2533
"""Standard error of the median of a normal sample over that of its mean."""

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measurement:
    """A trial's step time in ns, its standard error, and the steps it rests on."""

    step_ns: float
    error_ns: float
    steps: int

    @property
    def relative_error(self) -> float:
        """Standard error over step time."""
        return self.error_ns / self.step_ns


def measured(step_ns: Float64, period: int = 1) -> Measurement:
    """From the steps' durations, ranks x steps.

    Steps are cut into blocks. A block takes the mean of its slowest rank, and the trial takes the median of its blocks.
    Means within blocks, because W loader workers deliver W batches at once and then none for a while, so that single
    steps are not typical (``period`` is W); the median over them, because other processes disturb some of them.

    Example: one rank, 8 steps of 1 1 1 9 1 1 1 9 with ``period`` 4: two blocks of mean 3, so a step takes 3 (the median
    step would be 1).
    """
    steps = step_ns.shape[1]
    length = max(SHORTEST_BLOCK, steps // BLOCKS)
    length = max(period, length // period * period)
    blocks = max(steps // length, 1)
    used = step_ns[:, steps - blocks * length :] if steps >= length else step_ns
    means = used.reshape(used.shape[0], blocks, -1).mean(axis=2).max(axis=0)
    middle = float(np.median(means))
    return Measurement(middle, _ERROR_OF_MEDIAN * deviation(means) / sqrt(blocks), steps)


@dataclass(frozen=True)
class Drift:
    """The unchanged job's measurements, in order: how the machine's pace changed meanwhile."""

    baselines: tuple[Measurement, ...]

    @property
    def step_ns(self) -> float:
        """Their median."""
        return median(each.step_ns for each in self.baselines)

    @property
    def noise(self) -> float:
        """Standard deviation between two runs of the same job, relative; from successive ones, so without a trend."""
        steps = [each.step_ns for each in self.baselines]
        changes = [2 * (b - a) / (a + b) for a, b in pairwise(steps)]
        return sqrt(sum(change**2 for change in changes) / (2 * len(changes))) if changes else 0.0


@dataclass(frozen=True)
class TrialGain:
    """What a trial saves against the unchanged job around it: share of the step (0.2: a fifth), and its noise."""

    share: float
    noise: float

    @property
    def real(self) -> bool:
        """Is it more than noise?"""
        return self.share > self.noise


def gain(trial: Measurement, before: Measurement, after: Measurement, drift: Drift) -> TrialGain:
    """Of a trial between two runs of the unchanged job: against their mean, because a machine's pace drifts."""
    around = (before.step_ns + after.step_ns) / 2
    share = 1 - trial.step_ns / around
    return TrialGain(share, _threshold(trial, (before, after), drift))


def _threshold(trial: Measurement, around: Sequence[Measurement], drift: Drift) -> float:
    within = hypot(trial.relative_error, hypot(*(each.relative_error for each in around)) / len(around))
    between = drift.noise * sqrt(1 + 1 / len(around))
    return max(LEAST_GAIN, SIGMAS * hypot(within, between))
