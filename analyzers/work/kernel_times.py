"""One rank's device work by name: how often, how long, for which operator, and with how many FLOPs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from perfscope.analyzers.attribution import Attribution
from perfscope.analyzers.flops.of_rank import product_type
from perfscope.analyzers.intervals import Intervals
from perfscope.analyzers.launches import DeviceWork
from perfscope.analyzers.steps import Steps
from perfscope.analyzers.work import kernel_classes as classes
from perfscope.analyzers.work.per_step import amounts, distinct, heaviest, shared, sums
from perfscope.trace import NONE, Bool, Category, Float64, Int64, Trace
from perfscope.vocabulary import OPTIMIZER

CATEGORIES: Final = ("compute", "communication", "copy", "memset")
OTHERS: Final = "(other kernels)"
"""Name under which a rank adds up what is not among its costliest."""

CLASSES: Final = (
    classes.MATRIX, classes.ATTENTION, classes.CONVOLUTION, classes.NORMALISATION, classes.ELEMENTWISE,
    classes.REDUCTION, classes.OPTIMIZER, classes.EMBEDDING, classes.COMMUNICATION, classes.COPY, classes.MEMSET,
    classes.OTHER,
)  # fmt: skip
_CODE: Final = {name: code for code, name in enumerate(CLASSES)}
_PRODUCTS: Final = np.array([name in classes.PRODUCTS for name in (*CLASSES, "")])
_OPTIMIZER_RANGE: Final = re.compile(rf"^Optimizer\.step#|^{re.escape(OPTIMIZER)}$")
_CALLED: Final = re.compile(r"^(?!autograd::)\w+::")
"""Operators whose class goes for what they call. Not autograd's nodes: checkpoints run whole forwards in them."""


@dataclass(frozen=True, eq=False)
class KernelTimes:
    """Device work of one rank. One line a name (and category), the costliest first; ``[lines, steps]`` for sums.

    ``operator`` is the innermost operator that launches it most, by time; ``operator_class`` and ``dtype`` (of
    ``RankFlops``) likewise. ``flops`` is what it computed of the calls that could be counted, and ``flops_ns`` its time
    in those, for the lines ``flops_line`` only: few kernels multiply.
    """

    names: tuple[str, ...]
    category: tuple[str, ...]
    operator: tuple[str | None, ...]
    operator_class: tuple[str, ...]
    dtype: tuple[str | None, ...]
    count: Int64
    total_ns: Int64
    shortest_ns: Int64
    longest_ns: Int64
    flops_line: Int64
    flops: Float64
    flops_ns: Int64

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, names=shared(state["names"]))


@dataclass(frozen=True, eq=False)
class ClassedWork:
    """Device work that begins in a step's window. Parallel arrays; ``index`` counts pieces of ``DeviceWork``.

    ``category`` indexes ``CATEGORIES``, ``kind`` indexes ``CLASSES``.
    """

    index: Int64
    step: Int64
    length_ns: Int64
    category: Int64
    kind: Int64


def classed_work(trace: Trace, work: DeviceWork, found: Attribution) -> ClassedWork:
    """What every piece of device work does."""
    index = np.flatnonzero(found.step >= 0)
    category = _category(trace, found, work.row[index], index)
    return ClassedWork(
        index=index,
        step=found.step[index],
        length_ns=work.end_ns[index] - work.start_ns[index],
        category=category,
        kind=_class_codes(trace, work, found, index, category),
    )


def kernel_times(trace: Trace, work: DeviceWork, steps: Steps, found: Attribution, done: ClassedWork) -> KernelTimes:
    """Add up the device work of each step by its name."""
    rows, line_step, length = work.row[done.index], done.step, done.length_ns
    kept, line = distinct(trace.name[rows] * np.int64(len(CATEGORIES)) + done.category, length)
    lines = len(kept) + int((line == len(kept)).any())
    names = [trace.strings[key // len(CATEGORIES)] for key in kept.tolist()] + [OTHERS] * (lines - len(kept))
    place = found.operator[done.index]
    operator = np.append(trace.name[found.operators.row], NONE).astype(np.int64)[place]
    counted = np.flatnonzero(found.flops[done.index] > 0)
    flops = found.flops[done.index[counted]]
    flops_line, position = np.unique(line[counted], return_inverse=True)
    cell, cells = line * len(steps) + line_step, (lines, len(steps))
    shortest, longest = _extremes(cell, length, lines * len(steps))
    return KernelTimes(
        names=tuple(names),
        category=tuple(CATEGORIES[code] for code in heaviest(line, done.category, length, lines)),
        operator=tuple(
            trace.strings[name] if name != NONE else None for name in heaviest(line, operator, length, lines)
        ),
        operator_class=tuple(CLASSES[code] for code in heaviest(line, done.kind, length, lines)),
        dtype=_types(found, names, line[counted], done.index[counted], lines),
        count=sums(line, line_step, *cells),
        total_ns=sums(line, line_step, *cells, length),
        shortest_ns=shortest.reshape(cells),
        longest_ns=longest.reshape(cells),
        flops_line=flops_line,
        flops=amounts(position, line_step[counted], len(flops_line), len(steps), flops),
        flops_ns=sums(position, line_step[counted], len(flops_line), len(steps), length[counted]),
    )


def _category(trace: Trace, found: Attribution, rows: Int64, chosen: Int64) -> Int64:
    kind = trace.category[rows]
    category = np.zeros(len(rows), dtype=np.int64)
    category[found.is_communication[chosen]] = CATEGORIES.index("communication")
    category[kind == Category.MEMCPY] = CATEGORIES.index("copy")
    category[kind == Category.MEMSET] = CATEGORIES.index("memset")
    return category


def _class_codes(trace: Trace, work: DeviceWork, found: Attribution, chosen: Int64, category: Int64) -> Int64:
    """Class of each piece of work: by its category, its operator, the optimizer's step, its name, in this order."""
    rows = work.row[chosen]
    by_name = np.full(len(trace.strings), NONE, dtype=np.int64)
    for name in np.unique(trace.name[rows]).tolist():
        by_name[name] = _CODE[classes.class_of_kernel(trace.strings[name])]
    code = by_name[trace.name[rows]]
    place = found.operator[chosen]
    of_operator, copies = _operator_codes(trace, found, place)
    optimizing = _in_optimizer(trace, work, chosen) & ~_PRODUCTS[of_operator] & ~_PRODUCTS[code]
    code = np.where(of_operator != NONE, of_operator, code)
    code[optimizing] = _CODE[classes.OPTIMIZER]
    code[copies] = _CODE[classes.COPY]
    for name, kind in ((classes.COMMUNICATION, 1), (classes.COPY, 2), (classes.MEMSET, 3)):
        code[category == kind] = _CODE[name]
    return code


def _operator_codes(trace: Trace, found: Attribution, place: Int64) -> tuple[Int64, Bool]:
    """(class by the operator or one that called it, NONE where none settles it; does the operator only copy?)."""
    operators = found.operators
    by_name = np.full(len(trace.strings) + 1, NONE, dtype=np.int64)
    called = np.zeros(len(trace.strings) + 1, dtype=np.bool_)
    copies = np.zeros(len(trace.strings) + 1, dtype=np.bool_)
    for name in np.unique(trace.name[operators.row]).tolist():
        text = trace.strings[name]
        kind = classes.class_of_operator(text)
        by_name[name] = _CODE[kind] if kind is not None else NONE
        called[name] = _CALLED.match(text) is not None
        copies[name] = classes.copies(text)
    name = np.append(trace.name[operators.row], len(trace.strings))
    around = place.copy()
    code = by_name[name[around]]
    pending = np.flatnonzero((around != NONE) & (code == NONE))
    while len(pending):
        around[pending] = operators.parent[around[pending]]
        pending = pending[(around[pending] != NONE) & called[name[around[pending]]]]
        code[pending] = by_name[name[around[pending]]]
        pending = pending[code[pending] == NONE]
    return code, copies[name[place]]


def _in_optimizer(trace: Trace, work: DeviceWork, chosen: Int64) -> Bool:
    """Was the work launched within an optimizer's step?"""
    ranges = np.flatnonzero(
        (trace.category == Category.ANNOTATION)
        & trace.names_where(lambda name: _OPTIMIZER_RANGE.match(name) is not None)
    )
    covered = Intervals.of(trace.start_ns[ranges], trace.end_ns[ranges])
    if len(covered) == 0:
        return np.zeros(len(chosen), dtype=np.bool_)
    launched = work.launch_start_ns(trace)[chosen]
    at = np.searchsorted(covered.start_ns, launched, side="right") - 1
    return np.asarray((at >= 0) & (launched < covered.end_ns[at]) & (work.launch[chosen] != NONE))


def _types(found: Attribution, names: list[str], line: Int64, counted: Int64, lines: int) -> tuple[str | None, ...]:
    """Type in which each line multiplies: by its operators where they are counted, else by its name."""
    recorded = heaviest(line, found.calls.dtype[found.call[counted]], found.flops[counted], lines)
    result = []
    for name, index in zip(names, recorded.tolist(), strict=True):
        if index != NONE:
            result.append(product_type(found.calls.dtypes[index], name))
        else:
            multiplies = classes.class_of_kernel(name) in classes.PRODUCTS
            result.append(product_type(None, name) if multiplies else None)
    return tuple(result)


def _extremes(cell: Int64, length: Int64, cells: int) -> tuple[Int64, Int64]:
    """(shortest, longest) of each cell; (int64's largest, -1) where it has none."""
    shortest = np.full(cells, np.iinfo(np.int64).max, dtype=np.int64)
    longest = np.full(cells, -1, dtype=np.int64)
    np.minimum.at(shortest, cell, length)
    np.maximum.at(longest, cell, length)
    return shortest, longest
