"""One step of a rank as lanes of events, for a picture: what ran on the device, what the host did meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.attribution import Attribution
from perfscope.analyzers.host_activity import HostActivity
from perfscope.analyzers.launches import DeviceWork
from perfscope.analyzers.steps import Steps
from perfscope.trace import NONE, Category, Int32, Int64, Trace
from perfscope.vocabulary import NVTX_STEP_PREFIX, PROFILER_STEP_PREFIX

MOST_EVENTS: Final = 240
"""Events of one lane: more cannot be told apart on a screen, and every rank's travel to where ranks are compared."""
FINEST: Final = 4000
"""Events shorter than the step over this are merged with short neighbours: a quarter of a pixel of a wide screen."""
LONGEST_NAME: Final = 240
"""Characters of a name that are kept; names of templated kernels can take 10 kB."""

_AUTOGRAD: Final = "autograd::"


@dataclass(frozen=True, eq=False)
class LaneEvents:
    """Events of one lane inside the step's window, ascending; own clock, ns.

    ``name`` and ``operator`` are indices into ``RankLanes.texts`` (NONE: not known). ``pieces`` counts the events that
    were merged into one, ``busy_ns`` is the sum of their lengths.
    """

    kind: str
    """``compute`` (without a device: the main thread), ``copy``, ``host`` (the main thread), ``backward`` (autograd's)
    or ``loader``."""
    start_ns: Int64
    end_ns: Int64
    name: Int32
    operator: Int32
    pieces: Int32
    busy_ns: Int64

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, eq=False)
class RankLanes:
    """Lanes of the step in the middle of a rank's recording, the same number on ranks that recorded the same steps."""

    step: int
    start_ns: int
    end_ns: int
    lanes: tuple[LaneEvents, ...]
    """Those with events."""
    texts: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Events:
    """Events as found: ``name`` and ``operator`` are indices into the trace's strings."""

    start_ns: Int64
    end_ns: Int64
    name: Int64
    operator: Int64

    def inside(self, start_ns: int, end_ns: int) -> _Events:
        """Those that overlap the window, cut to it, by start."""
        kept = np.flatnonzero((self.end_ns > start_ns) & (self.start_ns < end_ns))
        kept = kept[np.argsort(self.start_ns[kept], kind="stable")]
        start = np.maximum(self.start_ns[kept], start_ns)
        return _Events(start, np.minimum(self.end_ns[kept], end_ns), self.name[kept], self.operator[kept])


def rank_lanes(trace: Trace, work: DeviceWork, found: Attribution, host: HostActivity, steps: Steps) -> RankLanes:
    """Lanes of one step; of the whole recording where nothing marks steps."""
    index = len(steps) // 2
    begin, end = int(steps.start_ns[index]), int(steps.end_ns[index])
    kinds = {**_device(trace, work, found), **_host(trace, work, found, host)}
    merged = {kind: _merged(kind, events.inside(begin, end), end - begin) for kind, events in kinds.items()}
    lanes = [lane for lane in merged.values() if len(lane)]
    nothing = np.empty(0, dtype=np.int32)
    used = np.unique(np.concatenate([nothing, *(texts for lane in lanes for texts in (lane.name, lane.operator))]))
    used = used[used != NONE]
    return RankLanes(
        step=int(steps.number[index]),
        start_ns=begin,
        end_ns=end,
        lanes=tuple(_renamed(lane, used) for lane in lanes),
        texts=tuple(trace.strings[text][:LONGEST_NAME] for text in used.tolist()),
    )


def _device(trace: Trace, work: DeviceWork, found: Attribution) -> dict[str, _Events]:
    launched_by = np.full(len(work), NONE, dtype=np.int64)
    known = np.flatnonzero(found.operator != NONE)
    launched_by[known] = trace.name[found.operators.row[found.operator[known]]]

    def those(rows: Int64) -> _Events:
        return _Events(
            work.start_ns[rows], work.end_ns[rows], trace.name[work.row[rows]].astype(np.int64), launched_by[rows]
        )

    return {
        "compute": those(np.flatnonzero(found.is_kernel & ~found.is_communication)),
        "copy": those(np.flatnonzero(~found.is_kernel & ~found.is_communication)),
    }


def _host(trace: Trace, work: DeviceWork, found: Attribution, host: HostActivity) -> dict[str, _Events]:
    """Outermost operators of the training threads, and calls into the runtime that lie in none (a synchronize)."""
    operators = found.operators
    outermost = operators.row[operators.parent == NONE]
    outermost = outermost[np.isin(trace.thread[outermost], host.threads)]
    calls = np.flatnonzero((trace.category == Category.RUNTIME) & np.isin(trace.thread, host.threads))
    if len(operators):
        calls = calls[operators.innermost(trace.thread[calls], trace.start_ns[calls]) == NONE]
    rows = np.concatenate((outermost, calls))
    is_autograd = trace.names_where(lambda name: name.startswith(_AUTOGRAD)) & (trace.category == Category.CPU_OP)
    is_step = trace.names_where(lambda name: name.startswith((PROFILER_STEP_PREFIX, NVTX_STEP_PREFIX)))
    # On a rank without device the backward pass runs on the main thread, which the steps mark.
    backward = np.setdiff1d(trace.thread[is_autograd], trace.thread[is_step & (trace.category == Category.ANNOTATION)])
    in_backward = np.isin(trace.thread[rows], backward)

    def those(chosen: Int64) -> _Events:
        names = trace.name[chosen].astype(np.int64)
        return _Events(trace.start_ns[chosen], trace.end_ns[chosen], names, np.full(len(chosen), NONE, dtype=np.int64))

    loading = host.loading
    nameless = np.full(len(loading), NONE, dtype=np.int64)
    return {
        # Without a device the training thread's operators are the computation, as in the account.
        "host" if len(work) else "compute": those(rows[~in_backward]),
        "backward": those(rows[in_backward]),
        "loader": _Events(loading.start_ns, loading.end_ns, nameless, nameless),
    }


def _merged(kind: str, events: _Events, window_ns: int) -> LaneEvents:
    """At most ``MOST_EVENTS``: runs of short events are one, under the name of the longest among them."""
    least = max(window_ns // FINEST, 1)
    first = _runs(events, least)
    while len(first) > MOST_EVENTS:
        least *= 2
        first = _runs(events, least)
    if len(first) == 0:
        nothing = np.empty(0, dtype=np.int64)
        unnamed = nothing.astype(np.int32)
        return LaneEvents(kind, nothing, nothing, unnamed, unnamed, unnamed, nothing)
    pieces = np.diff(np.append(first, len(events.start_ns)))
    length = events.end_ns - events.start_ns
    owner = np.repeat(np.arange(len(first)), pieces)
    # The last of each run in the order of (run, length) is its longest.
    longest = np.lexsort((length, owner))[np.append(first[1:], len(owner)) - 1]
    return LaneEvents(
        kind=kind,
        start_ns=events.start_ns[first],
        end_ns=np.maximum.reduceat(events.end_ns, first),
        name=events.name[longest].astype(np.int32),
        operator=events.operator[longest].astype(np.int32),
        pieces=pieces.astype(np.int32),
        busy_ns=np.add.reduceat(length, first),
    )


def _runs(events: _Events, least_ns: int) -> Int64:
    """Where runs begin: a long event is one by itself, short ones go together while the gaps between them are short."""
    if len(events.start_ns) == 0:
        return np.empty(0, dtype=np.int64)
    is_short = events.end_ns - events.start_ns < least_ns
    reached = np.maximum.accumulate(events.end_ns)
    is_near = events.start_ns[1:] - reached[:-1] < least_ns
    joins = is_short[1:] & is_short[:-1] & is_near
    return np.flatnonzero(np.concatenate(([True], ~joins)))


def _renamed(lane: LaneEvents, used: Int32) -> LaneEvents:
    """Names as indices into the strings that are in use."""

    def new(old: Int32) -> Int32:
        return np.where(old == NONE, NONE, np.searchsorted(used, old)).astype(np.int32)

    return LaneEvents(
        lane.kind, lane.start_ns, lane.end_ns, new(lane.name), new(lane.operator), lane.pieces, lane.busy_ns
    )
