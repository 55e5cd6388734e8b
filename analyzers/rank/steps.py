"""Where one rank's training steps begin and end.

A step has two windows, because the device lags behind the host:

- The *host window* is the step's annotation (``ProfilerStep#N``, ``perfscope::step#N``); without annotations, a range
  that the program names so (``step 3``, ``iteration_3``, ``train_step``), up to the next one; without those, from the
  first batch that is taken after one ``Optimizer.step`` to the first one after the next, where all steps take as
  many, else from the end of one ``Optimizer.step`` to the end of the next (of several optimizers that step one after
  the other, of the last); without those, from one return of the same kernels to the next (``repetition``).
- The *device window* begins when the host begins the step and the device has done all work of earlier steps, at the
  latest with the step's first kernel; it ends where the next step's begins. The last one ends when the host has ended
  the step and the device its work. So windows are whole periods: what the device idles before a step's first kernel,
  for a batch to be loaded say, belongs to that step, the first and a lone one included. The time breakdown covers the
  device windows; on a rank without device work it covers the host windows, each extended to the start of the next.

A profiler often begins with an idle device, in a loop in which the device would still work on the step before. Where
nothing of that is recorded, a device that is behind its host at the first step's end counts as idle before the step's
first kernel for as long as it usually is in steps whose first launch comes as late; without any, as so far behind as it
is at the end, or at that of the last step if that is more: such a step may come again after it. It is so at most until
other work on that kernel's stream begins, a copy of the batch say. Where the first work of a stream was queued, or a
blocking call waits, the device was busy until then.

Example: host windows [0, 100), [100, 200) with kernels launched at 10, 60, 110 that run in [30, 50), [80, 140),
[150, 220) give the device windows [30, 140), [140, 220): at 100 the device is 40 behind, so the first step begins with
its first kernel; the second one includes the 10 until its first kernel. Had the second kernel run in [70, 90), the
windows were [0, 100), [100, 220).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.rank.completeness import whole_steps
from perfscope.analyzers.rank.launches import DeviceWork, done_ns, earlier_work_done_ns, launched_before_recording
from perfscope.analyzers.rank.optimizer_turns import turns_of_optimizers
from perfscope.frozen import dataclass
from perfscope.recording.vocabulary import NVTX_STEP_PREFIX, PROFILER_STEP_PREFIX
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Bool, Category, Int64, ParseReport, Trace

Edges = Callable[[Trace, DeviceWork], Int64]
"""Times on the host between steps, the begin of the first and the end of the last included; empty: not known."""
EdgesByBatches = Callable[[Trace, DeviceWork, Int64], tuple[int, Int64]]
"""The same, with the number of the first one before, from the ends of the optimizer steps."""

_STEP_NAME = re.compile(rf"^(?:{re.escape(PROFILER_STEP_PREFIX)}|{re.escape(NVTX_STEP_PREFIX)})(\d+)$")
_OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#")

_OF_PROGRAM = re.compile(
    r"\W*(?P<base>(?:\w+(?:::|/))?(?:(?:train|training|global|model|profiler)[ _-]?)?(?:step|iter|iteration|batch))"
    r"(?:[ _#:=-]*(?P<number>\d+))?\W*$|\[pl\]\[profile\]run_training_batch$",
    re.IGNORECASE,
)
"""What programs call a range around a step. The last is Lightning's (``PyTorchProfiler``)."""

MARKED = "step annotations"
BY_RANGES = "ranges of the program"
BY_OPTIMIZER = "optimizer steps (nothing numbers the steps, so they are counted from the recording's start)"
BY_REPETITION = "repetition of the kernels (nothing marks the steps, so they are counted from the recording's start)"
UNMARKED = "no step markers"
CUT = "no step is whole in a file that ends early"

_NEVER: Final = np.iinfo(np.int64).max

_TICK: Final = 0.1
"""Marks that are shorter than this share of the time to the next one do not show where the last step ends."""

_MOST_OF_TIME: Final = 0.5
"""Share of the time from the first to the last that ranges around steps take."""

_AS_LATE: Final = 0.5
"""A step's first launch came as late as another's where the host took this share of that time to it, or more. Where
several loader workers deliver together, the host waits once for all of them, and is as many steps ahead by then."""


@dataclass(frozen=True, eq=False)
class Steps:
    """Windows of one rank's steps on its own clock, ascending, one entry per step.

    ``start_ns``/``end_ns`` is the window that the time breakdown covers: the device window on a rank with device work,
    else the host window. ``host_start_ns``/``host_end_ns`` is the host window of the same step. ``number`` is the job's
    own step number. Where nothing marks steps, there is one window and ``marked`` is False. ``assumed_ns`` is how much
    of each window's begin is no more than assumed: so much earlier the step may have begun.
    """

    number: Int64
    host_start_ns: Int64
    host_end_ns: Int64
    start_ns: Int64
    end_ns: Int64
    assumed_ns: Int64
    source: str
    marked: bool
    left_out: tuple[int, ...] = ()
    """Numbers of steps of which device work is missing, in a recording of which other steps are whole."""

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
        """Index of the step in whose device window (host window without device work) each time lies; -1 outside all."""
        return _window_of(time_ns, self.start_ns, self.end_ns)

    def count(self, step: Int64, weights: Int64 | None = None) -> Int64:
        """Number of events in each step, or the sum of their weights. ``step`` is the index of each event's step."""
        inside = step >= 0
        weights = weights if weights is None else weights[inside]
        return np.bincount(step[inside], weights=weights, minlength=len(self)).astype(np.int64)


def lost_work(report: ParseReport, steps: Steps) -> bool:
    """Is device work missing within the window, as in a file that ends early, has it in no order of time, and no whole
    step?
    """
    return report.truncated and report.all_operators and not steps.marked


def find_steps(
    trace: Trace, work: DeviceWork, threads: Int64, by_batches: EdgesByBatches | None = None,
    unmarked: Edges | None = None,
) -> Steps:  # fmt: skip
    """Find the steps by annotations, else by optimizer steps; else the whole recording is one. ``threads`` are the
    training threads.

    Between optimizer steps ``by_batches`` is asked where their batches are taken. Before the whole recording counts as
    one, ``unmarked`` is asked for times on the host between steps that nothing marks.
    On a rank with device work, steps without any are left out. Raises ValueError when the trace has no event that could
    bound a window.
    """
    found = UNMARKED
    for number, start, end, source in _marks(trace, work, by_batches, unmarked):
        whole = whole_steps(trace, start, end)
        if whole.any():
            steps = _windows(trace, work, number[whole], start[whole], end[whole], source)
            return replace(steps, left_out=tuple(number[~whole].tolist()))
        found = CUT if len(number) else found
    start_ns, end_ns, assumed_ns = _extent(trace, work, threads)
    cut_ns = trace.parse_report.complete_until_ns
    if cut_ns is not None and start_ns < cut_ns:
        end_ns = min(end_ns, cut_ns)
    one = np.array([0], dtype=np.int64)
    start, end = np.array([start_ns], dtype=np.int64), np.array([end_ns], dtype=np.int64)
    return Steps(one, start, end, start, end, np.array([assumed_ns], dtype=np.int64), found, marked=False)


def _window_of(time_ns: Int64, start_ns: Int64, end_ns: Int64) -> Int64:
    index = np.searchsorted(start_ns, time_ns, side="right") - 1
    inside = (index >= 0) & (time_ns < end_ns[np.maximum(index, 0)])
    return np.where(inside, index, -1)


def _marks(
    trace: Trace, work: DeviceWork, by_batches: EdgesByBatches | None, unmarked: Edges | None
) -> Iterator[tuple[Int64, Int64, Int64, str]]:
    """(numbers, begins, ends, source) of the steps' host windows, by each means, the best first; empty: by none."""
    yield _by_annotation(trace)
    yield _by_ranges(trace)
    yield _by_optimizer(trace, work, by_batches)
    edges = unmarked(trace, work) if unmarked is not None else np.empty(0, dtype=np.int64)
    yield np.arange(len(edges[1:]), dtype=np.int64), edges[:-1], edges[1:], BY_REPETITION


def _by_annotation(trace: Trace) -> tuple[Int64, Int64, Int64, str]:
    """Ranges named ``ProfilerStep#N`` or ``perfscope::step#N`` (NVTX): the host's, else the device's copies of them."""
    # A range that is cut to nothing has no step in it.
    is_step = trace.names_where(_STEP_NAME.match) & (trace.duration_ns > 0)
    for category in (Category.ANNOTATION, Category.CPU_OP, Category.GPU_ANNOTATION):
        rows = np.flatnonzero(is_step & (trace.category == category))
        if len(rows):
            break
    number = np.array([_step_number(trace.name_of(int(row))) for row in rows], dtype=np.int64)
    # A number may occur twice: both names mark one step, or a second capture recorded it again. The first one counts.
    number, first = np.unique(number, return_index=True)
    rows = rows[first]
    order = np.argsort(trace.start_ns[rows], kind="stable")
    rows, number = rows[order], number[order]
    start, end = trace.start_ns[rows], trace.ends_ns(rows)
    # Some profilers write a step's copy on the device as a mere tick, which shows where it begins.
    followed = np.flatnonzero(np.diff(number) == 1)
    if len(followed) and np.median((end - start)[followed] / np.diff(start)[followed]) < _TICK:
        number, start, end = number[followed], start[followed], start[followed + 1]
    return number, start, end, MARKED


def _by_ranges(trace: Trace) -> tuple[Int64, Int64, Int64, str]:
    """Ranges that the program names as steps, by their numbers where all have one: those that hold most of the time,
    one after another on one thread. Where optimizers step more or less often, they are parts or epochs.
    """
    rows = trace.rows(Category.ANNOTATION, Category.CPU_OP, named=_OF_PROGRAM.match)
    names = [_OF_PROGRAM.match(trace.name_of(int(row))) for row in rows]
    bases = np.array([str(name and name["base"]).lower() for name in names])
    numbers = np.array([int(name["number"]) if name and name["number"] else NONE for name in names], dtype=np.int64)
    found = np.empty(0, dtype=np.int64)
    for base in dict.fromkeys(bases.tolist()):
        for thread in distinct(trace.thread[rows[bases == base]]).tolist():
            mine = np.flatnonzero((bases == base) & (trace.thread[rows] == thread))
            if _are_steps(trace, rows[mine], numbers[mine]) and _long(trace, rows[mine]) > _long(trace, rows[found]):
                found = mine
    start, end = trace.start_ns[rows[found]], trace.ends_ns(rows[found])
    number = numbers[found]
    return (np.arange(len(found)) if NONE in number else number), start, end, BY_RANGES


def _long(trace: Trace, rows: Int64) -> int:
    return int(trace.duration_ns[rows].sum())


def _are_steps(trace: Trace, rows: Int64, number: Int64) -> bool:
    """Do these ranges follow one another, most of the time and in the order of their numbers, a step in each?"""
    start, end = trace.start_ns[rows], trace.ends_ns(rows)
    if len(rows) < 2 or (start[1:] < end[:-1]).any() or _long(trace, rows) < _MOST_OF_TIME * (end[-1] - start[0]):
        return False
    stepped = trace.rows(Category.ANNOTATION, Category.CPU_OP, named=_OPTIMIZER_STEP.match)
    if len(stepped) and abs(len(_last_of_steps(trace, stepped)) - len(rows)) > 1:
        return False
    return NONE in number or bool((np.diff(number) > 0).all())


def _step_number(name: str) -> int:
    match = _STEP_NAME.match(name)
    assert match is not None
    return int(match[1])


def _by_optimizer(trace: Trace, work: DeviceWork, batches: EdgesByBatches | None) -> tuple[Int64, Int64, Int64, str]:
    """By the outermost optimizer steps, each step with the number of its own; without the first where it is cut."""
    rows = trace.rows(Category.ANNOTATION, Category.CPU_OP, named=_OPTIMIZER_STEP.match)  # kineto wrote both
    ended = np.append(0, np.maximum.accumulate(trace.ends_ns(rows)))
    stepped = trace.ends_ns(_last_of_steps(trace, rows[trace.start_ns[rows] >= ended[: len(rows)]]))
    first, edges = batches(trace, work, stepped) if batches is not None else (1, stepped[:0])
    if len(edges) == 0:
        edges = stepped
    return np.arange(first, first + len(edges[1:]), dtype=np.int64), edges[:-1], edges[1:], BY_OPTIMIZER


def _last_of_steps(trace: Trace, rows: Int64) -> Int64:
    """Of steps of several optimizers that take turns (one for embeddings, one for the rest), that after which the host
    takes longest to the next one of any: the last of each training step. Where all have one name, by what they update.
    """
    names, which, count = np.unique(trace.name[rows], return_inverse=True, return_counts=True)
    if len(names) == 1:
        turns = turns_of_optimizers(trace, trace.ends_ns(rows))
        return rows[turns - 1 :: turns]
    if len(names) < 2 or count.max() - count.min() > 1:
        return rows
    until_next = trace.start_ns[rows[1:]] - trace.ends_ns(rows[:-1])
    apart = [float(np.median(until_next[which[:-1] == name])) for name in range(len(names))]
    last = which == int(np.argmax(apart))
    return np.asarray(rows[last], dtype=np.int64)


def _windows(trace: Trace, work: DeviceWork, number: Int64, start: Int64, end: Int64, source: str) -> Steps:
    """Find the windows of steps by their host windows."""
    # Steps do not overlap; a range that ends late must not take the next step's events.
    end = np.minimum(end, np.append(start[1:], _NEVER))
    followed = np.append(np.diff(number) == 1, False)
    # The time between two annotations belongs to the first of the two steps.
    until = np.where(followed, np.append(start[1:], _NEVER), end)
    host = Steps(number, start, until, start, until, np.zeros_like(start), source, marked=True)
    if len(work) == 0:
        return host
    launched = _Launched.of(trace, work)
    opening = launched.opening_ns(start, until)
    used = np.isin(np.arange(len(number)), host.of_host_time(launched.called_ns))
    if not used.any():
        return host
    closed = np.minimum(launched.opening_ns(end, np.full(len(end), _NEVER)), np.maximum(end, launched.done_ns(end)))
    behind = np.maximum(launched.done_ns(start), earlier_work_done_ns(trace, work))
    begin = np.minimum(opening, np.maximum(start, behind))
    stop = np.where(followed, np.append(begin[1:], _NEVER), closed)
    # A device that lags behind its host idled before the first step's kernels for as long as before those of steps
    # alike. Where none are, it lagged as much at the step's begin as at its end, or at that of the last one.
    first = np.append(True, ~followed[:-1]) & (begin <= start)
    ends = np.flatnonzero(~followed)
    lag, lead, idle = np.maximum(stop - until, 0), launched.first_ns(start, until) - start, opening - begin
    assumed = np.zeros_like(begin)
    for place in np.flatnonzero(first & used):
        alike = used & ~first & (lead >= _AS_LATE * lead[place])
        late = int(max(lag[place], lag[ends[np.searchsorted(ends, place)]])) if lag[place] else 0
        if late and alike.any():
            late = int(opening[place] - start[place] - np.median(idle[alike]))
        free = launched.stream_free_ns(int(start[place]), int(until[place]))
        assumed[place] = max(0, min(opening[place], free, start[place] + late) - begin[place])
    begin += assumed
    begin = np.maximum.accumulate(begin)
    if source == BY_REPETITION:  # these begin anywhere, as while the work of the step before goes on
        closed -= _overlap_ns(launched, begin, end, followed)
    stop = np.where(followed, np.append(begin[1:], _NEVER), np.maximum(closed, begin))
    used &= stop > begin
    return Steps(number[used], start[used], until[used], begin[used], stop[used], assumed[used], source, marked=True)


def _overlap_ns(launched: _Launched, begin_ns: Int64, end_ns: Int64, followed: Bool) -> int:
    """For how long the work of most steps goes on when the next one has begun, as where the next batch is prepared on
    another stream: the window of the last one, which no other follows, would be longer by that.
    """
    before = np.flatnonzero(followed)
    if len(before) == 0:
        return 0
    return max(int(np.median(launched.done_ns(end_ns[before]) - begin_ns[before + 1])), 0)


@dataclass(frozen=True, eq=False)
class _Launched:
    """Device work in the order of its launches: parallel arrays."""

    called_ns: Int64
    start_ns: Int64
    end_ns: Int64
    is_kernel: Bool
    stream: Int64

    @classmethod
    def of(cls, trace: Trace, work: DeviceWork) -> _Launched:
        """All work whose launch is recorded, and what was launched before the recording began.

        Where launch calls were lost later too, work without one does not say when the recording began. Where no launch
        is recorded at all, all work counts as launched when it starts.
        """
        known = work.launch != NONE
        called = work.launch_start_ns(trace)
        early = launched_before_recording(trace, work)
        called[early] = -1
        complete = not known.any() or bool((known | early).all())
        counted = known | complete
        chosen = np.flatnonzero(counted)
        chosen = chosen[np.argsort(called[chosen], kind="stable")]
        kernel = trace.category[work.row] == Category.KERNEL
        return cls(
            called[chosen],
            work.start_ns[chosen],
            work.end_ns[chosen],
            (kernel | ~kernel.any())[chosen],
            trace.stream[work.row[chosen]],
        )

    def opening_ns(self, begin_ns: Int64, until_ns: Int64) -> Int64:
        """Start of the kernel launched first in each host window; ``_NEVER`` where none is."""
        return self._of_first(self.start_ns, begin_ns, until_ns)

    def first_ns(self, begin_ns: Int64, until_ns: Int64) -> Int64:
        """When that kernel was launched."""
        return self._of_first(self.called_ns, begin_ns, until_ns)

    def stream_free_ns(self, begin_ns: int, until_ns: int) -> int:
        """Start of what is launched first in a host window, a copy say, on the stream of the first kernel launched in
        it: what came before on that stream was done by then. ``_NEVER`` without any kernel.
        """
        first, last = np.searchsorted(self.called_ns, (begin_ns, until_ns))
        kernels = np.flatnonzero(self.is_kernel[first:last])
        if len(kernels) == 0:
            return int(_NEVER)
        stream = self.stream[first:last]
        return int(self.start_ns[first + np.flatnonzero(stream == stream[kernels[0]])[0]])

    def _of_first(self, column: Int64, begin_ns: Int64, until_ns: Int64) -> Int64:
        called = self.called_ns[self.is_kernel]
        first = np.searchsorted(called, begin_ns)
        known = first < np.searchsorted(called, until_ns)
        return np.where(known, np.append(column[self.is_kernel], _NEVER)[first], _NEVER)

    def done_ns(self, time_ns: Int64) -> Int64:
        """When all work launched before each time has ended."""
        return done_ns(self.called_ns, self.end_ns, time_ns)


def _extent(trace: Trace, work: DeviceWork, threads: Int64) -> tuple[int, int, int]:
    """(Begin, end, how much later the begin is than the host's) of the whole recording.

    It holds all work of the device, and the host's time from its first operator, range or function to its last: what it
    prepares before the first launch takes part of it. A device that ends behind its host is taken to have begun behind
    it. Where neither operators nor functions are recorded, ranges do not show when the recording began.
    """
    host = trace.rows(Category.CPU_OP, Category.ANNOTATION, Category.PYTHON if len(work) else Category.RUNTIME)
    if len(work) == 0:
        if len(host) == 0 or trace.ends_ns(host).max() <= trace.start_ns[host].min():
            raise ValueError("no operator, kernel or annotation has a duration, so there is no time to break down")
        return int(trace.start_ns[host].min()), int(trace.ends_ns(host).max()), 0
    first, last = int(work.start_ns.min()), int(work.end_ns.max())
    host = host[np.isin(trace.thread[host], threads)]
    if not np.isin(trace.category[host], (Category.CPU_OP, Category.PYTHON)).any():
        return first, last, 0
    begun, ended = int(trace.start_ns[host].min()), int(trace.ends_ns(host).max())
    begin = min(first, max(begun + max(last - ended, 0), earlier_work_done_ns(trace, work)))
    return begin, max(ended, last), max(begin - begun, 0)
