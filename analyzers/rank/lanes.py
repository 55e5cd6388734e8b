"""One step of a rank as lanes of events for the page's picture: work on the device, and the host meanwhile."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.rank.attribution import Attribution
from perfscope.analyzers.rank.host_activity import HostActivity, step_threads
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.analyzers.rank.loop_phases import DDP_FORWARD
from perfscope.analyzers.rank.nesting import Nested, taken
from perfscope.analyzers.rank.partial import LaneEvents, RankLanes
from perfscope.analyzers.rank.steps import Steps
from perfscope.frozen import dataclass
from perfscope.recording.vocabulary import (
    BACKWARD,
    EVALUATION,
    FORWARD,
    NVTX_RANK_PREFIX,
    NVTX_STEP_PREFIX,
    OPTIMIZER,
    PIPELINE_PREFIX,
    PROFILER_STEP_PREFIX,
)
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Category, Int32, Int64, Trace

MOST_EVENTS: Final = 240
"""Most events of one lane: a screen cannot show more, and the lanes of all ranks travel between processes."""
FINEST: Final = 4000
"""Events shorter than (step / this) are merged with short neighbours: a quarter of a pixel of a wide screen."""
MOST_NAMES: Final = 24
"""Names of the user's own ranges that are kept over the whole recording."""
LONGEST_NAME: Final = 240
"""Longest name in characters; names of templated kernels can take 10 kB."""

_AUTOGRAD: Final = re.compile("autograd::")

_PHASE: Final = re.compile(
    rf"^({'|'.join((FORWARD, BACKWARD, OPTIMIZER, EVALUATION))})$|^{PIPELINE_PREFIX}|^Optimizer\.(step|zero_grad)#"
    rf"|^{re.escape(DDP_FORWARD)}$"
)
"""PerfScope's ranges and torch's own."""

_NOT_THE_USERS: Final = re.compile(
    rf"^perfscope::|^{re.escape(PROFILER_STEP_PREFIX)}|^{re.escape(NVTX_STEP_PREFIX)}|^{re.escape(NVTX_RANK_PREFIX)}"
    r"|^nccl|^(gloo|mpi|ucc|xccl):|DataLoader|^Optimizer\."
)
"""Ranges of profilers, of PerfScope, of torch's collectives and loaders."""

_WHOLE_STEP: Final = 0.9
"""A range that is longer than this share of the step is around it, and hides what is inside."""


@dataclass(frozen=True, eq=False)
class _Events:
    """Events before merging: ``name`` and ``operator`` index the trace's strings."""

    start_ns: Int64
    end_ns: Int64
    name: Int64
    operator: Int64

    def inside(self, start_ns: int, end_ns: int) -> _Events:
        """Events that overlap the window, clipped to it, in order of start."""
        kept = np.flatnonzero((self.end_ns > start_ns) & (self.start_ns < end_ns))
        kept = kept[np.argsort(self.start_ns[kept], kind="stable")]
        start = np.maximum(self.start_ns[kept], start_ns)
        return _Events(start, np.minimum(self.end_ns[kept], end_ns), self.name[kept], self.operator[kept])


def rank_lanes(trace: Trace, work: DeviceWork, attribution: Attribution, host: HostActivity, steps: Steps) -> RankLanes:
    """Lanes of the middle step; of the whole recording where nothing marks steps."""
    index = len(steps) // 2
    begin, end = int(steps.start_ns[index]), int(steps.end_ns[index])
    kinds = {
        **_device(trace, work, attribution),
        **_host(trace, work, attribution, host),
        "phase": _phases(trace, work, attribution, host),
        "range": _own_ranges(trace, host, longest_ns=int(_WHOLE_STEP * (end - begin))),
    }
    inside = {kind: events.inside(begin, end) for kind, events in kinds.items()}
    lanes = [_merged(kind, events, end - begin) for kind, events in inside.items() if len(events.start_ns)]
    nothing = np.empty(0, dtype=np.int32)
    used = distinct(np.concatenate([nothing, *(texts for lane in lanes for texts in (lane.name, lane.operator))]))
    used = used[used != NONE]
    return RankLanes(
        step=int(steps.number[index]),
        start_ns=begin,
        end_ns=end,
        lanes=tuple(_renamed(lane, used) for lane in lanes),
        texts=tuple(trace.strings[text][:LONGEST_NAME] for text in used.tolist()),
    )


def _device(trace: Trace, work: DeviceWork, attribution: Attribution) -> dict[str, _Events]:
    launched_by = taken(trace.name[attribution.operators.row], attribution.operator)

    def events(rows: Int64) -> _Events:
        return _Events(
            work.start_ns[rows], work.end_ns[rows], trace.name[work.row[rows]].astype(np.int64), launched_by[rows]
        )

    return {
        "compute": events(np.flatnonzero(attribution.is_kernel & ~attribution.is_communication)),
        "copy": events(np.flatnonzero(~attribution.is_kernel & ~attribution.is_communication)),
    }


def _host(trace: Trace, work: DeviceWork, attribution: Attribution, host: HostActivity) -> dict[str, _Events]:
    """Outermost operators of the training threads, and runtime calls outside operators (a synchronization)."""
    operators = attribution.operators
    outermost = operators.row[operators.parent == NONE]
    outermost = outermost[np.isin(trace.thread[outermost], host.threads)]
    calls = trace.rows(Category.RUNTIME, threads=host.threads)
    if len(operators):
        calls = calls[operators.around(trace, calls) == NONE]
    rows = np.concatenate((outermost, calls))
    # Without a device, the backward pass runs on the main thread, the one with the step annotations.
    autograd = trace.thread[trace.rows(Category.CPU_OP, named=_AUTOGRAD.match)]
    backward = np.setdiff1d(autograd, step_threads(trace))
    in_backward = np.isin(trace.thread[rows], backward)

    def events(chosen: Int64) -> _Events:
        names = trace.name[chosen].astype(np.int64)
        return _Events(trace.start_ns[chosen], trace.ends_ns(chosen), names, np.full(len(chosen), NONE, dtype=np.int64))

    loading = host.loading
    nameless = np.full(len(loading), NONE, dtype=np.int64)
    return {
        # Without a device the training thread's operators are the compute, as in the time breakdown.
        "host" if len(work) else "compute": events(rows[~in_backward]),
        "backward": events(rows[in_backward]),
        "loader": _Events(loading.start_ns, loading.end_ns, nameless, nameless),
    }


def ranges_by_name(trace: Trace, host: HostActivity, span_ns: int) -> dict[str, Intervals]:
    """When the training threads were in each of the user's own ranges: the outermost ones, the longest names in sum.

    Ranges around nearly all of the recording (``span_ns``) hide none of those inside.
    """
    ranges = _own_ranges(trace, host, longest_ns=int(_WHOLE_STEP * span_ns))
    length = ranges.end_ns - ranges.start_ns
    names, owner = np.unique(ranges.name, return_inverse=True)
    longest = np.argsort(-np.bincount(owner, weights=length, minlength=len(names)), kind="stable")[:MOST_NAMES]
    return {
        trace.strings[int(names[at])][:LONGEST_NAME]: Intervals.of(
            ranges.start_ns[owner == at], ranges.end_ns[owner == at]
        )
        for at in longest.tolist()
    }


def _own_ranges(trace: Trace, host: HostActivity, *, longest_ns: int) -> _Events:
    """The outermost ranges of the user's own on the training threads, those that are not too long."""

    def is_own(name: str) -> bool:
        return not _NOT_THE_USERS.search(name) and not _PHASE.search(name)

    rows = trace.rows(Category.ANNOTATION, named=is_own, threads=host.threads)
    return _outermost(trace, rows[trace.duration_ns[rows] <= longest_ns])


def _outermost(trace: Trace, rows: Int64) -> _Events:
    nested = Nested.of(trace, rows)
    rows = nested.row[nested.parent == NONE]
    nameless = np.full(len(rows), NONE, dtype=np.int64)
    return _Events(trace.start_ns[rows], trace.ends_ns(rows), trace.name[rows].astype(np.int64), nameless)


def _phases(trace: Trace, work: DeviceWork, attribution: Attribution, host: HostActivity) -> _Events:
    """Forward, backward, optimizer: on a device from the first kernel that was launched in the range to the last.

    Collectives are left out: they may end long after the phase that launched them.
    """
    rows = trace.rows(Category.ANNOTATION, named=_PHASE.search, threads=host.threads)
    ranges = _outermost(trace, rows)
    if len(work) == 0 or len(ranges.start_ns) == 0:
        return ranges
    kernels = np.flatnonzero(attribution.is_kernel & ~attribution.is_communication & (work.launch != NONE))
    launched = trace.start_ns[work.launch[kernels]]
    order = np.argsort(launched, kind="stable")
    kernels, launched = kernels[order], launched[order]
    first = np.searchsorted(launched, ranges.start_ns)
    last = np.searchsorted(launched, ranges.end_ns)
    kept = np.flatnonzero(last > first)
    start = np.array([work.start_ns[kernels[first[at] : last[at]]].min() for at in kept], dtype=np.int64)
    end = np.array([work.end_ns[kernels[first[at] : last[at]]].max() for at in kept], dtype=np.int64)
    return _Events(start, end, ranges.name[kept], ranges.operator[kept])


def _merged(kind: str, events: _Events, window_ns: int) -> LaneEvents:
    """At most ``MOST_EVENTS`` of at least one: runs of short events become one, with the name of the longest."""
    least = max(window_ns // FINEST, 1)
    first = _runs(events, least)
    while len(first) > MOST_EVENTS:
        least *= 2
        first = _runs(events, least)
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
    """Where runs begin: a long event is one by itself; short ones form one while the gaps between them are short."""
    is_short = events.end_ns - events.start_ns < least_ns
    reached = np.maximum.accumulate(events.end_ns)
    is_near = events.start_ns[1:] - reached[:-1] < least_ns
    joins = is_short[1:] & is_short[:-1] & is_near
    return np.flatnonzero(np.concatenate(([True], ~joins)))


def _renamed(lane: LaneEvents, used: Int32) -> LaneEvents:
    """Names as indices into the strings that are in use."""

    def new(old: Int32) -> Int32:
        return np.where(old == NONE, NONE, np.searchsorted(used, old)).astype(np.int32)

    return replace(lane, name=new(lane.name), operator=new(lane.operator))
