"""Which blocking calls ran one rank's device dry: the call, the operator that made it, the named range around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from perfscope.analyzers.attribution import Attribution
from perfscope.analyzers.host_activity import HostActivity
from perfscope.analyzers.nesting import Nested
from perfscope.analyzers.steps import Steps
from perfscope.analyzers.timeline import Row, Timeline
from perfscope.analyzers.work.module_times import range_rows
from perfscope.analyzers.work.per_step import shared, sums
from perfscope.trace import NONE, Int64, Trace


@dataclass(frozen=True, eq=False)
class SyncTimes:
    """Blocking calls of one rank that the account charges with idle time. One line for each place in the program:
    ``calls``, ``operators`` (empty: none around the call) and ``ranges`` (the same), ``[lines, steps]`` for sums.
    """

    calls: tuple[str, ...]
    operators: tuple[str, ...]
    ranges: tuple[str, ...]
    count: Int64
    idle_ns: Int64

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = {name: shared(state[name]) for name in ("calls", "operators", "ranges")}
        self.__dict__.update(state, **names)


def sync_times(trace: Trace, steps: Steps, host: HostActivity, timeline: Timeline, found: Attribution) -> SyncTimes:
    """Add up the idle time of each place. Idle time is the last blocking call's that began before it."""
    idle = timeline.where(Row.SYNC)
    order = np.argsort(host.blocked_start_ns, kind="stable")
    last = np.searchsorted(host.blocked_start_ns[order], idle.start_ns, side="left") - 1
    step = steps.of_device_time(idle.start_ns)
    here = np.flatnonzero((last >= 0) & (step >= 0))
    row = host.blocked_row[order[last[here]]]
    operator = _names_around(trace, found.operators, row)
    ranges = _names_around(trace, Nested.of(trace, range_rows(trace)), row) if len(row) else row
    places, line = np.unique(
        np.stack((trace.name[row].astype(np.int64), operator, ranges)), axis=1, return_inverse=True
    )
    line = line.reshape(-1)
    size = (places.shape[1], len(steps))
    # One call's idle time may be in several stretches.
    _, once = np.unique(row, return_index=True)

    def texts(names: Int64) -> tuple[str, ...]:
        return tuple("" if name == NONE else trace.strings[name] for name in names.tolist())

    return SyncTimes(
        calls=texts(places[0]),
        operators=texts(places[1]),
        ranges=texts(places[2]),
        count=sums(line[once], step[here][once], *size),
        idle_ns=sums(line, step[here], *size, (idle.end_ns - idle.start_ns)[here]),
    )


def _names_around(trace: Trace, ranges: Nested, rows: Int64) -> Int64:
    """Name of the innermost range around each row's start; NONE outside all."""
    place = ranges.innermost(trace.thread[rows], trace.start_ns[rows])
    names = np.full(len(rows), NONE, dtype=np.int64)
    inside = place >= 0
    names[inside] = trace.name[ranges.row[place[inside]]]
    return names
