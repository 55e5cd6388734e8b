"""Who calls the costliest operators: the operator around them, and with stacks the script's own Python function.

``aten::quantile`` sorts, for example, and a script that calls it has no sort in it to look for.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.loop_phases import AUTOGRAD
from perfscope.analyzers.rank.nesting import Nested
from perfscope.analyzers.rank.pauses import FUNCTION
from perfscope.analyzers.rank.work.per_step import heaviest
from perfscope.trace.trace import NONE, Category, Float64, Int64, Trace

_LINES: Final = 8
"""Operators whose callers are looked for, the costliest."""
_MOST: Final = 1_000
"""Calls of one that are looked at."""
_CALLS: Final = 50
"""Calls of one that are looked at for their Python functions, the longest."""
_NOT_ONES_OWN: Final = re.compile(r"^<|^torch/|(?:^|/)(?:threading|runpy|contextlib|importlib/\w+)\.py\(")
"""Python functions of torch and of the interpreter."""


def callers(trace: Trace, operators: Nested, line: Int64, cost: Float64) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the outermost operator, the innermost Python function) around most of each of the first lines; empty where there
    is none, or stacks are not recorded. ``line`` and ``cost`` are of each of the nested operators.
    """
    chosen = np.concatenate([_some(np.flatnonzero(line == number)) for number in range(_LINES)])
    chosen = chosen[cost[chosen] > 0]
    if not len(chosen):
        return (), ()
    lines = int(line[chosen].max()) + 1
    outermost = chosen.copy()
    while True:
        around = operators.parent[outermost]
        of_engine = trace.names_where(AUTOGRAD.match, operators.row[around])
        inner = np.flatnonzero((around != NONE) & ~of_engine)
        if not len(inner):
            break
        outermost[inner] = around[inner]
    own, name = trace.name[operators.row[chosen]], trace.name[operators.row[outermost]]
    name = np.where(name == own, NONE, name).astype(np.int64)
    within = heaviest(line[chosen], name, cost[chosen], lines)
    return _names(trace, within), _functions(trace, operators.row[chosen], line[chosen], cost[chosen], lines)


def _some(places: Int64) -> Int64:
    """Of many one after every so many."""
    return places[:: len(places) // _MOST + 1]


def _functions(trace: Trace, rows: Int64, line: Int64, cost: Float64, lines: int) -> tuple[str, ...]:
    python = trace.rows(Category.PYTHON, named=lambda name: FUNCTION.search(name) and not _NOT_ONES_OWN.search(name))
    if not len(python):
        return ()
    start, end, thread = trace.start_ns[python], trace.ends_ns(python), trace.thread[python]
    found = np.full(lines, NONE, dtype=np.int64)
    for number in range(lines):
        mine = np.flatnonzero(line == number)
        mine = mine[np.argsort(-cost[mine], kind="stable")[:_CALLS]]
        functions = np.full(len(mine), NONE, dtype=np.int64)
        for place, row in enumerate(rows[mine].tolist()):
            around = (start <= trace.start_ns[row]) & (end >= trace.ends_ns(np.array([row]))[0])
            inside = np.flatnonzero(around & (thread == trace.thread[row]))
            if len(inside):  # in time order, so that the innermost is the last
                functions[place] = trace.name[python[inside[-1]]]
        if len(mine):
            found[number] = heaviest(np.zeros(len(mine), dtype=np.int64), functions, cost[mine], 1)[0]
    return _names(trace, found)


def _names(trace: Trace, symbols: Int64) -> tuple[str, ...]:
    return tuple("" if symbol == NONE else trace.strings[symbol] for symbol in symbols.tolist())
