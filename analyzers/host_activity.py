"""What the host threads that train were doing: in the data loader, in operators and launches, blocked in a wait."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.intervals import Intervals
from perfscope.analyzers.launches import DeviceWork
from perfscope.trace import NONE, Bool, Category, Int64, Trace
from perfscope.vocabulary import DATALOADER, EVALUATION, NVTX_STEP_PREFIX, PROFILER_STEP_PREFIX

_LOADER: Final = re.compile(rf"^enumerate\(DataLoader\)#|^{re.escape(DATALOADER)}$|DataLoader\w*\.__next__$")
"""torch's own annotation of ``__next__``, ours, and other loaders' of the same spelling."""

_BLOCKING_CALL: Final = re.compile(
    r"^(cuda|hip)(Stream|Device|Event|Thread)Synchronize|^(cuda|hip)Memcpy(_ptsz|DtoH|HtoD)?$|^cu(Ctx|Stream|Event)Synchronize"
)
"""Runtime calls that return only when the device has caught up. Asynchronous copies are not among them."""

COLLECTING: Final = "garbage collection"
"""Name of the host work in which the interpreter collects garbage."""

EVALUATING: Final = "evaluation"
"""Name of the host work in which the model is evaluated."""

_NAMED_HOST: Final = {
    COLLECTING: re.compile(r"^gc\.collect|\bgc: |garbage.collect|^perfscope::gc", re.IGNORECASE),
    EVALUATING: re.compile(rf"^{re.escape(EVALUATION)}$"),
    "checkpoint": re.compile(r"torch\.save|save_checkpoint|_save_state|checkpoint.*sav|sav.*checkpoint", re.IGNORECASE),
}
"""Host work that has a visible name in annotations or Python calls."""

_AUTOGRAD: Final = "autograd::engine::evaluate_function"


@dataclass(frozen=True, eq=False)
class HostActivity:
    """Sets of time on the rank's own clock, over the threads that train.

    ``operators`` covers framework operators and runtime calls; ``blocked_start_ns``/``blocked_end_ns`` are the single
    blocking waits on the device, ascending; ``named`` holds host work with a visible name.
    """

    loading: Intervals
    operators: Intervals
    blocked_start_ns: Int64
    blocked_end_ns: Int64
    blocked_row: Int64
    """Rows of the trace of those waits."""
    named: dict[str, Intervals]
    threads: Int64
    """Indices of the threads that train: the main one and autograd's."""


def host_activity(trace: Trace, work: DeviceWork) -> HostActivity:
    """What one rank's training threads did."""
    threads = training_threads(trace, work)
    on_threads = np.isin(trace.thread, threads)
    busy = np.flatnonzero(on_threads & np.isin(trace.category, (Category.CPU_OP, Category.RUNTIME)))
    blocked = np.flatnonzero(
        on_threads
        & (trace.category == Category.RUNTIME)
        & trace.names_where(lambda name: _BLOCKING_CALL.match(name) is not None)
    )
    return HostActivity(
        loading=loader_intervals(trace, threads),
        operators=Intervals.of(trace.start_ns[busy], trace.end_ns[busy]),
        blocked_start_ns=trace.start_ns[blocked],
        blocked_end_ns=trace.end_ns[blocked],
        blocked_row=blocked,
        named={name: _named(trace, on_threads, pattern) for name, pattern in _NAMED_HOST.items()},
        threads=threads,
    )


def loader_rows(trace: Trace, threads: Int64) -> Int64:
    """Outermost ranges in a data loader's ``__next__`` on the given threads, in time order."""
    hit = trace.names_where(lambda name: _LOADER.search(name) is not None)
    rows = np.flatnonzero(
        hit & np.isin(trace.thread, threads) & np.isin(trace.category, (Category.ANNOTATION, Category.CPU_OP))
    )
    if len(rows) == 0:
        return rows
    # torch's annotation and ours nest around the same call: the outermost counts, on each thread by itself.
    order = np.lexsort((trace.start_ns[rows], trace.thread[rows]))
    rows = rows[order]
    outermost = []
    end, thread = 0, -1
    for row in rows:
        if trace.thread[row] != thread or trace.start_ns[row] >= end:
            outermost.append(row)
            thread, end = trace.thread[row], trace.start_ns[row] + trace.duration_ns[row]
    return np.sort(np.array(outermost, dtype=np.int64))


def loader_intervals(trace: Trace, threads: Int64) -> Intervals:
    """Time inside a data loader's ``__next__``."""
    rows = loader_rows(trace, threads)
    return Intervals.of(trace.start_ns[rows], trace.end_ns[rows])


def training_threads(trace: Trace, work: DeviceWork) -> Int64:
    """The main thread (which carries the steps), autograd's, and those that launch device work.

    Where nothing marks steps, the thread with the most operator time stands for the main one.
    """
    is_step = trace.names_where(lambda name: name.startswith((PROFILER_STEP_PREFIX, NVTX_STEP_PREFIX)))
    main = trace.thread[is_step & (trace.category == Category.ANNOTATION)]
    operators = trace.rows(Category.CPU_OP)
    if len(main) == 0 and len(operators):
        time = np.bincount(trace.thread[operators], weights=trace.duration_ns[operators])
        main = np.array([int(np.argmax(time))])
    autograd = trace.thread[
        trace.names_where(lambda name: name.startswith(_AUTOGRAD)) & (trace.category == Category.CPU_OP)
    ]
    launching = trace.thread[work.launch[work.launch != NONE]]
    return np.unique(np.concatenate((main, autograd, launching))).astype(np.int64)


def _named(trace: Trace, on_threads: Bool, pattern: re.Pattern[str]) -> Intervals:
    rows = np.flatnonzero(
        on_threads
        & np.isin(trace.category, (Category.ANNOTATION, Category.PYTHON))
        & trace.names_where(lambda name: pattern.search(name) is not None)
    )
    return Intervals.of(trace.start_ns[rows], trace.end_ns[rows])
