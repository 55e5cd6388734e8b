"""Are two samples' means, or their typical values, different? Without scipy, which analysis does not depend on.

Welch's t-test (Biometrika 34, 1947) for means; Yuen's (Biometrika 61, 1974) for means without the extreme fifth at
either end, which an odd step, such as the last of a recording, neither moves nor drowns. Consecutive steps resemble one
another, so samples count for fewer where they do (Bence, Ecology 76, 1995).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.trace import Float64

_TRIMMED: Final = 0.2
"""Share of the values left out at either end, as Yuen and most after her have it."""

_FEWEST_FOR_CORRELATION: Final = 8
"""Below this many steps a correlation of neighbours cannot be told from chance."""


@dataclass(frozen=True)
class Test:
    """A difference of means, after - before, plain or trimmed."""

    delta: float
    error: float
    """Its standard error."""
    degrees: float
    """Degrees of freedom (Welch-Satterthwaite)."""
    p: float
    """Two-sided."""

    def half_width(self, level: float) -> float:
        """Half of the confidence interval that covers the difference with probability ``level``."""
        return self.error * student_quantile(1 - (1 - level) / 2, self.degrees)


@dataclass(frozen=True)
class Difference:
    """Both tests of two samples."""

    means: Test
    trimmed: Test

    @property
    def p(self) -> float:
        """Chance that either would find as much where there is nothing (Bonferroni)."""
        return min(2 * min(self.means.p, self.trimmed.p), 1.0)


def difference(before: Float64, after: Float64) -> Difference | None:
    """Both tests; None where a sample has fewer than two values."""
    if len(before) < 2 or len(after) < 2:
        return None
    return Difference(_tested(_mean(before), _mean(after)), _tested(_trimmed(before), _trimmed(after)))


@dataclass(frozen=True)
class _Estimate:
    """A mean, its squared standard error and its degrees of freedom."""

    mean: float
    variance: float
    degrees: float


def _mean(sample: Float64) -> _Estimate:
    size = effective_size(sample)
    return _Estimate(float(sample.mean()), float(np.var(sample, ddof=1)) / size, size - 1)


def _trimmed(sample: Float64) -> _Estimate:
    """The mean of the middle values; the variance is that of the values drawn in to them (winsorized)."""
    count = len(sample)
    cut = int(_TRIMMED * count)
    if cut == 0:
        return _mean(sample)
    ordered = np.sort(sample)
    kept = count - 2 * cut
    spread = float(np.var(np.clip(sample, ordered[cut], ordered[count - cut - 1]), ddof=1))
    fewer = effective_size(sample) / count
    variance = (count - 1) * spread / (kept * (kept - 1)) / fewer
    return _Estimate(float(ordered[cut : count - cut].mean()), variance, max((kept - 1) * fewer, 1.0))


def _tested(before: _Estimate, after: _Estimate) -> Test:
    delta = after.mean - before.mean
    error = math.sqrt(before.variance + after.variance)
    if error <= 1e-12 * max(abs(before.mean), abs(after.mean)):
        # Samples without any spread: the difference is what it is.
        return Test(delta, 0.0, 1.0, 0.0 if delta else 1.0)
    below = before.variance**2 / before.degrees + after.variance**2 / after.degrees
    degrees = max(error**4 / below, 1.0)
    return Test(delta, error, degrees, 2 * (1 - student_cdf(abs(delta) / error, degrees)))


def effective_size(sample: Float64) -> float:
    """Independent values that this many resembling neighbours are worth: n (1 - r)/(1 + r), at least 2.

    r is the correlation of neighbours, only where it is positive and beyond what chance brings about (2/sqrt n).
    """
    count = len(sample)
    if count < _FEWEST_FOR_CORRELATION:
        return float(count)
    centred = sample - sample.mean()
    total = float(centred @ centred)
    r = float(centred[1:] @ centred[:-1]) / total if total > 0 else 0.0
    if r <= 2 / math.sqrt(count):
        return float(count)
    return max(count * (1 - r) / (1 + r), 2.0)


def holm(probabilities: list[float], level: float) -> list[bool]:
    """Which of several tests hold when the chance of any false alarm is to stay below ``level`` (Holm, 1979)."""
    held = [False] * len(probabilities)
    for place, index in enumerate(sorted(range(len(probabilities)), key=probabilities.__getitem__)):
        if probabilities[index] >= level / (len(probabilities) - place):
            break
        held[index] = True
    return held


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
