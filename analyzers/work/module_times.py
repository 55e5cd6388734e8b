"""One rank's named ranges (modules, phases, whatever a user marked) and the device work launched inside them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from perfscope.analyzers.intervals import Intervals
from perfscope.analyzers.launches import DeviceWork
from perfscope.analyzers.nesting import Nested
from perfscope.analyzers.steps import Steps
from perfscope.analyzers.work.per_step import distinct, heaviest, shared, sums
from perfscope.trace import NONE, Category, Int64, Trace
from perfscope.vocabulary import COLLECTIVE_PREFIX, NVTX_RANK_PREFIX, NVTX_STEP_PREFIX, PROFILER_STEP_PREFIX

OTHERS: Final = "(other ranges)"
"""Name under which a rank adds up what is not among its costliest."""

_MODULE: Final = re.compile(r"^nn\.Module: ")
"""torch.profiler's Python events of a module's call, where it was recorded ``with_stack`` or ``with_modules``."""
_NO_PART: Final = (PROFILER_STEP_PREFIX, NVTX_STEP_PREFIX, NVTX_RANK_PREFIX, COLLECTIVE_PREFIX)
"""Ranges that are whole steps, or one of a kind each."""


@dataclass(frozen=True, eq=False)
class ModuleTimes:
    """Named ranges of one rank. One line a name, the costliest first; ``[lines, steps]`` for sums.

    By the step in whose host window a range begins. ``device_ns`` is the union, for each name and step, of the device
    work launched inside its ranges, on the same thread: a module's backward is not in it, autograd calls no modules.
    """

    names: tuple[str, ...]
    depth: Int64
    """Of each line: how many ranges lie around it, in most of its time."""
    count: Int64
    host_ns: Int64
    device_ns: Int64
    kernels: Int64

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, names=shared(state["names"]))


def module_times(trace: Trace, work: DeviceWork, steps: Steps) -> ModuleTimes:
    """Add up the named ranges of each step."""
    ranges = Nested.of(trace, range_rows(trace))
    host_step = steps.of_host_time(trace.start_ns[ranges.row])
    length = ranges.end - ranges.start
    line = np.full(len(ranges), NONE, dtype=np.int64)
    here = np.flatnonzero(host_step >= 0)
    kept, line[here] = distinct(trace.name[ranges.row[here]].astype(np.int64), length[here])
    lines = len(kept) + int((line == len(kept)).any())
    names = [trace.strings[name] for name in kept.tolist()] + [OTHERS] * (lines - len(kept))
    cell, of_work = _launched_inside(trace, work, ranges, line * len(steps) + host_step)
    size = (lines, len(steps))
    return ModuleTimes(
        names=tuple(names),
        depth=heaviest(line[here], ranges.depth()[here], length[here], lines),
        count=sums(line[here], host_step[here], *size),
        host_ns=sums(line[here], host_step[here], *size, length[here]),
        device_ns=_unions(cell, work.start_ns[of_work], work.end_ns[of_work], lines * len(steps)).reshape(size),
        kernels=np.bincount(cell, minlength=lines * len(steps)).astype(np.int64).reshape(size),
    )


def range_rows(trace: Trace) -> Int64:
    """Rows of the named ranges that are parts of a step: annotations, and modules' calls."""
    is_range = (trace.category == Category.ANNOTATION) & trace.names_where(lambda name: not name.startswith(_NO_PART))
    is_module = (trace.category == Category.PYTHON) & trace.names_where(lambda name: _MODULE.match(name) is not None)
    return np.flatnonzero(is_range | is_module)


def _launched_inside(trace: Trace, work: DeviceWork, ranges: Nested, cell_of: Int64) -> tuple[Int64, Int64]:
    """Pairs of (cell, piece of device work launched inside a range of that cell), each pair once."""
    piece = np.flatnonzero(work.launch != NONE)
    rows = work.launch[piece]
    around = ranges.innermost(trace.thread[rows], trace.start_ns[rows])
    cells, pieces = [], []
    while True:
        inside = around != NONE
        piece, around = piece[inside], around[inside]
        if len(piece) == 0:
            break
        named = cell_of[around] >= 0
        cells.append(cell_of[around[named]])
        pieces.append(piece[named])
        around = ranges.parent[around]
    if not cells:
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing
    # A range may lie in another of its name.
    pairs = np.unique(np.concatenate(cells) * np.int64(len(work)) + np.concatenate(pieces))
    return pairs // len(work), pairs % len(work)


def _unions(cell: Int64, start_ns: Int64, end_ns: Int64, cells: int) -> Int64:
    """Measure of the union of each cell's intervals."""
    if len(cell) == 0:
        return np.zeros(cells, dtype=np.int64)
    origin, span = int(start_ns.min()), int(end_ns.max() - start_ns.min()) + 1
    # One cell after another on one axis; a ns between them keeps their unions apart.
    shift = cell * span - origin
    union = Intervals.of(start_ns + shift, end_ns + shift)
    owner = union.start_ns // span
    return np.bincount(owner, weights=union.end_ns - union.start_ns, minlength=cells).astype(np.int64)
