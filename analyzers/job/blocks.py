"""Parallel arrays: rows chosen, and sorted rows cut into blocks of equal keys.

Blocks are the vectorised form of a loop over groups, steps and ranks.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfscope.frozen import dataclass
from perfscope.trace.trace import Bool, Int64

_Columns = TypeVar("_Columns")


def where(columns: _Columns, kept: Bool) -> _Columns:
    """A dataclass of parallel arrays with the rows for which ``kept`` holds; fields that are no arrays stay."""
    values = {field.name: getattr(columns, field.name) for field in fields(columns)}  # type: ignore[arg-type]
    chosen = {name: value[kept] for name, value in values.items() if isinstance(value, np.ndarray)}
    return replace(columns, **chosen)  # type: ignore[type-var]


def us(times_ns: NDArray[Any]) -> tuple[float, ...]:
    """Nanoseconds as a row of a summary has them: µs."""
    return tuple((times_ns / 1e3).tolist())


@dataclass(frozen=True, eq=False)
class Blocks:
    """Rows in the order of their keys, equal keys in the order in which they came.

    ``order`` holds the rows, ``label`` the block of each, by its place in ``order``; ``first`` is the place in
    ``order`` at which each block begins, ``size`` its length.
    """

    order: Int64
    label: Int64
    first: Int64
    size: Int64

    @classmethod
    def of(cls, *keys: NDArray[Any]) -> Blocks:
        """By these keys, the most significant first."""
        order = np.lexsort(keys[::-1])
        if len(order) == 0:
            nothing = np.empty(0, dtype=np.int64)
            return cls(nothing, nothing, nothing, nothing)
        begins = np.zeros(len(order), dtype=np.bool_)
        begins[0] = True
        for key in keys:
            ordered = key[order]
            begins[1:] |= ordered[1:] != ordered[:-1]
        first = np.flatnonzero(begins)
        return cls(order, np.cumsum(begins) - 1, first, np.diff(np.append(first, len(order))))

    def __len__(self) -> int:
        return len(self.first)

    def rows(self, label: int) -> Int64:
        """The rows of one block."""
        return self.order[self.first[label] : self.first[label] + self.size[label]]

    @property
    def position(self) -> Int64:
        """Place of each row within its block, by its place in ``order``."""
        return np.arange(len(self.order)) - self.first[self.label]

    def labels(self) -> Int64:
        """The block of each row, in the order in which the rows came."""
        result = np.empty(len(self.order), dtype=np.int64)
        result[self.order] = self.label
        return result

    def positions(self) -> Int64:
        """Place of each row within its block, in the order in which the rows came."""
        result = np.empty(len(self.order), dtype=np.int64)
        result[self.order] = self.position
        return result
