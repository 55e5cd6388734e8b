"""When the host does something else than to go from one operator to the next, and which function or range that is."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Final

import numpy as np

from perfscope.analyzers.rank.intervals import Intervals
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import Category, Int64, Trace

PAUSE_NS: Final = 500_000
"""A host that is in no operator and no call for this long pauses: in recordings from A100, H100, V100 and MI300X, 99 %
of these stretches are shorter than 0.15 ms."""

_NAMES: Final = 8
"""Functions, and ranges, that are named, those with the longest pauses."""
FUNCTION: Final = re.compile(r"\.py\(\d+\): ")
"""What names of Python functions hold, between their file and their own name."""
"""Python functions as torch.profiler writes them (``with_stack``). Built-in functions and modules do not match."""
_WITHIN: Final = 0.1
"""A function covers a pause when it lacks at most this share of it on either side."""
_LEAST: Final = 1 - 2 * _WITHIN
"""Part of the shortest pause that a function or range takes at least."""


def find_pauses(busy: Intervals) -> Intervals:
    """The pauses between a rank's operators, calls and waits for the loader (``busy``), from start to end."""
    begin, end = busy.end_ns[:-1], busy.start_ns[1:]
    long = end - begin >= PAUSE_NS
    return Intervals.of(begin[long], end[long])


_OF_FRAMEWORKS: Final = re.compile(
    r"^(perfscope::|megatron::|ProfilerStep#|Optimizer\.|DistributedDataParallel|FullyShardedDataParallel|FSDP::"
    r"|nn\.Module: |nccl:|gloo:|enumerate\(DataLoader\)|## |Torch-Compiled|CompiledFunction|autograd::)"
)
"""Ranges that no script has named."""
_IDLE: Final = 0.8
"""Share of a range that pauses take at least where they are what it is about."""


def by_function(trace: Trace, pauses: Intervals, threads: Int64) -> dict[str, Intervals]:
    """The pauses of each Python function: the innermost that lasts for the whole pause. Empty without stacks."""
    return _innermost(trace, trace.rows(Category.PYTHON, named=FUNCTION.search, threads=threads), pauses)


def by_range(trace: Trace, pauses: Intervals, threads: Int64) -> dict[str, Intervals]:
    """The pauses of each range that a script has named, for itself and not for a phase in which the host goes on: the
    innermost that lasts for the whole pause, else around each moment of it; of names those with the most.
    """
    rows = trace.rows(Category.ANNOTATION, named=lambda name: not _OF_FRAMEWORKS.match(name), threads=threads)
    rows = rows[trace.duration_ns[rows] >= _LEAST * PAUSE_NS]
    idle = pauses.within(trace.start_ns[rows], trace.ends_ns(rows))
    rows = rows[idle >= _IDLE * trace.duration_ns[rows]]
    named = {name: rows[trace.name[rows] == name] for name in distinct(trace.name[rows]).tolist()}
    parts = _innermost(trace, rows, pauses)
    taken = Intervals.empty().union(*parts.values())
    # Those within others are shorter.
    for name, mine in sorted(named.items(), key=lambda item: float(np.median(trace.duration_ns[item[1]]))):
        part = pauses.intersect(Intervals.of_rows(trace, mine)).subtract(taken)
        taken = taken.union(part)
        if len(part):
            parts[trace.strings[name]] = part.union(parts.get(trace.strings[name], Intervals.empty()))
    return _longest(parts)


def _innermost(trace: Trace, rows: Int64, pauses: Intervals) -> dict[str, Intervals]:
    """Name -> the pauses for whose whole length its events last, of several the shortest; those with the most."""
    rows = rows[trace.duration_ns[rows] >= _LEAST * PAUSE_NS]
    found: defaultdict[str, list[int]] = defaultdict(list)
    for index in range(len(pauses) if len(rows) else 0):
        start, end = int(pauses.start_ns[index]), int(pauses.end_ns[index])
        slack = int(_WITHIN * (end - start))
        around = rows[(trace.start_ns[rows] <= start + slack) & (trace.ends_ns(rows) >= end - slack)]
        if len(around):
            found[trace.name_of(int(around[np.argmin(trace.duration_ns[around])]))].append(index)
    parts = {name: Intervals(pauses.start_ns[which], pauses.end_ns[which]) for name, which in found.items()}
    return _longest(parts)


def _longest(parts: dict[str, Intervals]) -> dict[str, Intervals]:
    longest = sorted(parts, key=lambda name: -parts[name].measure())[:_NAMES]
    return {name: parts[name] for name in longest}
