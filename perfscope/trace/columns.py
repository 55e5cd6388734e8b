"""A trace's columns while a reader fills them: their types, arrays that grow in place, and the order of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import numpy as np

from perfscope.trace.trace import Bool, Int64

_K = TypeVar("_K")

TYPES: Final = {
    "category": np.int8, "name": np.int32, "start_ns": np.int64, "duration_ns": np.int64, "thread": np.int32,
    "device": np.int32, "stream": np.int64, "correlation": np.int64, "external_id": np.int64, "shapes": np.int32,
    "types": np.int32, "inputs": np.int32,
}  # fmt: skip
"""Every column of the events, by name."""
LONGEST_NS: Final = 30 * 86_400 * 10**9
"""No recorded event takes longer, nor is one further from the middle of its trace: sums of a trace's times stay below
2^53 ns, where they are exact as float64.
"""
_IDS: Final = ("correlation", "external_id")
"""Columns that have 64 bits for the few writers whose ids need them."""
_NARROW: Final = np.iinfo(np.int32)


class InOrder(dict[_K, int]):
    """Numbers its keys in the order of first use."""

    def __missing__(self, key: _K) -> int:
        number = self[key] = len(self)
        return number


class GrowingColumns:
    """Every column of ``TYPES``; grows by batches.

    A trace of millions of events comes in thousands of batches. Kept apart, they would be in memory twice when they are
    joined, and leave holes as small as they are. A large bytearray grows where it is: the system moves its pages.
    """

    def __init__(self) -> None:
        self._data = {name: bytearray() for name in TYPES}
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def append(self, batch: Sequence[Any]) -> None:
        """Append rows: an array for each of ``TYPES``, in that order."""
        for (name, kind), column in zip(TYPES.items(), batch, strict=True):
            self._data[name] += np.ascontiguousarray(column, kind).data
        self._rows += len(batch[0])

    def finish(self) -> dict[str, Any]:
        """Every column as one array; nothing can be appended any more."""
        return {name: narrowed(name, np.frombuffer(self._data.pop(name), kind)) for name, kind in TYPES.items()}


def narrowed(name: str, column: Any) -> Any:
    """A column, in 32 bits where it holds ids that fit."""
    if name not in _IDS or (len(column) and (column.min() < _NARROW.min or column.max() > _NARROW.max)):
        return column
    return column.astype(np.int32)


def put_in_order(columns: dict[str, Any], rows: Int64) -> None:
    """Replace every column by its values at ``rows``."""
    for name in columns:  # one after the other: a large trace is never there twice
        columns[name] = columns[name][rows]


def near_in_time(start_ns: Int64, duration_ns: Int64) -> Bool:
    """Which events can be of one trace: a time far from nearly all others is damage."""
    short: Bool = duration_ns <= LONGEST_NS
    # Differences of times that cannot be would not fit into 64 bits.
    if not len(start_ns) or int(start_ns.max()) - int(start_ns.min()) <= LONGEST_NS:
        return short
    half = (len(start_ns) - 1) // 2
    middle = int(np.partition(start_ns, half)[half])  # one of them, so that not all are far from it
    return short & (start_ns >= middle - LONGEST_NS) & (start_ns <= middle + LONGEST_NS)


def by_start_longer_first(start_ns: Int64, duration_ns: Int64) -> Int64:
    """The order of events. Few events share a start, so only those are sorted by duration too."""
    order: Int64 = np.argsort(start_ns, kind="stable")
    ordered = start_ns[order]
    equal = ordered[1:] == ordered[:-1]
    del ordered
    shared = np.flatnonzero(np.append(equal, False) | np.append(False, equal))
    tied = order[shared]
    order[shared] = tied[np.lexsort((-duration_ns[tied], start_ns[tied]))]
    return order
