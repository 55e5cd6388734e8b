"""Memory that one rank's allocators hold: peaks over the whole recording, and a curve thinned for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.rank.partial import MemoryUse
from perfscope.analyzers.rank.steps import Steps
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Bool, Int64, Trace

COLUMNS: Final = 400
"""Columns of the picture that a curve is thinned for: two to three pixels each on a wide screen."""


def rank_memory(trace: Trace, steps: Steps) -> tuple[MemoryUse, ...]:
    """Memory of each device that the trace has allocator events of; of the host only where there is no device."""
    counter = trace.memory
    devices = distinct(counter.device)
    if len(devices) and devices[-1] != NONE:
        devices = devices[devices != NONE]
    start_ns, end_ns = int(steps.host_start_ns[0]), int(steps.host_end_ns[-1])
    uses = []
    for device in devices.tolist():
        mine = counter.device == device
        time_ns, allocated, reserved = counter.time_ns[mine], counter.allocated[mine], counter.reserved[mine]
        if device == NONE:
            # The host's allocator has no cache; the profiler writes 0 there.
            reserved = np.full(len(reserved), NONE, dtype=np.int64)
        uses.append(_use(device, time_ns, allocated, reserved, start_ns, end_ns))
    return tuple(use for use in uses if use.peak)


def cut(time_ns: Int64, columns: Sequence[Int64], start_ns: int, end_ns: int) -> tuple[Int64, list[Int64]]:
    """The part in ``[start_ns, end_ns]`` of a curve whose values hold until its next point.

    Its first point is the value at the window's start, its last the value at the window's end; a window before the
    first point is empty.
    """
    first = max(int(np.searchsorted(time_ns, start_ns, side="right")) - 1, 0)
    last = int(np.searchsorted(time_ns, end_ns, side="right"))
    if first >= last:
        return time_ns[:0], [column[:0] for column in columns]
    inside, kept = np.maximum(time_ns[first:last], start_ns), [column[first:last] for column in columns]
    if inside[-1] == end_ns:
        return inside, kept
    return np.append(inside, end_ns), [np.append(column, column[-1]) for column in kept]


def thin(time_ns: Int64, columns: Sequence[Int64], start_ns: int, end_ns: int) -> Int64:
    """Indices, ascending, of the points that a picture of ``COLUMNS`` columns over ``[start_ns, end_ns]`` shows.

    For each column of the picture: the first and the last point, and the lowest and the highest of each series. Lines
    through them fill the same pixels as lines through all (M4: Jugel et al., "M4: A Visualization-Oriented Time Series
    Data Aggregation", PVLDB 7(10), 2014). Points that change nothing are left out.
    """
    if len(time_ns) == 0:
        return np.empty(0, dtype=np.int64)
    place = (time_ns - start_ns) * COLUMNS // max(end_ns - start_ns, 1)
    edges = np.flatnonzero(np.diff(place))
    first, last = np.append(0, edges + 1), np.append(edges, len(place) - 1)
    kept = [first, last]
    column = np.repeat(np.arange(len(first)), last - first + 1)
    for values in columns:
        for extreme in (np.minimum, np.maximum):
            reached = np.flatnonzero(values == extreme.reduceat(values, first)[column])
            kept.append(reached[np.append(True, np.diff(column[reached]) > 0)])
    chosen = distinct(np.concatenate(kept))
    return chosen[_changes([values[chosen] for values in columns])]


def _use(device: int, time_ns: Int64, allocated: Int64, reserved: Int64, start_ns: int, end_ns: int) -> MemoryUse:
    peak_reserved = _highest(reserved)
    at_peak = allocated[reserved == peak_reserved] if peak_reserved is not None else allocated[:0]
    inside, (allocated_inside, reserved_inside) = cut(time_ns, (allocated, reserved), start_ns, end_ns)
    shown = thin(inside, (allocated_inside, reserved_inside), start_ns, end_ns)
    return MemoryUse(
        device=device,
        time_ns=inside[shown],
        allocated=allocated_inside[shown],
        reserved=reserved_inside[shown],
        peak_allocated=_highest(allocated),
        peak_reserved=peak_reserved,
        allocated_at_peak=_highest(at_peak),
    )


def _highest(values: Int64) -> int | None:
    highest = int(values.max(initial=NONE))
    return None if highest == NONE else highest


def _changes(columns: Sequence[Int64]) -> Bool:
    """For each point: whether it is first or last, or any column differs from the point before or after."""
    changes = np.ones(len(columns[0]), dtype=np.bool_)
    if len(changes) > 2:
        changes[1:-1] = False
        for values in columns:
            steps = np.diff(values) != 0
            changes[1:-1] |= steps[:-1] | steps[1:]
    return changes
