"""FLOPs of matrix products by their recorded shapes, and what all FLOP formulas take and return.

A product of an [m, k] by a [k, n] matrix is 2·m·k·n FLOPs (a multiplication and an addition for each term), as in
torch.utils.flop_counter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from typing import Any, Final

from perfscope.frozen import dataclass

Shapes = list[Any]
"""An operator's input dimensions, one entry per input: ``[2, 3]`` for a tensor, ``[]`` for a scalar or none, and a list
of dimensions for a list of tensors."""

Inputs = list[Any]
"""An operator's concrete inputs as texts, one entry per input, empty for tensors: ``"[1, 1]"``, ``"False"``."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of one call. ``hardware`` counts recomputation inside the operator, ``model`` does not."""

    model: float
    hardware: float


Formula = Callable[[Shapes, Inputs], Flops]
"""FLOPs of one call. Raises ValueError, TypeError, IndexError or KeyError where the shapes do not fit."""


def same(flops: float) -> Flops:
    """FLOPs of an operator that recomputes nothing."""
    return Flops(flops, flops)


def parsed(value: object) -> Any:
    """A concrete input's value: ``"[1, 1]"`` is a list, ``"False"`` a bool. Raises ValueError for other texts."""
    return json.loads(value.lower()) if isinstance(value, str) else value


def listed(value: object) -> list[int]:
    """A concrete input that is a list of integers. Raises TypeError where it is not."""
    items = parsed(value)
    if not isinstance(items, list):
        raise TypeError(f"not a list: {value!r}")
    return [int(item) for item in items]


def _mm(shapes: Shapes, _inputs: Inputs) -> Flops:
    (m, k), (k_too, n) = shapes[0], shapes[1]
    _fit(k, k_too)
    return same(2.0 * m * k * n)


def _bmm(shapes: Shapes, _inputs: Inputs) -> Flops:
    (b, m, k), (_, k_too, n) = shapes[0], shapes[1]
    _fit(k, k_too)
    return same(2.0 * b * m * k * n)


def _mv(shapes: Shapes, _inputs: Inputs) -> Flops:
    (m, k), _ = shapes[0], shapes[1]
    return same(2.0 * m * k)


def _added(product: Formula) -> Formula:
    """A product that is added to input 0: its factors follow that."""
    return lambda shapes, inputs: product(shapes[1:], inputs)


def _linear(shapes: Shapes, _inputs: Inputs) -> Flops:
    data, weight = shapes[0], shapes[1]
    _fit(data[-1], weight[-1])
    return same(2.0 * prod(data) * (weight[0] if len(weight) == 2 else 1))


def _matmul(shapes: Shapes, _inputs: Inputs) -> Flops:
    left, right = shapes[0], shapes[1]
    rows = left[-2] if len(left) > 1 else 1
    columns = right[-1] if len(right) > 1 else 1
    _fit(left[-1], right[-2] if len(right) > 1 else right[0])
    # Batches are broadcast against each other.
    first, second = left[:-2], right[:-2]
    wide = max(len(first), len(second))
    batch = prod(
        max(pair) for pair in zip([1] * (wide - len(first)) + first, [1] * (wide - len(second)) + second, strict=True)
    )
    return same(2.0 * batch * rows * left[-1] * columns)


def _grouped_mm(shapes: Shapes, inputs: Inputs) -> Flops:
    """Several products of different sizes in one call: offsets split one dimension, and the parts add up to it.

    [groups, m, k] by [groups, k, n] is a plain batch; [all m, k] by [groups, k, n] and [groups, m, k] by [k, all n]
    multiply every row (column) with the matrix of its group; [m, all k] by [all k, n] adds up within groups.
    """
    left, right = shapes[0], shapes[1]
    if len(left) == 3 and len(right) == 3:
        return _bmm(shapes, inputs)
    _fit(left[-1], right[-2])
    return same(2.0 * left[-2] * left[-1] * right[-1])


def _fit(first: int, second: int) -> None:
    if first != second:
        raise ValueError(f"inner dimensions {first} and {second} differ")


_NAMES: Final[tuple[tuple[str, Formula, int], ...]] = (
    ("mm _int_mm _scaled_mm _scaled_mm_v2", _mm, 0),
    ("addmm addmm_ _addmm_activation", _added(_mm), 1),
    ("bmm", _bmm, 0),
    ("baddbmm baddbmm_", _added(_bmm), 1),
    ("mv", _mv, 0),
    ("addmv addmv_", _added(_mv), 1),
    ("linear", _linear, 0),
    ("matmul", _matmul, 0),
    ("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2", _grouped_mm, 0),
)

FORMULAS: Final = {f"aten::{name}": (formula, typed) for names, formula, typed in _NAMES for name in names.split()}
"""Operator -> its formula and the input whose type the products run in."""
