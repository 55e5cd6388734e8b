"""Do the means, or the trimmed means, of two samples differ? Without scipy, which analysis does not depend on.

Welch's t-test (Biometrika 34, 1947) compares means; Yuen's (Biometrika 61, 1974) compares trimmed means, without the
extreme fifth at either end, so that an outlier such as the last step of a recording neither causes nor hides a
difference. Consecutive steps are correlated; the effective sample size accounts for that (Bence, Ecology 76, 1995).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.trace.trace import Float64

_TRIMMED: Final = 0.2
"""Share of the values trimmed at either end, as Yuen proposes."""

_FEWEST_FOR_CORRELATION: Final = 8
"""With fewer steps, a correlation of neighbours cannot be distinguished from chance."""


@dataclass(frozen=True)
class MeanTest:
    """A difference of means, plain or trimmed: candidate - baseline."""

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


@dataclass(frozen=True)
class TwoSampleTest:
    """Both tests of two samples."""

    means: MeanTest
    trimmed: MeanTest

    @property
    def p(self) -> float:
        """Chance of so large a difference, in either test, where there is none (Bonferroni)."""
        return min(2 * min(self.means.p, self.trimmed.p), 1.0)


def two_sample_test(baseline: Float64, candidate: Float64) -> TwoSampleTest | None:
    """Both tests; None where a sample has fewer than two values."""
    if len(baseline) < 2 or len(candidate) < 2:
        return None
    return TwoSampleTest(_tested(_mean(baseline), _mean(candidate)), _tested(_trimmed(baseline), _trimmed(candidate)))


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
    """The trimmed mean; its variance comes from the winsorized sample."""
    count = len(sample)
    cut = int(_TRIMMED * count)
    if cut == 0:
        return _mean(sample)
    ordered = np.sort(sample)
    rest = count - 2 * cut
    spread = float(np.var(np.clip(sample, ordered[cut], ordered[count - cut - 1]), ddof=1))
    fewer = effective_size(sample) / count
    variance = (count - 1) * spread / (rest * (rest - 1)) / fewer
    return _Estimate(float(ordered[cut : count - cut].mean()), variance, max((rest - 1) * fewer, 1.0))


def _tested(baseline: _Estimate, candidate: _Estimate) -> MeanTest:
    delta = candidate.mean - baseline.mean
    error = math.sqrt(baseline.variance + candidate.variance)
    if error <= 1e-12 * max(abs(baseline.mean), abs(candidate.mean)):
        # Samples without any spread: any difference is exact.
        return MeanTest(delta, 0.0, 1.0, 0.0 if delta else 1.0)
    below = baseline.variance**2 / baseline.degrees + candidate.variance**2 / candidate.degrees
    degrees = max(error**4 / below, 1.0)
    return MeanTest(delta, error, degrees, 2 * (1 - student_cdf(abs(delta) / error, degrees)))


def effective_size(sample: Float64) -> float:
    """Number of independent values with the same information: n (1 - r)/(1 + r), at least 2.

    r is the lag-1 correlation, where it is positive and above what chance explains (2/sqrt n).
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
