"""Sorted rows cut into blocks of equal keys: the vectorised form of a loop over groups, steps and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfscope.trace import Int64


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
