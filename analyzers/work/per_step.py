"""Sums per name and step: small enough to travel from every rank, and any of the steps may be chosen later."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

import numpy as np

from perfscope.trace import Float64, Int64

KEPT: Final = 200
"""Names that a rank reports of one kind, the heaviest; the rest is added up under one name."""

_DENSE: Final = 1 << 22


def sums(line: Int64, step: Int64, lines: int, steps: int, weights: Int64 | None = None) -> Int64:
    """``[lines, steps]``: weights of events (their number, without) added up. Exact below 2^53."""
    total = np.bincount(line * steps + step, weights=weights, minlength=lines * steps)
    return total.astype(np.int64).reshape(lines, steps)


def amounts(line: Int64, step: Int64, lines: int, steps: int, weights: Float64) -> Float64:
    """``sums`` of amounts that are no whole numbers."""
    total: Float64 = np.bincount(line * steps + step, weights=weights, minlength=lines * steps).astype(np.float64)
    return total.reshape(lines, steps)


def distinct(keys: Int64, weights: Int64) -> tuple[Int64, Int64]:
    """(the keys kept, the heaviest first; the line of each event). Events of further keys share line ``len(kept)``."""
    found, line = _unique(keys)
    total = np.bincount(line, weights=weights, minlength=len(found))
    order = np.argsort(-total, kind="stable")
    place = np.empty(len(found), dtype=np.int64)
    place[order] = np.minimum(np.arange(len(found)), KEPT)
    return found[order[:KEPT]], place[line]


def _unique(keys: Int64) -> tuple[Int64, Int64]:
    """``numpy.unique`` with its inverse, for keys of 0 or more; without sorting where they are small numbers."""
    if len(keys) == 0 or int(keys.max()) > _DENSE:
        return np.unique(keys, return_inverse=True)
    found = np.flatnonzero(np.bincount(keys))
    place = np.zeros(int(keys.max()) + 1, dtype=np.int64)
    place[found] = np.arange(len(found))
    return found, place[keys]


def heaviest(line: Int64, value: Int64, weights: Float64 | Int64, lines: int) -> Int64:
    """For each line, the value (-1 or more) under which its events weigh most; -1 for lines without events."""
    values = int(value.max()) + 2 if len(value) else 1
    pairs, pair = np.unique(line * values + value + 1, return_inverse=True)
    total = np.bincount(pair, weights=weights, minlength=len(pairs))
    best = np.full(lines, -1, dtype=np.int64)
    # Ascending by weight: the last one written stays. Among equals that is the smallest value.
    order = np.lexsort((-pairs, total))
    best[pairs[order] // values] = pairs[order] % values - 1
    return best


def shared(names: Iterable[str]) -> tuple[str, ...]:
    """The same strings, each held once in this process: the ranks of a job report the same names."""
    return tuple(map(sys.intern, names))
