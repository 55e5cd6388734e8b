"""The distinct values of an array."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_Type = TypeVar("_Type", bound=np.generic)


def distinct(values: NDArray[_Type]) -> NDArray[_Type]:
    """The distinct values, ascending: ``numpy.unique``, which imports ``numpy.ma`` for that in every worker.

    A stable sort merges values that are ascending in parts, as edges of several sets of intervals are.
    """
    ordered: NDArray[Any] = np.sort(values, axis=None, kind="stable")
    if len(ordered) == 0:
        return ordered
    first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    found: NDArray[_Type] = ordered[first]
    return found
