"""What formulas of FLOPs take and give."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Shapes = list[Any]
"""An operator's input dimensions, one entry an input: ``[2, 3]`` for a tensor, ``[]`` for a scalar or none, and a list
of dimensions for a list of tensors."""

Inputs = list[Any]
"""An operator's concrete inputs as texts, one entry an input, empty for tensors: ``"[1, 1]"``, ``"False"``."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of one call. ``hardware`` counts recomputation inside the operator, ``model`` does not."""

    model: float
    hardware: float


Formula = Callable[[Shapes, Inputs], Flops]
"""FLOPs of one call. Raises ValueError, TypeError, IndexError or KeyError where the shapes do not fit."""


def same(flops: float) -> Flops:
    """FLOPs of an operator that computes nothing twice."""
    return Flops(flops, flops)


def parsed(value: object) -> Any:
    """A concrete input's value: ``"[1, 1]"`` is a list, ``"False"`` a bool. Raises ValueError for other texts."""
    return json.loads(value.lower()) if isinstance(value, str) else value


def listed(value: object) -> list[int]:
    """A concrete input that is a list of integers. Raises TypeError where it is not."""
    found = parsed(value)
    if not isinstance(found, list):
        raise TypeError(f"not a list: {value!r}")
    return [int(item) for item in found]
