"""Medians and robust lines of many labelled samples at once: one odd sample among many moves neither."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.frozen import dataclass
from perfscope.trace.trace import Bool, Float32, Float64, Int64

_BINS: Final = 16
"""A trend is estimated from the medians of this many stretches: 120 pairs, however many samples there are."""

_FEWEST: Final = 16
"""Fewer samples do not distinguish a trend from chance."""

SIGMA_OF_MAD: Final = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

_SIGMAS_OF_A_THIRD: Final = 0.8615
"""Standard deviations about its middle that hold a third of a normal distribution."""

_FEWEST_DENSE: Final = 4
"""Of fewer values two that are close by chance would look like many."""

_SURE: Final = 5.0
"""Standard errors by which a slope must differ from 0."""

_LEAST_SWING_NS: Final = 1_000
"""Recordings with times in µs show no smaller trend."""

_INT64_MAX: Final = int(np.iinfo(np.int64).max)

_STEEPEST: Final = 1e-3
"""Oscillators err by up to 1e-4, and a clock that is being set moves by at most 5e-4 (adjtimex); more is no clock."""


def deviation(values: Int64 | Float64) -> float:
    """Standard deviation of one sample by its median absolute deviation, in its unit: odd values do not move it."""
    return SIGMA_OF_MAD * float(np.median(np.abs(values - np.median(values))))


def densest(values: Int64 | Float32) -> tuple[float, float]:
    """Middle of the shortest interval with a third of the values, and the standard deviation that it stands for: most
    values may lie elsewhere.
    """
    count = min(max(len(values) // 3, _FEWEST_DENSE), len(values))
    ordered = np.sort(values).astype(np.float64)
    first = int(np.argmin(ordered[count - 1 :] - ordered[: len(ordered) - count + 1]))
    low, high = float(ordered[first]), float(ordered[first + count - 1])
    return (low + high) / 2, (high - low) / _SIGMAS_OF_A_THIRD


def median_of_others(values: Float64, *, few: int) -> Float64:
    """For each row the median of the other rows; of more than ``few`` rows that of all, which is the same."""
    if len(values) > few:
        median: Float64 = np.nanmedian(values, axis=0, keepdims=True)
        return np.broadcast_to(median, values.shape)
    return np.stack([np.median(np.delete(values, row, axis=0), axis=0) for row in range(len(values))])


@dataclass(frozen=True, eq=False)
class Lines:
    """A straight line for each label: ``offset + slope · x``."""

    offset: Int64
    slope: Float64

    @classmethod
    def flat(cls, size: int) -> Lines:
        """Zero everywhere."""
        return cls(np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.float64))

    def at(self, label: Int64, x: Int64) -> Int64:
        """Values of the labels' lines at ``x``."""
        return self.offset[label] + np.rint(self.slope[label] * x).astype(np.int64)

    def plus(self, other: Lines) -> Lines:
        """The sum of both, label by label."""
        return Lines(self.offset + other.offset, self.slope + other.slope)


def median_by(label: Int64, value: Int64, size: int) -> Int64:
    """Median of ``value`` for each label 0..size-1 (the mean of the middle two, rounded down); 0 for absent labels."""
    result = np.zeros(size, dtype=np.int64)
    if len(label) == 0:
        return result
    count = np.bincount(label, minlength=size)
    ordered = _sorted_within(label, value)
    present = np.flatnonzero(count)
    first = (np.cumsum(count) - count)[present]
    count = count[present]
    low = ordered[first + (count - 1) // 2]
    high = ordered[first + count // 2]
    result[present] = low + (high - low) // 2
    return result


def _sorted_within(label: Int64, value: Int64) -> Int64:
    """The values in the order of (label, value)."""
    least, span = int(value.min()), int(np.ptp(value)) + 1
    if _fit_in_one(label, span):
        return np.sort(label * span + (value - least)) % span + least
    return value[np.lexsort((value, label))]


def _order_within(label: Int64, value: Int64) -> Int64:
    """The order of (label, value)."""
    least, span = int(value.min()), int(np.ptp(value)) + 1
    return np.argsort(label * span + (value - least)) if _fit_in_one(label, span) else np.lexsort((value, label))


def _fit_in_one(label: Int64, span: int) -> bool:
    """Do label and value make one number? Sorting numbers takes a fraction of the time of sorting pairs."""
    return (int(label.max()) + 1) * span < _INT64_MAX


def middle_of(label: Int64, value: Int64, size: int) -> Int64:
    """Half-way between the least and the greatest ``value`` of each label; 0 for absent labels."""
    low, high = _extent(label, value, size)
    return np.where(high >= low, low + (high - low) // 2, 0)


def weighted_median(value: Float64, weight: Float64) -> Float64:
    """Along the last axis, the value at which half of the weight is reached; NaN where there is none."""
    order = np.argsort(value, axis=-1)
    reached = np.cumsum(np.take_along_axis(weight, order, axis=-1), axis=-1)
    total = reached[..., -1:]
    place = np.argmax(reached >= total / 2, axis=-1)[..., None]
    found = np.take_along_axis(np.take_along_axis(value, order, axis=-1), place, axis=-1)
    return np.where(total > 0, found, np.nan)[..., 0]


def fit_lines(label: Int64, x: Int64, y: Int64, size: int) -> Lines:
    """For each label the median of ``y``; where a trend stands out from the scatter about it, a line.

    The slope is the median of the slopes between the stretches' medians, weighted by their distance (Theil-Sen, after
    Sievers 1978). It stands out where what it adds up to is more than twice the scatter that is left, and more than
    chance would bring about.
    """
    slope = _slopes(label, x, y, size)
    rest = y - np.rint(slope[label] * x).astype(np.int64)
    offset = median_by(label, rest, size)
    scatter = median_by(label, np.abs(rest - offset[label]), size)
    low, high = _extent(label, x, size)
    count = np.bincount(label, minlength=size)
    swing = np.abs(slope) * np.maximum(high - low, 0)
    chance = _SURE * SIGMA_OF_MAD * scatter * np.sqrt(12 / np.maximum(count, 1))
    stands_out = (swing > np.maximum(2 * scatter, chance)) & (swing >= _LEAST_SWING_NS)
    # Noise without a line through it.
    plain = median_by(label, y, size)
    return Lines(np.where(stands_out, offset, plain), np.where(stands_out, slope, 0.0))


def _slopes(label: Int64, x: Int64, y: Int64, size: int) -> Float64:
    """Slope of each label by the medians of its stretches; 0 where there are too few samples or it is no clock's."""
    slope = np.zeros(size, dtype=np.float64)
    count = np.bincount(label, minlength=size)
    enough = count >= _FEWEST
    if not enough.any():
        return slope
    order = _order_within(label, x)
    order = order[enough[label[order]]]
    first = np.cumsum(np.where(enough, count, 0)) - np.where(enough, count, 0)
    place = np.arange(len(order)) - first[label[order]]
    stretch = label[order] * _BINS + place * _BINS // count[label[order]]
    there = np.bincount(stretch, minlength=size * _BINS).reshape(size, _BINS)[enough] > 0
    across = median_by(stretch, x[order], size * _BINS).reshape(size, _BINS)[enough].astype(np.float64)
    up = median_by(stretch, y[order], size * _BINS).reshape(size, _BINS)[enough].astype(np.float64)
    slope[enough] = np.nan_to_num(_pairwise(there, across, up))
    return np.where(np.abs(slope) <= _STEEPEST, slope, 0.0)


def _pairwise(there: Bool, across: Float64, up: Float64) -> Float64:
    left, right = np.triu_indices(_BINS, 1)
    apart = across[:, right] - across[:, left]
    usable = there[:, left] & there[:, right] & (apart > 0)
    slopes = (up[:, right] - up[:, left]) / np.where(usable, apart, 1.0)
    return weighted_median(np.where(usable, slopes, np.inf), np.where(usable, apart, 0.0))


def _extent(label: Int64, value: Int64, size: int) -> tuple[Int64, Int64]:
    """Least and greatest value of each label; the greatest is below the least for absent labels."""
    low = np.full(size, np.iinfo(np.int64).max, dtype=np.int64)
    high = np.full(size, np.iinfo(np.int64).min, dtype=np.int64)
    np.minimum.at(low, label, value)
    np.maximum.at(high, label, value)
    return low, high
