"""One rank's device work by name: how often, how long, for which operator, and with how many FLOPs."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank import kernel_classes as classes
from perfscope.analyzers.rank.attribution import Attribution
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.analyzers.rank.loop_phases import OPTIMIZER_RANGE
from perfscope.analyzers.rank.nesting import taken
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.work.flops import product_type
from perfscope.analyzers.rank.work.per_step import amounts, heaviest, lines_of, sums
from perfscope.analyzers.rank.work.tables import CATEGORIES, CLASSES, OTHER_KERNELS, KernelTimes
from perfscope.frozen import dataclass
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Bool, Category, Int64, Trace

_CODE: Final = {name: code for code, name in enumerate(CLASSES)}
_PRODUCTS: Final = np.array([name in classes.PRODUCTS for name in (*CLASSES, "")])
_CALLED: Final = re.compile(r"^(?!autograd::)\w+::")
"""Operators whose class holds for what they call. Not autograd's nodes: checkpoints run whole forwards in them."""


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


def classed_work(trace: Trace, work: DeviceWork, attribution: Attribution) -> ClassedWork:
    """Category and class of every piece of device work in a step."""
    index = np.flatnonzero(attribution.step >= 0)
    category = _category(trace, attribution, work.row[index], index)
    return ClassedWork(
        index=index,
        step=attribution.step[index],
        length_ns=work.end_ns[index] - work.start_ns[index],
        category=category,
        kind=_class_codes(trace, work, attribution, index, category),
    )


def kernel_times(
    trace: Trace, work: DeviceWork, steps: Steps, attribution: Attribution, classed: ClassedWork
) -> KernelTimes:
    """Add up the device work of each step by its name."""
    rows, line_step, length = work.row[classed.index], classed.step, classed.length_ns
    keys = trace.name[rows] * np.int64(len(CATEGORIES)) + classed.category
    names, line = lines_of(keys, length, lambda key: trace.strings[key // len(CATEGORIES)], OTHER_KERNELS)
    lines = len(names)
    place = attribution.operator[classed.index]
    operator = taken(trace.name[attribution.operators.row], place)
    counted = np.flatnonzero(attribution.flops[classed.index] > 0)
    flops = attribution.flops[classed.index[counted]]
    flops_line, position = np.unique(line[counted], return_inverse=True)
    cell, cells = line * len(steps) + line_step, (lines, len(steps))
    shortest, longest = _extremes(cell, length, lines * len(steps))
    return KernelTimes(
        names=tuple(names),
        category=tuple(CATEGORIES[code] for code in heaviest(line, classed.category, length, lines)),
        operator=tuple(
            trace.strings[name] if name != NONE else None for name in heaviest(line, operator, length, lines)
        ),
        operator_class=tuple(CLASSES[code] for code in heaviest(line, classed.kind, length, lines)),
        dtype=_types(attribution, names, line[counted], classed.index[counted], lines),
        count=sums(line, line_step, *cells),
        total_ns=sums(line, line_step, *cells, length),
        shortest_ns=shortest.reshape(cells),
        longest_ns=longest.reshape(cells),
        flops_line=flops_line,
        flops=amounts(position, line_step[counted], len(flops_line), len(steps), flops),
        flops_ns=sums(position, line_step[counted], len(flops_line), len(steps), length[counted]),
    )


def _category(trace: Trace, attribution: Attribution, rows: Int64, chosen: Int64) -> Int64:
    kind = trace.category[rows]
    category = np.zeros(len(rows), dtype=np.int64)
    category[attribution.is_communication[chosen]] = CATEGORIES.index("communication")
    category[kind == Category.MEMCPY] = CATEGORIES.index("copy")
    category[kind == Category.MEMSET] = CATEGORIES.index("memset")
    return category


def _class_codes(trace: Trace, work: DeviceWork, attribution: Attribution, chosen: Int64, category: Int64) -> Int64:
    """Class of each piece of work: by its category, its operator, the optimizer's step, or its name, in this order."""
    rows = work.row[chosen]
    by_name = np.full(len(trace.strings), NONE, dtype=np.int64)
    for name in distinct(trace.name[rows]).tolist():
        by_name[name] = _CODE[classes.class_of_kernel(trace.strings[name])]
    code = by_name[trace.name[rows]]
    place = attribution.operator[chosen]
    of_operator, copies = _operator_codes(trace, attribution, place)
    optimizing = _in_optimizer(trace, work, chosen) & ~_PRODUCTS[of_operator] & ~_PRODUCTS[code]
    code = np.where(of_operator != NONE, of_operator, code)
    code[optimizing] = _CODE[classes.OPTIMIZER]
    code[copies] = _CODE[classes.COPY]
    for name, kind in ((classes.COMMUNICATION, 1), (classes.COPY, 2), (classes.MEMSET, 3)):
        code[category == kind] = _CODE[name]
    return code


def _operator_codes(trace: Trace, attribution: Attribution, place: Int64) -> tuple[Int64, Bool]:
    """(class by the operator or one that called it, NONE where none decides it; whether the operator only copies)."""
    operators = attribution.operators
    by_name = np.full(len(trace.strings) + 1, NONE, dtype=np.int64)
    called = np.zeros(len(trace.strings) + 1, dtype=np.bool_)
    copies = np.zeros(len(trace.strings) + 1, dtype=np.bool_)
    for name in distinct(trace.name[operators.row]).tolist():
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
    """Whether the work was launched within an optimizer step."""
    covered = Intervals.of_rows(trace, trace.rows(Category.ANNOTATION, named=OPTIMIZER_RANGE.match))
    return np.asarray(covered.covers(work.launch_start_ns(trace)[chosen]) & (work.launch[chosen] != NONE))


def _types(
    attribution: Attribution, names: list[str], line: Int64, counted: Int64, lines: int
) -> tuple[str | None, ...]:
    """Type in which each line multiplies: by its operators where their FLOPs are counted, else by its name."""
    recorded = heaviest(line, attribution.calls.dtype[attribution.call[counted]], attribution.flops[counted], lines)
    result = []
    for name, index in zip(names, recorded.tolist(), strict=True):
        if index != NONE:
            result.append(product_type(attribution.calls.dtypes[index], name))
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
