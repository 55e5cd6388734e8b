"""Do the means of two samples differ, by how much, and how sure is that? Welch's t-test (Biometrika 34, 1947), and
whether the samples overlap at all.

One procedure gives the estimate (the difference of the means), its confidence interval and the p-value: the interval of
level 1 - a excludes 0 exactly where p < a. Means, because the parts of a step then add up to it, and because a loader
that stalls at every eighth step costs what it costs. Without scipy, which analysis does not depend on.

Two things of real recordings would mislead it. A single odd step (warm-up, a checkpoint, a step cut by the recording's
end) hides any difference: ``regular_steps`` leaves out what is far off and does not recur. Consecutive steps are
correlated: the effective sample size accounts for that (Bence, Ecology 76, 1995).
"""

from __future__ import annotations

import math
from statistics import median
from typing import Final

import numpy as np

from perfscope.frozen import dataclass
from perfscope.trace.medians import SIGMA_OF_MAD
from perfscope.trace.trace import Bool, Float64

_FAR: Final = 5.0
"""Standard deviations (1.4826 x the median absolute deviation) from the median beyond which a step is odd."""

_NEAR: Final = 0.05
"""Share of the median by which a step must differ from it as well: recordings may hardly vary at all."""

_ALIKE: Final = 0.5
"""Stretches of odd steps recur where the second is at least this share as far off as the first."""

_FEW: Final = 5
"""At most one of this many steps is odd."""

_LONGER: Final = 2.0
"""Steps of a run, as a multiple of the sample's, from which they tell better how neighbours are correlated."""

_SPREAD_FROM: Final = 0.5
"""Share of a sample's values that count at least for how well its spread is known. Correlated neighbours lengthen the
standard error. Were they to take the degrees of freedom as well, eight drifting steps would have one, for which forty
standard errors are noise. False alarms of correlated samples are as rare with it, within a tenth, up to a correlation
of 0.6: it is mostly too small an estimate of the correlation that causes them."""

_FEWEST_FOR_CORRELATION: Final = 8
"""With fewer steps, a correlation of neighbours cannot be distinguished from chance."""


@dataclass(frozen=True)
class WelchTest:
    """A difference of means: candidate - baseline."""

    delta: float
    error: float
    """Standard error of ``delta``."""
    degrees: float
    """Degrees of freedom (Welch-Satterthwaite)."""
    p: float
    """Two-sided."""

    def half_width(self, level: float) -> float:
        """Half of the confidence interval that covers the difference with probability ``level``."""
        return self.error * student_quantile(1 - (1 - level) / 2, self.degrees)


def welch_test(
    baseline: Float64, candidate: Float64, *, runs: tuple[Float64 | None, Float64 | None] = (None, None)
) -> WelchTest | None:
    """The test; None where a sample has fewer than two values. ``runs`` as in ``effective_size``."""
    if len(baseline) < 2 or len(candidate) < 2:
        return None
    sizes = [effective_size(sample, run) for sample, run in zip((baseline, candidate), runs, strict=True)]
    parts = [float(np.var(sample, ddof=1)) / size for sample, size in zip((baseline, candidate), sizes, strict=True)]
    means = float(baseline.mean()), float(candidate.mean())
    delta, error = means[1] - means[0], math.sqrt(sum(parts))
    if error <= 1e-12 * max(map(abs, means)):
        # Samples without any spread: any difference is exact.
        return WelchTest(delta, 0.0, 1.0, 0.0 if delta else 1.0)
    known = [max(size, _SPREAD_FROM * len(sample)) for sample, size in zip((baseline, candidate), sizes, strict=True)]
    below = sum(part**2 / (size - 1) for part, size in zip(parts, known, strict=True))
    degrees = max(error**4 / below, 1.0)
    return WelchTest(delta, error, degrees, 2 * (1 - student_cdf(abs(delta) / error, degrees)))


@dataclass(frozen=True)
class Separation:
    """All values of one sample are beyond all of the other."""

    gap: float
    """Between the nearest two."""
    p: float
    """Chance that samples of one distribution are so: of all orders of so many values two are (Wilcoxon's rank sum,
    two-sided), whatever the distribution.
    """


def separation(
    baseline: Float64, candidate: Float64, *, runs: tuple[Float64 | None, Float64 | None] = (None, None)
) -> Separation | None:
    """How two samples are apart; None where they overlap. ``runs`` as in ``effective_size``.

    Where steps vary much in one recording alone, as where a loader comes to limit it, their own spread is hardly known
    from a few: that each is beyond all of the other recording tells more. Example, ms: 13 13 13 13 13 13 and 15 17 20
    20 21 21 are apart by 2, by chance in 2 of 924 cases.
    """
    if min(len(baseline), len(candidate)) < 2:
        return None
    gap = max(float(candidate.min() - baseline.max()), float(baseline.min() - candidate.max()))
    if gap <= 0:
        return None
    first, second = (int(effective_size(sample, run)) for sample, run in zip((baseline, candidate), runs, strict=True))
    return Separation(gap, 2 / math.comb(first + second, first))


def regular_steps(times: Float64) -> Bool:
    """For each step: whether it is typical of the recording. All are where more than one in ``_FEW`` would not be.

    A step is odd where it is far from the median, unless such steps recur: those of a loader with eight workers stall
    together at every eighth step, and belong to the job.
    """
    if len(times) < _FEW:
        return np.ones(len(times), dtype=np.bool_)
    middle = float(median(times.tolist()))  # numpy's takes ten times as long for as few values as there are steps
    off = times - middle
    distance = np.abs(off)
    far: Bool = distance > max(_FAR * (SIGMA_OF_MAD * median(distance.tolist())), _NEAR * abs(middle))
    if not far.any():
        return ~far
    odd = _lone(np.where(far, off, 0.0)) | _lone(np.where(far, -off, 0.0))
    return ~odd if _FEW * odd.sum() <= len(times) else np.ones(len(times), dtype=np.bool_)


def _lone(excess: Float64) -> Bool:
    """Where ``excess`` is positive, in one stretch that is by far the largest."""
    above = excess > 0
    stretch = np.cumsum(above & ~np.concatenate(([False], above[:-1])))
    heights = sorted(float(excess[above & (stretch == number)].max()) for number in np.unique(stretch[above]))
    if len(heights) > 1 and heights[-2] >= _ALIKE * heights[-1]:
        return np.zeros(len(excess), dtype=np.bool_)
    return above


def effective_size(sample: Float64, run: Float64 | None = None) -> float:
    """Number of independent values with the same information: n (1 - r)/(1 + r), at least 2.

    r is the lag-1 correlation, where it is positive and above what chance explains in most samples (1/sqrt n). Eight
    steps hardly show it: of more steps of the same ``run``, ``_LONGER`` times as many, it is the smaller one of both.
    """
    count = len(sample)
    if count < _FEWEST_FOR_CORRELATION:
        return float(count)
    known = [sample] if run is None or len(run) < _LONGER * count else [sample, run]
    r = min(map(_correlation, known))
    return max(count * (1 - r) / (1 + r), 2.0)


def _correlation(steps: Float64) -> float:
    """Of neighbours; 0 where chance may explain it."""
    centred = steps - steps.mean()
    total = float(centred @ centred)
    r = float(centred[1:] @ centred[:-1]) / total if total > 0 else 0.0
    return r if r > 1 / math.sqrt(len(steps)) else 0.0


def holm(probabilities: list[float], level: float) -> list[bool]:
    """Which of several tests hold with a chance of any false alarm below ``level`` (Holm, 1979)."""
    rejected = [False] * len(probabilities)
    for place, index in enumerate(sorted(range(len(probabilities)), key=probabilities.__getitem__)):
        if probabilities[index] >= level / (len(probabilities) - place):
            break
        rejected[index] = True
    return rejected


def student_cdf(t: float, degrees: float) -> float:
    """P(T <= t) for Student's t."""
    tail = 0.5 * _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))
    return 1 - tail if t > 0 else tail


def student_quantile(probability: float, degrees: float) -> float:
    """The t that a share ``probability`` (0.5 to 1) of Student's distribution lies below, by halving."""
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function by its continued fraction (Abramowitz and Stegun 26.5.8)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    result = d
    for m in range(1, 300):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + factor * d or tiny)
            c = 1 + factor / c or tiny
            result *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * result
