"""Sums per name and step, as the tables of a rank need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from perfscope.trace.trace import Bool, Float64, Int32, Int64

KEPT: Final = 200
"""Most names of one table, the heaviest; the rest is added up under one name."""

_DENSE: Final = 1 << 16
"""Keys up to this, or up to twice the number of events, are counted in one array that has a place for each."""

_BLOCK: Final = 1 << 14
"""Events that are added up at once: what that needs besides them stays small."""


def sums(
    line: Int64,
    step: Int64,
    lines: int,
    steps: int,
    weights: Int64 | None = None,
    chosen: Bool | None = None,
) -> Int64:
    """``[lines, steps]``: sums of the events' weights (their number, without weights), of all or of those ``chosen``.

    Exact below 2^53.
    """
    total = np.zeros(lines * steps, dtype=np.int64)
    for at in range(0, len(line), _BLOCK):
        part: Any = slice(at, at + _BLOCK)
        if chosen is not None:
            part = at + np.flatnonzero(chosen[part])
        own = weights[part] if weights is not None else None
        total += np.bincount(line[part] * steps + step[part], weights=own, minlength=len(total)).astype(np.int64)
    return total.reshape(lines, steps)


def amounts(line: Int64, step: Int64, lines: int, steps: int, weights: Float64) -> Float64:
    """``sums`` of fractional weights."""
    total: Float64 = np.bincount(line * steps + step, weights=weights, minlength=lines * steps).astype(np.float64)
    return total.reshape(lines, steps)


def lines_of(
    keys: Int64 | Int32, weights: Int64 | Float64, name_of: Callable[[int], str], others: str
) -> tuple[list[str], Int64]:
    """(names of the lines, line of each event): one line for each of the ``KEPT`` heaviest keys, one for all others."""
    distinct, line = _unique(keys)
    total = np.bincount(line, weights=weights, minlength=len(distinct))
    order = np.argsort(-total, kind="stable")
    place = np.empty(len(distinct), dtype=np.int64)
    place[order] = np.minimum(np.arange(len(distinct)), KEPT)
    names = [name_of(key) for key in distinct[order[:KEPT]].tolist()]
    return names + [others] * (len(distinct) > KEPT), place[line]


def _unique(keys: Int64 | Int32) -> tuple[Any, Int64]:
    """``numpy.unique`` with its inverse; without sorting where the keys are small."""
    if len(keys) == 0 or keys.min() < 0 or keys.max() > max(_DENSE, 2 * len(keys)):
        return np.unique(keys, return_inverse=True)
    used = np.zeros(int(keys.max()) + 1, dtype=np.bool_)
    used[keys] = True
    distinct = np.flatnonzero(used)
    place = np.cumsum(used, dtype=np.int32) - np.int32(1)
    return distinct, place[keys]


def heaviest(line: Int64, value: Int64, weights: Float64 | Int64, lines: int) -> Int64:
    """For each line, the value (-1 or more) whose events weigh most; -1 for lines without events."""
    values = int(value.max()) + 2 if len(value) else 1
    pairs, pair = _unique(line * values + value + 1)
    total = np.bincount(pair, weights=weights, minlength=len(pairs))
    best = np.full(lines, -1, dtype=np.int64)
    # Ascending by weight: the last one written remains. Among equals that is the smallest value.
    order = np.lexsort((-pairs, total))
    best[pairs[order] // values] = pairs[order] % values - 1
    return best
