"""Steps of a loop that nothing marks: by the batches that it takes, or by the repetition of its kernels."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives.collectives import POINT_TO_POINT
from perfscope.analyzers.rank.collectives.communication import device_communication, kind_of, kind_of_kernel
from perfscope.analyzers.rank.host_activity import loader_rows, training_threads
from perfscope.analyzers.rank.kernel_classes import OPTIMIZER, class_of_kernel
from perfscope.analyzers.rank.launches import DeviceWork, blocking_calls
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Category, Int32, Int64, Trace

_SAME: Final = 0.999
"""Share of the launches that must be of the same kernel as those one step before. In seven recordings of training and
inference it is 1; layer by layer a single step of a transformer repeats to 0.93 to 0.97."""

_TIMES: Final = 3
"""Least number of steps."""

_KERNELS: Final = 10
"""Least number of kernels in a step: a benchmark that repeats one operator has no steps."""

_TRIED: Final = 200
"""Periods tried at most."""

_OFTEN: Final = 32
"""How often the rarest kernel of a step is launched in it, at most: once in each micro-batch, say."""


def edges_by_batches(trace: Trace, work: DeviceWork, stepped_ns: Int64) -> tuple[int, Int64]:
    """(number of the first whole step, when the first batch of that and of each later step was taken, and when the last
    one ended); (1, empty) where not all steps take as many batches. ``stepped_ns`` are the ends of the optimizer steps.
    """
    threads = training_threads(trace, work)
    taken = trace.start_ns[loader_rows(trace, threads)]
    stepped_ns = _before_batches(stepped_ns, taken)
    first = np.append(0, np.searchsorted(taken, stepped_ns))
    batches = np.diff(first)
    if not batches.any() or (batches[1:] != batches[-1]).any() or batches[0] > batches[-1]:
        return 1, taken[:0]
    whole = int(batches[0] < batches[-1])
    edges = taken[first[whole:][first[whole:] < len(taken)]]
    # A step that begins after the last optimizer step is cut.
    return whole, edges if edges[-1] > stepped_ns[-1] else np.append(edges, _loop_end_ns(trace, work, threads))


def _before_batches(stepped_ns: Int64, taken_ns: Int64) -> Int64:
    """Of optimizer steps several of which share a batch, as those of a GAN do, the last of each batch; all of them
    where not every batch has as many.
    """
    last = np.flatnonzero(np.diff(np.searchsorted(taken_ns, stepped_ns)) > 0)
    apart = np.diff(last)
    if len(apart) == 0 or (apart != apart[0]).any() or max(last[0] + 1, len(stepped_ns) - 1 - last[-1]) > apart[0]:
        return stepped_ns
    return stepped_ns[last[0] :: apart[0]]


def _loop_end_ns(trace: Trace, work: DeviceWork, threads: Int64) -> int:
    """The end of the last operator or range, or where the profiler begins to wait after it."""
    ended = int(trace.ends_ns(trace.rows(Category.CPU_OP, Category.ANNOTATION, threads=threads)).max())
    waits = trace.start_ns[blocking_calls(trace, work, threads)]
    after = waits[waits >= ended]
    return int(after[0]) if len(after) else ended


def edges_by_repetition(trace: Trace, work: DeviceWork) -> Int64:
    """Times on the host between the steps, their begin and their end included; empty where no repetition is plain.

    Between two steps the host takes longest to the next launch: to load a batch, say. That time belongs to the step
    that it leads to. Ranks that communicate must all begin their steps at the same place of the loop, whatever their
    hosts do: which kernels are launched tells it.
    """
    nothing = np.empty(0, dtype=np.int64)
    launched = np.flatnonzero((trace.category[work.row] == Category.KERNEL) & (work.launch != NONE))
    if len(launched) < _TIMES * _KERNELS:
        return nothing
    called = trace.start_ns[work.launch[launched]]
    order = np.argsort(called, kind="stable")
    kernel = trace.name[work.row[launched[order]]]
    communicates = bool(device_communication(trace, work).any())
    period = _period(kernel)
    if period is None:
        return nothing
    called, returned = called[order], trace.ends_ns(work.launch[launched])[order]
    pause = called[period:] - returned[period - 1 : -1]
    whole = len(pause) // period
    usual = np.median(pause[: whole * period].reshape(whole, period), axis=0)
    # Before the first launch the host may have done anything.
    before = np.concatenate(([called[0] - usual[0]], returned))
    first: int | None = int(usual.argmax())
    if communicates:
        first = _first_of_all_ranks(trace, kernel[:period], alike=not _send_to_one_another(trace, work.row[launched]))
    # Kernels of one graph are launched together: no step begins between them.
    return nothing if first is None else distinct(before[first::period].astype(np.int64))


def _send_to_one_another(trace: Trace, kernels: Int64) -> bool:
    """Do kernels send from one rank to another, other than those that are recorded to be all-to-alls?"""
    sent = kernels[trace.names_where(lambda name: kind_of_kernel(name) in POINT_TO_POINT, kernels)]
    arguments = trace.collectives
    known = arguments.row[[kind_of(trace.strings[kind]) not in POINT_TO_POINT for kind in arguments.kind.tolist()]]
    return not np.isin(sent, known).all()


def _first_of_all_ranks(trace: Trace, kernel: Int32, *, alike: bool) -> int | None:
    """Which of the launches of one step, from any place of it on, is the first on every rank: the one behind the
    optimizer's, else, where all launch the same (``alike``; stages of a pipeline do not), the kernel of which there are
    fewest; None where several places are like that.
    """
    kinds = {name: class_of_kernel(trace.strings[name]) for name in distinct(kernel).tolist()}
    of_optimizer = np.isin(kernel, [name for name, kind in kinds.items() if kind == OPTIMIZER])
    last = _before_longest_stretch(np.flatnonzero(of_optimizer), len(kernel))
    if last is not None or not alike:
        return None if last is None else (last + 1) % len(kernel)
    names, count = np.unique(kernel, return_counts=True)
    fewest = min(zip(count.tolist(), (trace.strings[name] for name in names.tolist()), names.tolist(), strict=True))[2]
    # As seen backwards, the stretch is in front of it.
    behind = _before_longest_stretch(len(kernel) - 1 - np.flatnonzero(kernel == fewest)[::-1], len(kernel))
    return None if behind is None else len(kernel) - 1 - behind


def _before_longest_stretch(places: Int64, period: int) -> int | None:
    """The place behind which, in the cycle, most follow until the next one; None without any, or where that is so of
    several.
    """
    if len(places) == 0:
        return None
    until_next = np.diff(places, append=places[0] + period)
    longest = np.flatnonzero(until_next == until_next.max())
    return int(places[longest[0]]) if len(longest) == 1 else None


def _period(kernel: Int32) -> int | None:
    """After how many launches the kernels repeat; None where they do not, or sooner than steps do."""
    for period in _candidates(kernel):
        if (kernel[period:] == kernel[:-period]).mean() >= _SAME:
            return period if period >= _KERNELS else None
    return None


def _candidates(kernel: Int32) -> list[int]:
    """How far apart the rarest kernels come again, ascending; those that are left in the recording often enough."""
    distinct, count = np.unique(kernel, return_counts=True)
    found: set[int] = set()
    for name in distinct[np.argsort(count, kind="stable")]:
        place = np.flatnonzero(kernel == name)
        # A kernel may be launched several times in a step.
        times = range(1, min(_OFTEN, len(place) - 2) + 1)
        found.update(int(np.median(place[often:] - place[:-often])) for often in times)
        if len(found) >= _TRIED:
            break
    return sorted(period for period in found if 1 <= period <= len(kernel) // _TIMES)
