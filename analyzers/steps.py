"""Where one rank's training steps begin and end."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from perfscope.analyzers.launches import DeviceWork
from perfscope.trace import NONE, Category, Int64, Trace
from perfscope.vocabulary import NVTX_STEP_PREFIX, PROFILER_STEP_PREFIX

_STEP_NAME = re.compile(rf"^(?:{re.escape(PROFILER_STEP_PREFIX)}|{re.escape(NVTX_STEP_PREFIX)})(\d+)$")
_OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#")

MARKED = "step annotations"
BY_OPTIMIZER = "optimizer steps (nothing numbers the steps, so they are counted from the recording's start)"
UNMARKED = "nothing: the whole recording is one window"


@dataclass(frozen=True, eq=False)
class Steps:
    """Windows of one rank's steps on its own clock, ascending, one entry a step.

    ``start_ns``/``end_ns`` is the window that the account covers: the device's on a rank with device work, the host's
    otherwise. ``host_start_ns``/``host_end_ns`` is the host's window of the same step. ``number`` is the job's own step
    number; with no marks at all there is one window and ``marked`` is False.
    """

    number: Int64
    host_start_ns: Int64
    host_end_ns: Int64
    start_ns: Int64
    end_ns: Int64
    source: str
    marked: bool

    def __len__(self) -> int:
        return len(self.number)

    def indices_of(self, number: Int64) -> Int64:
        """Index of each of these step numbers, all of which must be here."""
        order = np.argsort(self.number, kind="stable")
        return order[np.searchsorted(self.number[order], number)]

    def of_host_time(self, time_ns: Int64) -> Int64:
        """Index of the step in whose host window each time lies; -1 outside all."""
        return _window_of(time_ns, self.host_start_ns, self.host_end_ns)

    def of_device_time(self, time_ns: Int64) -> Int64:
        """Index of the step in whose window of the account each time lies; -1 outside all."""
        return _window_of(time_ns, self.start_ns, self.end_ns)


def find_steps(trace: Trace, work: DeviceWork) -> Steps:
    """Find the steps by annotation, else by optimizer steps, else take the whole recording as one window.

    Steps without device work are dropped on a rank that has any. Raises ValueError when the trace holds no event that
    could bound a window.
    """
    for number, start, end, source in (_by_annotation(trace), _by_optimizer(trace)):
        if len(number):
            return _windows(trace, work, number, start, end, source)
    start_ns, end_ns = _extent(trace, work)
    one = np.array([0], dtype=np.int64)
    start, end = np.array([start_ns], dtype=np.int64), np.array([end_ns], dtype=np.int64)
    return Steps(one, start, end, start, end, UNMARKED, marked=False)


def _window_of(time_ns: Int64, start_ns: Int64, end_ns: Int64) -> Int64:
    index = np.searchsorted(start_ns, time_ns, side="right") - 1
    inside = (index >= 0) & (time_ns < end_ns[np.maximum(index, 0)])
    return np.where(inside, index, -1)


def _by_annotation(trace: Trace) -> tuple[Int64, Int64, Int64, str]:
    """Host ranges named ``ProfilerStep#N`` or our NVTX ``perfscope::step#N``; the device's shadows where none."""
    is_step = trace.names_where(lambda name: _STEP_NAME.match(name) is not None)
    for category in (Category.ANNOTATION, Category.CPU_OP, Category.GPU_ANNOTATION):
        rows = np.flatnonzero(is_step & (trace.category == category))
        if len(rows):
            break
    number = np.array([_step_number(trace.name_of(int(row))) for row in rows], dtype=np.int64)
    # One number twice: both names mark the same step, or a second capture holds it again. The first one counts.
    number, first = np.unique(number, return_index=True)
    rows = rows[first]
    order = np.argsort(trace.start_ns[rows], kind="stable")
    rows, number = rows[order], number[order]
    return number, trace.start_ns[rows], trace.end_ns[rows], MARKED


def _step_number(name: str) -> int:
    match = _STEP_NAME.match(name)
    assert match is not None
    return int(match[1])


def _by_optimizer(trace: Trace) -> tuple[Int64, Int64, Int64, str]:
    """From the end of one outermost optimizer step to the end of the next; the first, cut by the edge, is dropped."""
    is_step = trace.names_where(lambda name: _OPTIMIZER_STEP.match(name) is not None)
    rows = np.flatnonzero(is_step & (trace.category == Category.ANNOTATION))
    if len(rows) < 2:
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing, nothing, BY_OPTIMIZER
    end = np.maximum.accumulate(trace.end_ns[rows])
    outermost = np.concatenate(([True], trace.start_ns[rows][1:] >= end[:-1]))
    edges = trace.end_ns[rows[outermost]]
    return np.arange(1, len(edges), dtype=np.int64), edges[:-1], edges[1:], BY_OPTIMIZER


def _windows(trace: Trace, work: DeviceWork, number: Int64, start: Int64, end: Int64, source: str) -> Steps:
    """Turn host windows into the windows of the account."""
    # Steps follow one another without overlap; a range that ends late must not claim the next step's events.
    end = np.minimum(end, np.append(start[1:], np.iinfo(np.int64).max))
    host = Steps(number, start, end, start, end, source, marked=True)
    if len(work) == 0:
        # The host's windows meet: what lies between two annotations belongs to the step that it ends.
        return Steps(number, start, end, start, np.append(start[1:], end[-1:]), source, marked=True)
    # Work whose launch is not recorded was launched before the recording began, unless no launch is recorded at all.
    known = work.launch != NONE
    called = work.launch_start_ns(trace)
    step = host.of_host_time(called)
    is_kernel = trace.category[work.row] == Category.KERNEL
    launched = (step >= 0) & (known | ~known.any())
    first = np.full(len(number), np.iinfo(np.int64).max, dtype=np.int64)
    last = np.full(len(number), np.iinfo(np.int64).min, dtype=np.int64)
    opening = np.flatnonzero(launched & (is_kernel | ~is_kernel.any()))
    in_order = opening[np.argsort(called[opening], kind="stable")]
    present, earliest = np.unique(step[in_order], return_index=True)
    first[present] = work.start_ns[in_order[earliest]]
    np.maximum.at(last, step[launched], work.end_ns[launched])
    used = last > first
    if not used.any():
        return Steps(number, start, end, start, np.append(start[1:], end[-1:]), source, marked=True)
    window_start = np.maximum.accumulate(first[used])
    window_end = np.append(window_start[1:], max(int(last[used].max()), int(window_start[-1])))
    # A step missing between two others (no device work in it) must not lengthen the one before it.
    adjacent = np.append(np.diff(np.flatnonzero(used)) == 1, True)
    window_end = np.where(adjacent, window_end, np.maximum(last[used], window_start))
    whole = window_end > window_start
    return Steps(
        number[used][whole], start[used][whole], end[used][whole], window_start[whole], window_end[whole], source,
        marked=True,
    )  # fmt: skip


def _extent(trace: Trace, work: DeviceWork) -> tuple[int, int]:
    """First start and last end of the device's work, of all host work where there is none."""
    if len(work):
        return int(work.start_ns.min()), int(work.end_ns.max())
    rows = trace.rows(Category.CPU_OP, Category.ANNOTATION, Category.RUNTIME)
    if len(rows) == 0 or trace.end_ns[rows].max() <= trace.start_ns[rows].min():
        raise ValueError("no operator, kernel or annotation with a duration: nothing can be accounted for")
    return int(trace.start_ns[rows].min()), int(trace.end_ns[rows].max())
