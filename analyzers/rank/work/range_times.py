"""One rank's named ranges (modules, phases, the user's own) and its host synchronizations.

For ranges: the device work launched inside them. For synchronizations: the idle time that they cause, by the call, the
operator that made it, and the named range around it.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.attribution import Attribution
from perfscope.analyzers.rank.host_activity import HostActivity
from perfscope.analyzers.rank.idle import idle_by_sync
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.analyzers.rank.loop_phases import BETWEEN_BATCHES
from perfscope.analyzers.rank.nesting import Nested, taken
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.timeline import Timeline
from perfscope.analyzers.rank.work.per_step import heaviest, lines_of, sums
from perfscope.analyzers.rank.work.tables import OTHER_RANGES, ModuleTimes, SyncTimes
from perfscope.recording.vocabulary import COLLECTIVE_PREFIX, NVTX_RANK_PREFIX, NVTX_STEP_PREFIX, PROFILER_STEP_PREFIX
from perfscope.results.categories import TimeCategory
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Bool, Category, Int64, Trace

_MODULE: Final = re.compile(r"^nn\.Module: ")
"""torch.profiler's Python event of a module's call, in recordings ``with_stack`` or ``with_modules``."""
_NO_PART: Final = (PROFILER_STEP_PREFIX, NVTX_STEP_PREFIX, NVTX_RANK_PREFIX, COLLECTIVE_PREFIX)
"""Ranges that are whole steps, or have a name of their own each."""
_IDLE: Final = tuple(category for category in TimeCategory if category.group == "Idle")


def module_times(trace: Trace, work: DeviceWork, steps: Steps) -> ModuleTimes:
    """Add up the named ranges of each step."""
    ranges = Nested.of(trace, _range_rows(trace))
    host_step = steps.of_host_time(trace.start_ns[ranges.row])
    length = ranges.end - ranges.start
    line = np.full(len(ranges), NONE, dtype=np.int64)
    here = np.flatnonzero(host_step >= 0)
    keys = trace.name[ranges.row[here]].astype(np.int64)
    names, line[here] = lines_of(keys, length[here], trace.strings.__getitem__, OTHER_RANGES)
    lines = len(names)
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


def _range_rows(trace: Trace) -> Int64:
    """Rows of the named ranges inside steps: annotations, and calls of modules."""
    ranges = trace.rows(Category.ANNOTATION, named=lambda name: not name.startswith(_NO_PART))
    return np.sort(np.concatenate((ranges, trace.rows(Category.PYTHON, named=_MODULE.match))))


def _launched_inside(trace: Trace, work: DeviceWork, ranges: Nested, cell_of: Int64) -> tuple[Int64, Int64]:
    """Pairs of (cell, piece of device work launched inside a range of that cell), each pair once."""
    piece = np.flatnonzero(work.launch != NONE)
    around = ranges.around(trace, work.launch[piece])
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
    # A range may be inside another of the same name.
    pairs = distinct(np.concatenate(cells) * np.int64(len(work)) + np.concatenate(pieces))
    return pairs // len(work), pairs % len(work)


def _unions(cell: Int64, start_ns: Int64, end_ns: Int64, cells: int) -> Int64:
    """Measure of the union of each cell's intervals."""
    if len(cell) == 0:
        return np.zeros(cells, dtype=np.int64)
    origin, span = int(start_ns.min()), int(end_ns.max() - start_ns.min()) + 1
    # The cells lie one after another on one axis; a ns between them keeps their unions apart.
    shift = cell * span - origin
    union = Intervals.of(start_ns + shift, end_ns + shift)
    owner = union.start_ns // span
    return np.bincount(owner, weights=union.end_ns - union.start_ns, minlength=cells).astype(np.int64)


def sync_times(
    trace: Trace, work: DeviceWork, steps: Steps, host: HostActivity, timeline: Timeline, attribution: Attribution
) -> SyncTimes:
    """Add up the idle time that each place causes, by the time breakdown and ``idle_by_sync``.

    Places that cause none by the time breakdown are left out.
    """
    gaps = timeline.where(*_IDLE) if len(work) else Intervals.empty()
    delays = idle_by_sync(trace, work, host, gaps)
    counted = timeline.where(TimeCategory.SYNC).within(delays.start_ns, delays.end_ns)
    step = steps.of_device_time(delays.start_ns)
    here = np.flatnonzero((counted > 0) & (step >= 0))
    row = delays.row[here]
    operator, ranges = (
        taken(trace.name[nested.row], nested.around(trace, row))
        for nested in (attribution.operators, Nested.of(trace, _range_rows(trace) if len(row) else row))
    )
    places, line = np.unique(
        np.stack((
            trace.name[row].astype(np.int64), operator, ranges, _reads_of_loop(trace, work, host, attribution, row),
        )),
        axis=1, return_inverse=True,
    )  # fmt: skip
    line = line.reshape(-1)
    size = (places.shape[1], len(steps))
    # One call's idle time may consist of several stretches.
    _, once = np.unique(row, return_index=True)

    def texts(names: Int64) -> tuple[str, ...]:
        return tuple("" if name == NONE else trace.strings[name] for name in names.tolist())

    return SyncTimes(
        calls=texts(places[0]),
        operators=texts(places[1]),
        ranges=texts(places[2]),
        of_loop=tuple(places[3].astype(np.bool_).tolist()),
        count=sums(line[once], step[here][once], *size),
        idle_ns=sums(line, step[here], *size, counted[here]),
        delayed_ns=sums(line, step[here], *size, (delays.end_ns - delays.start_ns)[here]),
    )


def _reads_of_loop(trace: Trace, work: DeviceWork, host: HostActivity, attribution: Attribution, row: Int64) -> Bool:
    """Which blocking calls read what a collective brings that the training loop calls between the optimizer's step and
    the next forward, or between two micro-batches: the first read after each. What it reads later it may have had
    without.

    Calls of one operator are one read: a copy to the host, and the wait for it.
    """
    launches = work.launch[attribution.is_communication & (work.launch != NONE)]
    loop, start = host.between.union(host.stretches[BETWEEN_BATCHES]), trace.start_ns[row]
    begins = loop.start_ns
    if len(launches) == 0 or len(begins) == 0 or len(row) == 0:
        return np.zeros(len(row), dtype=np.bool_)
    issued = np.sort(trace.start_ns[launches])
    last = issued[np.maximum(np.searchsorted(issued, start) - 1, 0)]
    since = begins[np.maximum(np.searchsorted(begins, start, side="right") - 1, 0)]
    calls = host.blocked_row[np.argsort(trace.start_ns[host.blocked_row], kind="stable")]
    around, called = attribution.operators.around(trace, calls), trace.start_ns[calls]
    another = np.append(True, (around[1:] != around[:-1]) | (around[1:] == NONE))
    first = np.maximum.accumulate(np.where(another, np.arange(len(calls)), 0))[np.searchsorted(called, start)]
    is_first = (first == 0) | (called[np.maximum(first - 1, 0)] < last)
    return np.asarray(loop.covers(start) & (since <= last) & (last < start) & is_first)
