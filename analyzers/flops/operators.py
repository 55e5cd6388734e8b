"""FLOPs of operators from their recorded shapes.

A product of an [m, k] by a [k, n] matrix is 2·m·k·n FLOPs (a multiplication and an addition for each term), as in
torch.utils.flop_counter. Operators that lead to others (``aten::linear`` to ``aten::addmm``) have formulas too: who
counts calls takes the innermost that can be counted.
"""

from __future__ import annotations

import json
import math
from math import prod
from typing import Final

from perfscope.analyzers.flops import attention, layers
from perfscope.analyzers.flops.values import Flops, Formula, Inputs, Shapes, same
from perfscope.custom_flops import CustomFlops, CustomFormula


def _mm(shapes: Shapes, _inputs: Inputs) -> Flops:
    (m, k), (k_too, n) = shapes[0], shapes[1]
    _fit(k, k_too)
    return same(2.0 * m * k * n)


def _addmm(shapes: Shapes, inputs: Inputs) -> Flops:
    return _mm(shapes[1:], inputs)


def _bmm(shapes: Shapes, _inputs: Inputs) -> Flops:
    (b, m, k), (_, k_too, n) = shapes[0], shapes[1]
    _fit(k, k_too)
    return same(2.0 * b * m * k * n)


def _baddbmm(shapes: Shapes, inputs: Inputs) -> Flops:
    return _bmm(shapes[1:], inputs)


def _mv(shapes: Shapes, _inputs: Inputs) -> Flops:
    (m, k), _ = shapes[0], shapes[1]
    return same(2.0 * m * k)


def _addmv(shapes: Shapes, inputs: Inputs) -> Flops:
    return _mv(shapes[1:], inputs)


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
    """Products of several sizes in one: offsets split one of the dimensions, whose parts add up to the whole.

    [groups, m, k] by [groups, k, n] is a plain batch; [all m, k] by [groups, k, n] and [groups, m, k] by [k, all n]
    multiply every row (column) with its own group's matrix; [m, all k] by [all k, n] adds up within groups.
    """
    left, right = shapes[0], shapes[1]
    if len(left) == 3 and len(right) == 3:
        return _bmm(shapes, inputs)
    _fit(left[-1], right[-2])
    return same(2.0 * left[-2] * left[-1] * right[-1])


def _fit(first: int, second: int) -> None:
    if first != second:
        raise ValueError(f"inner dimensions {first} and {second} differ")


FORMULAS: Final[dict[str, tuple[Formula, int]]] = {
    "aten::mm": (_mm, 0),
    "aten::addmm": (_addmm, 1),
    "aten::addmm_": (_addmm, 1),
    "aten::_addmm_activation": (_addmm, 1),
    "aten::bmm": (_bmm, 0),
    "aten::baddbmm": (_baddbmm, 1),
    "aten::baddbmm_": (_baddbmm, 1),
    "aten::mv": (_mv, 0),
    "aten::addmv": (_addmv, 1),
    "aten::addmv_": (_addmv, 1),
    "aten::linear": (_linear, 0),
    "aten::matmul": (_matmul, 0),
    "aten::_int_mm": (_mm, 0),
    "aten::_scaled_mm": (_mm, 0),
    "aten::_scaled_mm_v2": (_mm, 0),
    "aten::_grouped_mm": (_grouped_mm, 0),
    "aten::_scaled_grouped_mm": (_grouped_mm, 0),
    "aten::_scaled_grouped_mm_v2": (_grouped_mm, 0),
    **layers.FORMULAS,
    **attention.FORMULAS,
}
"""Operator -> its formula and the input whose type the products run in."""


_UNUSABLE: Final = (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError)
"""What formulas raise on shapes that do not fit them, or that nobody's tensors have."""


def flops_of(
    name: str, shapes: str, types: str, inputs: str, custom: CustomFlops | None = None
) -> tuple[Flops, str] | None:
    """FLOPs of one call and the recorded type of its factors.

    ``shapes``, ``types`` and ``inputs`` are the JSON texts of the operator's input dimensions, types and concrete
    inputs. None for operators that are not matrix products and for shapes that do not fit the formula (nested or
    missing), which lowers the coverage. A formula of the user's goes before the one here; what it raises is raised.
    """
    if not shapes:
        return None
    own = custom.get(name) if custom else None
    if own is not None:
        return _by_own(own, shapes, types, inputs)
    entry = FORMULAS.get(name)
    if entry is None:
        return None
    formula, typed = entry
    try:
        flops = formula(json.loads(shapes), json.loads(inputs) if inputs else [])
        recorded = str(json.loads(types)[typed]) if types else ""
    except _UNUSABLE:
        return None
    return (flops, recorded) if 0 <= flops.model <= flops.hardware < math.inf else None


def _by_own(own: CustomFormula, shapes: str, types: str, inputs: str) -> tuple[Flops, str] | None:
    try:
        recorded = [json.loads(text) if text else [] for text in (shapes, types, inputs)]
    except _UNUSABLE:
        return None
    counted = own(*recorded)
    if counted is None:
        return None
    dtype = str(recorded[1][own.typed]) if own.typed < len(recorded[1]) else ""
    return same(counted), dtype
