"""Every operator call of one rank whose FLOPs can be counted, each product once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfscope.analyzers.collectives.communication import dtype_of
from perfscope.analyzers.flops.operators import FORMULAS, flops_of
from perfscope.analyzers.flops.recomputation import recomputed
from perfscope.analyzers.nesting import Nested
from perfscope.custom_flops import CustomFlops
from perfscope.trace import NONE, Bool, Float64, Int64, Trace


@dataclass(frozen=True, eq=False)
class FlopCalls:
    """Calls in the order of ``Nested``; none lies inside another. Parallel arrays.

    ``place`` is the call's place in the operators. ``hardware`` is what was computed, ``recomputed`` says that it had
    been computed before. ``dtype`` indexes ``dtypes``: torch's name of the type of the factors as recorded, None where
    it is not. ``uncounted`` are the places of matrix operators without usable shapes, none inside another.
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


def flop_calls(trace: Trace, operators: Nested, custom: CustomFlops | None = None) -> FlopCalls:
    """Count every matrix operator: the innermost that can be counted, unless the user's formula covers what is around.

    Innermost, because what is around may say something else: ``aten::linear`` has no FLOPs beside those of the
    ``aten::addmm`` inside, and a sharded tensor's ``aten::mm`` has the whole's shapes where the one inside it has the
    local part's.
    """
    own = custom.formulas() if custom else {}
    place = np.flatnonzero(trace.names_where(lambda name: name in FORMULAS or name in own)[operators.row])
    kinds, kind = _distinct(trace, operators.row[place])
    values = [_one_kind(trace, columns, custom) for columns in kinds]
    countable = np.array([value is not None for value in values], dtype=np.bool_)[kind]
    is_own = trace.names_where(own.__contains__)[operators.row[place]] if own else np.zeros(len(place), dtype=np.bool_)
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
        recomputed=recomputed(trace, operators, place),
        dtype=table[kind, 2].astype(np.int64),
        dtypes=tuple(dtypes),
        uncounted=missed,
    )


def _distinct(trace: Trace, rows: Int64) -> tuple[list[tuple[int, int, int, int]], Int64]:
    """The distinct (name, shapes, types, inputs) of these rows, and which of them each row is."""
    columns = (trace.name, trace.shapes, trace.types, trace.inputs)
    size = len(trace.strings) + 1
    kind = np.zeros(len(rows), dtype=np.int64)
    first = np.empty(0, dtype=np.int64)
    for column in columns:
        _, first, kind = np.unique(kind * size + column[rows] + 1, return_index=True, return_inverse=True)
    chosen = rows[first]
    return list(zip(*(column[chosen].tolist() for column in columns), strict=True)), kind


def _one_kind(
    trace: Trace, columns: tuple[int, int, int, int], custom: CustomFlops | None
) -> tuple[float, float, str] | None:
    name, *others = columns
    shapes, types, inputs = (trace.strings[index] if index != NONE else "" for index in others)
    found = flops_of(trace.strings[name], shapes, types, inputs, custom)
    return None if found is None else (found[0].model, found[0].hardware, found[1])


def _one_level(operators: Nested, place: Int64, countable: Bool, is_own: Bool) -> Bool:
    """Which of the calls count, so that none lies inside another: the user's, then the innermost."""
    free: Bool = countable & ~_inside(operators, place, is_own) if is_own.any() else countable
    chosen: Bool = free.copy()
    # A call comes before those inside it: it holds one exactly if it holds the next one.
    at = np.flatnonzero(free)
    if len(at) > 1:
        holds = operators.start[place[at[1:]]] < operators.end[place[at[:-1]]]
        chosen[at[:-1][holds & ~is_own[at[:-1]]]] = False
    return chosen


def _inside(operators: Nested, place: Int64, around: Bool) -> Bool:
    """For each call: does it lie inside one of those marked, itself not meant?"""
    ends = np.where(around, operators.end[place], np.iinfo(np.int64).min)
    before = np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(ends)[:-1])) if len(ends) else ends
    return np.asarray(operators.start[place] < before)


def _contains(operators: Nested, place: Int64, marked: Bool) -> Bool:
    """For each call: does one of those marked lie inside it, itself not meant?"""
    starts = operators.start[place[marked]]
    first = np.searchsorted(starts, operators.start[place], side="left")
    until = np.searchsorted(starts, operators.end[place], side="left")
    return np.asarray(until - first > marked)
