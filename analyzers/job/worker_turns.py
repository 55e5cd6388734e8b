"""How many loader workers deliver batches in turn, as the batches tell that the training waited for.

Workers that are always busy deliver each of their batches as long after their last one as it takes to load. So where W
of them take turns, a batch and the W-th after it are as even apart as batches take to load, whatever was apart when the
workers began, and whatever comes in between::

    worker 0   |-------- 0 --------|-------- 2 --------|-------- 4 --------|
    worker 1            |-------- 1 --------|-------- 3 --------|
    delivered                      0        1          2        3          4

Of a lone worker the times for W batches in a row vary W times as much as those for one. Workers that happen to be
evenly apart look like a lone one, and nothing in their batches tells them from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfscope.trace.trace import Int64

_MOST: Final = 8
"""Workers that are looked for: more need more batches than are mostly recorded."""
_FEWEST: Final = 3
"""Times between a batch and the W-th after it, at least; and no fewer than W."""
_EVENER: Final = 0.02
"""How many times as even as of a lone worker, for each degree of freedom but the first: of a lone worker's batches that
comes by chance in 2 % of cases."""
_SURELY: Final = 0.25
"""Evenness that is enough however many there are."""
_ALIKE: Final = 8.0
"""W is the least number for which no other one is so many times as even: of two workers four batches are even, too."""


def workers_in_turn(delivered_ns: Sequence[Int64]) -> int | None:
    """The number of each rank's workers; ``delivered_ns`` is when batches came, of each rank those in a row for which
    it waited. None where they do not come in turns, or are too few to tell.
    """
    evenness = {workers: found for workers in range(2, _MOST + 1) if (found := _evenness(delivered_ns, workers))}
    shown = [
        (workers, ratio) for workers, (ratio, degrees) in evenness.items()
        if ratio <= min(_EVENER * (degrees - 1), _SURELY)
    ]  # fmt: skip
    most_even = min((ratio for _, ratio in shown), default=0.0)
    return next((workers for workers, ratio in shown if ratio <= _ALIKE * most_even), None)


def _evenness(delivered_ns: Sequence[Int64], workers: int) -> tuple[float, int] | None:
    """(variance of the times between a batch and the one so many after it, over what it is expected to be of a lone
    worker; its degrees of freedom); None where there are too few, or batches are all alike.
    """
    enough = [times for times in delivered_ns if len(times) - workers >= max(_FEWEST, workers)]
    between, _ = _pooled([np.diff(times) for times in enough])
    of_turns, of_turns_degrees = _pooled([times[workers:] - times[:-workers] for times in enough])
    if not between:
        return None
    of_lone = sum((len(times) - workers - 1) * _of_lone(len(times) - workers, workers) for times in enough)
    return of_turns / between / (of_lone / of_turns_degrees), of_turns_degrees


def _of_lone(sums: int, workers: int) -> float:
    """Expected variance of so many sums of ``workers`` times in a row around their mean, over that of one time: they
    have some of these in common.
    """
    apart = np.abs(np.subtract.outer(np.arange(sums), np.arange(sums)))
    shared = np.maximum(workers - apart, 0).sum() / sums
    return float((sums * workers - shared) / (sums - 1))


def _pooled(samples: Sequence[Int64]) -> tuple[float, int]:
    """(variance around each sample's own mean, degrees of freedom)."""
    degrees = sum(len(each) - 1 for each in samples)
    return sum(float(each.var()) * len(each) for each in samples) / max(degrees, 1), degrees
