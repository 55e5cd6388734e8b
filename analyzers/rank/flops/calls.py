"""Every operator call of one rank whose FLOPs can be counted, each product once.

Operators that call others (``aten::linear`` calls ``aten::addmm``) have formulas too: the innermost call with usable
shapes counts.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives.communication import dtype_of
from perfscope.analyzers.rank.flops import attention, layers, products
from perfscope.analyzers.rank.flops.convolutions import KnownConvolutions, is_convolution
from perfscope.analyzers.rank.flops.products import Flops, Formula, same
from perfscope.analyzers.rank.flops.recomputation import Stretches
from perfscope.analyzers.rank.nesting import Nested
from perfscope.frozen import dataclass
from perfscope.trace.custom_flops import CustomFlops, CustomFormula
from perfscope.trace.trace import NONE, Bool, Float64, Int64, Trace

FORMULAS: Final[dict[str, tuple[Formula, int]]] = {**products.FORMULAS, **layers.FORMULAS, **attention.FORMULAS}
"""Operator -> its formula and the input whose type the products run in."""

_UNUSABLE: Final = (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError)
"""What formulas raise on shapes that do not fit them, or that no tensor has."""

_KINDS: Final = 1 << 12
"""Kinds of calls whose FLOPs are kept: the next rank that the process reads has most of them, too."""


@dataclass(frozen=True, eq=False)
class FlopCalls:
    """Calls in the order of ``Nested``; none lies inside another. Parallel arrays.

    ``place`` is the call's index in the operators. ``hardware`` are the FLOPs computed, ``recomputed`` is whether they
    had been computed before. ``dtype`` indexes ``dtypes``: torch's name of the recorded type of the factors, None where
    not recorded. ``uncounted`` are the indices of matrix operators without usable shapes, none inside another.
    """

    place: Int64
    model: Float64
    hardware: Float64
    recomputed: Bool
    dtype: Int64
    dtypes: tuple[str | None, ...]
    uncounted: Int64

    def __len__(self) -> int:
        return len(self.place)


def flop_calls(trace: Trace, operators: Nested, recomputing: Stretches, custom: CustomFlops | None = None) -> FlopCalls:
    """Count every matrix operator: the innermost that can be counted, unless the user's formula covers an outer one.
    ``recomputing``: when forwards run again.

    Innermost, because an outer one may mislead: ``aten::linear`` has no FLOPs beyond those of the ``aten::addmm`` in
    it, and a sharded tensor's ``aten::mm`` has the shapes of the whole tensor, the one inside it those of its shard.
    """
    own = custom.formulas() if custom else {}
    place = np.flatnonzero(
        trace.names_where(lambda name: name in FORMULAS or name in own or is_convolution(name), operators.row)
    )
    kinds, kind = _distinct(trace, operators.row[place])
    convolutions = KnownConvolutions(trace)
    values = [_one_kind(trace, columns, custom, convolutions) for columns in kinds]
    countable = np.array([value is not None for value in values], dtype=np.bool_)[kind]
    is_own = trace.names_where(own.__contains__, operators.row[place]) if own else np.zeros(len(place), dtype=np.bool_)
    counted = _one_level(operators, place, countable, is_own & countable)
    inside = _contains(operators, place, counted)
    uncounted = ~countable & ~inside & ~_inside(operators, place, counted)
    uncounted &= ~_inside(operators, place, uncounted)
    missed, place, kind = place[uncounted], place[counted], kind[counted]
    dtypes: dict[str | None, int] = {}
    table = np.array(
        [(v[0], v[1], dtypes.setdefault(dtype_of(v[2]), len(dtypes))) if v else (0, 0, 0) for v in values],
        dtype=np.float64,
    ).reshape(-1, 3)
    return FlopCalls(
        place=place,
        model=table[kind, 0],
        hardware=table[kind, 1],
        recomputed=recomputing.covers(trace, operators.row[place]),
        dtype=table[kind, 2].astype(np.int64),
        dtypes=tuple(dtypes),
        uncounted=missed,
    )


def _distinct(trace: Trace, rows: Int64) -> tuple[list[tuple[int, int, int, int]], Int64]:
    """The distinct (name, shapes, types, inputs) of these rows, and the index of each row's."""
    columns = (trace.name, trace.shapes, trace.types, trace.inputs)
    size = len(trace.strings) + 1
    kind = np.zeros(len(rows), dtype=np.int64)
    first = np.empty(0, dtype=np.int64)
    for column in columns:
        _, first, kind = np.unique(kind * size + column[rows] + 1, return_index=True, return_inverse=True)
    chosen = rows[first]
    return list(zip(*(column[chosen].tolist() for column in columns), strict=True)), kind


def _one_kind(
    trace: Trace, columns: tuple[int, int, int, int], custom: CustomFlops | None, convolutions: KnownConvolutions
) -> tuple[float, float, str] | None:
    name, *others = columns
    shapes, types, inputs = (trace.strings[index] if index != NONE else "" for index in others)
    counted = flops_of(trace.strings[name], shapes, types, inputs, custom)
    if counted is None and shapes:
        counted = convolutions.flops(trace.strings[name], shapes, types)
    return None if counted is None else (counted[0].model, counted[0].hardware, counted[1])


def _one_level(operators: Nested, place: Int64, countable: Bool, is_own: Bool) -> Bool:
    """Which calls count, so that none is inside another: those with the user's formulas, then the innermost."""
    free: Bool = countable & ~_inside(operators, place, is_own) if is_own.any() else countable
    chosen: Bool = free.copy()
    # A call comes before those inside it: it contains one exactly if it contains the next one.
    at = np.flatnonzero(free)
    if len(at) > 1:
        holds = operators.start[place[at[1:]]] < operators.end[place[at[:-1]]]
        chosen[at[:-1][holds & ~is_own[at[:-1]]]] = False
    return chosen


def _inside(operators: Nested, place: Int64, around: Bool) -> Bool:
    """For each call: whether it is inside another call that is marked."""
    ends = np.where(around, operators.end[place], np.iinfo(np.int64).min)
    before = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(ends)[:-1])) if len(ends) else ends
    return np.asarray(operators.start[place] < before)


def _contains(operators: Nested, place: Int64, marked: Bool) -> Bool:
    """For each call: whether another call that is marked is inside it."""
    starts = operators.start[place[marked]]
    first = np.searchsorted(starts, operators.start[place], side="left")
    until = np.searchsorted(starts, operators.end[place], side="left")
    return np.asarray(until - first > marked)


def flops_of(
    name: str, shapes: str, types: str, inputs: str, custom: CustomFlops | None = None
) -> tuple[Flops, str] | None:
    """FLOPs of one call and the recorded type of its factors.

    ``shapes``, ``types`` and ``inputs`` are the JSON texts of the operator's input dimensions, types and concrete
    inputs. None for operators that are not matrix products, and for shapes that do not fit the formula (nested or
    missing), which lowers the coverage. A formula of the user takes precedence; what it raises is passed on.
    """
    if not shapes:
        return None
    own = custom.get(name) if custom else None
    return _by_formula(name, shapes, types, inputs) if own is None else _by_own(own, shapes, types, inputs)


@functools.lru_cache(maxsize=_KINDS)
def _by_formula(name: str, shapes: str, types: str, inputs: str) -> tuple[Flops, str] | None:
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
