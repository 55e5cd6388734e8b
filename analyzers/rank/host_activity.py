"""What the training threads of one rank do: load data, run operators and launches, wait for the device."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.kernel_classes import EMBEDDING, PRODUCTS, class_of_kernel, class_of_operator
from perfscope.analyzers.rank.launches import GRAPH_LAUNCH, DeviceWork, blocking_calls
from perfscope.analyzers.rank.loop_phases import AUTOGRAD, DDP_FORWARD, LOOP, OPTIMIZER_RANGE, by_phase, stretches
from perfscope.analyzers.rank.pauses import PAUSE_NS, by_function, by_range, find_pauses
from perfscope.frozen import dataclass
from perfscope.recording.vocabulary import (
    DATALOADER,
    DATALOADER_SAMPLER,
    DATALOADER_START,
    DATALOADER_STOP,
    EVALUATION,
    FORWARD,
    NVTX_STEP_PREFIX,
    PIPELINE_PREFIX,
    PROFILER_STEP_PREFIX,
)
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NEVER, NONE, Category, Int32, Int64, Trace

_LOADER: Final = re.compile(rf"^enumerate\(DataLoader\)#|^{re.escape(DATALOADER)}$|DataLoader\w*\.__next__$")
"""torch's own annotation of ``__next__``, PerfScope's, and that of other loaders with such a name."""

_LOADING: Final = re.compile(
    r"(?:\[\w.]*\]|\w+(?:::|/|\.))*(?:\w*data[ _-]?load(?:er|ing)?(?:[ _.:]+(?:next|wait|fetch))?(?:\(\))?"
    r"|enumerate\(DataLoader\)|(?:load|get|next|fetch)[ _-]?(?:data|batch)|(?:data|batch)[ _-]?(?:load|wait|fetch))"
    r"[\W_]*\d*\W*$",
    re.IGNORECASE,
)
"""What programs call a range around it themselves."""

_SAMPLER: Final = re.compile(rf"^{re.escape(DATALOADER_SAMPLER)}$|torch/utils/data/dataloader\.py\(\d+\): _next_index$")

COLLECTING: Final = "garbage collection"

SEARCH: Final = "torch.distributed.ddp.reducer::search_unused_parameters"
"""What DDP's reducer (reducer.cpp) does after each forward with ``find_unused_parameters=True``: an operator."""
"""Host work: Python's garbage collector runs."""

EVALUATING: Final = "evaluation"
"""Host work: the model is evaluated."""

SAVING: Final = "checkpoint saving"
"""Host work: a checkpoint is saved."""

LOADER_STARTING: Final = "starting and stopping the data loader's workers"
"""Host work: a data loader makes an iterator, or an iterator ends."""

LIMIT: Final = "FullyShardedDataParallel.rate_limiter"
"""Name of the range in which FSDP's host waits before it gathers more parameters."""

BETWEEN: Final = f"{LOOP}optimizer and forward"
"""Host work: what the training loop does after the optimizer's step and before the next forward, where no Python
function is known: it takes batches that no data loader hands over, logs, saves."""

COMPILING: Final = "torch.compile"
"""Host work: the compiler traces, compiles and builds guards. No part of it computes or launches anything of the
model's, though operators are recorded in it.
"""

_COMPILING: Final = re.compile(r" \(dynamo_timed\)$|^(?:dynamo|entire_(?:frame|backward)_compile)$")
"""What the compiler records of its own phases (torch ``_dynamo/utils.py``)."""

_NAMED_HOST: Final = {
    COLLECTING: re.compile(r"^gc\.collect|\bgc: |garbage.collect|^perfscope::gc", re.IGNORECASE),
    EVALUATING: re.compile(rf"^{re.escape(EVALUATION)}$"),
    LOADER_STARTING: re.compile(
        rf"^{re.escape(DATALOADER_START)}$|^{re.escape(DATALOADER_STOP)}$"
        r"|torch/utils/data/dataloader\.py\(\d+\): (?:__iter__|_shutdown_workers)$"
    ),
    SAVING: re.compile(r"torch\.save|save_checkpoint|_save_state|checkpoint.*sav|sav.*checkpoint", re.IGNORECASE),
}
"""Host work that annotations or Python calls name."""

COMPILED_CODE: Final = re.compile(
    r"^(autograd::engine::evaluate_function: )?(CompiledFunction|Torch-Compiled Region|## Call CompiledFxGraph)"
)
"""Operators around whole graphs of compiled code, forward and backward: what these run has operators and calls of its
own."""
_ENGINE: Final = re.compile("^autograd::engine::")
_FORWARD: Final = re.compile(
    rf"^(?:{re.escape(FORWARD)}|{re.escape(DDP_FORWARD)}|FullyShardedDataParallel\.forward|FSDP::root_pre_forward)$"
)
"""Ranges that begin with a forward: the recorder's, and those of DistributedDataParallel, FSDP1 and FSDP2."""

_WRAPPED: Final = re.compile(rf"^(?:{re.escape(DDP_FORWARD)}|FullyShardedDataParallel\.forward)$")
"""Ranges around forwards that torch records, in a wrapper of the model."""

_ZERO_GRAD: Final = re.compile(r"^Optimizer\.zero_grad#")
_OF_MODEL: Final = (*PRODUCTS, EMBEDDING)
"""Classes of operators and kernels that a model runs and a loop does not."""
_MODEL_RANGE: Final = re.compile(rf"^FSDP::|^FullyShardedDataParallel\.|^{re.escape(PIPELINE_PREFIX)}")
"""Ranges in which a model's parameters are gathered, or its micro-batches pass a pipeline's stage."""

STEP: Final = re.compile(f"{re.escape(PROFILER_STEP_PREFIX)}|{re.escape(NVTX_STEP_PREFIX)}")


@dataclass(frozen=True, eq=False)
class HostActivity:
    """Sets of time on the rank's own clock, over its training threads.

    ``loading`` is the time in a data loader's ``__next__``. ``operators`` covers framework operators and runtime calls;
    ``computing`` is the part of it in which operators do the work themselves: an optimizer on the CPU.
    ``blocked_start_ns`` and ``blocked_end_ns`` are the single blocking calls (``blocking_calls``), ascending. ``named``
    has host work by its name (``COLLECTING``, ``COMPILING``, ``EVALUATING``, ``LOADER_STARTING``, ``SAVING``,
    Python functions, ``BETWEEN``, phases of the loop as in ``by_phase``).
    """

    loading: Intervals
    sampling: Intervals
    """When a data loader's sampler draws indices."""
    operators: Intervals
    computing: Intervals
    blocked_start_ns: Int64
    blocked_end_ns: Int64
    blocked_row: Int64
    """Rows of the trace of those calls."""
    pauses: Intervals
    """When the host was in no operator and no call for long, or for a reason that has a name, such as garbage
    collection."""
    named: dict[str, Intervals]
    searching: Intervals
    """In DistributedDataParallel's search for parameters that get no gradient."""
    between: Intervals
    """From each end of the optimizer's step to the next forward; from the trace's begin to a forward that is first, to
    its end from a step that is last. Where no range marks forwards, each stretch ends sooner: where a batch is taken, a
    step begins, gradients are thrown away, or the model begins to compute.
    """
    stretches: dict[str, Intervals]
    """Others in which the training loop calls collectives for itself (``loop_phases.stretches``), but for evaluations.
    """
    threads: Int64
    """Indices of the training threads: the main one, autograd's, and those that launch device work."""

    def blocked_by_end(self) -> tuple[Int64, Int64]:
        """Start and end of each synchronization in the order of their ends."""
        order = np.argsort(self.blocked_end_ns, kind="stable")
        return self.blocked_start_ns[order], self.blocked_end_ns[order]


def host_activity(trace: Trace, work: DeviceWork) -> HostActivity:
    """What one rank's training threads do."""
    threads = training_threads(trace, work)
    blocked = blocking_calls(trace, work, threads)
    loading = Intervals.of_rows(trace, loader_rows(trace, threads))
    operators = Intervals.of_rows(trace, trace.rows(Category.CPU_OP, Category.RUNTIME, threads=threads))
    compiling = Intervals.of_rows(
        trace, trace.rows(Category.CPU_OP, Category.ANNOTATION, named=_COMPILING.search, threads=threads)
    )
    operators = operators.subtract(compiling).subtract(_pauses_of_compiled(trace, threads))
    busy = operators if len(work) else Intervals.of_rows(trace, _running(trace, threads)).subtract(compiling)
    pauses = find_pauses(busy.union(loading))
    if len(trace.rows(Category.CPU_OP, threads=threads)) == 0 and len(operators):
        # Only calls are recorded: a host that pauses nowhere between two of them is in the operators that make them.
        between = Intervals.of(operators.start_ns[:1], operators.end_ns[-1:])
        operators = between.subtract(pauses).subtract(loading)
    named = {
        name: Intervals.of_rows(
            trace, trace.rows(Category.ANNOTATION, Category.PYTHON, named=pattern.search, threads=threads)
        )
        for name, pattern in _NAMED_HOST.items()
    }
    named[COMPILING] = compiling
    short = [part.subtract(operators) for name, part in named.items() if name != EVALUATING]
    functions = by_function(trace, pauses, threads)
    known = Intervals.empty().union(*functions.values(), *named.values())
    for name, part in by_range(trace, pauses.subtract(known), threads).items():
        functions[name] = functions.get(name, Intervals.empty()).union(part)
    between = _between(trace, work, threads)
    named[EVALUATING] = named[EVALUATING].union(_evaluating(trace, threads, between))
    unnamed = between.intersect(pauses).subtract(Intervals.empty().union(*functions.values()))
    functions[BETWEEN] = unnamed.subtract(named[EVALUATING])
    unnamed = pauses.subtract(named[EVALUATING].union(*functions.values(), *short))
    for name, part in by_phase(trace, unnamed, threads).items():
        functions[name] = functions.get(name, Intervals.empty()).union(part)
    return HostActivity(
        loading=loading,
        sampling=Intervals.of_rows(
            trace, trace.rows(Category.ANNOTATION, Category.PYTHON, named=_SAMPLER.search, threads=threads)
        ),
        operators=operators,
        computing=_computing(trace, threads).intersect(operators) if len(work) else Intervals.empty(),
        blocked_start_ns=trace.start_ns[blocked],
        blocked_end_ns=trace.ends_ns(blocked),
        blocked_row=blocked,
        pauses=pauses.union(*short),
        named={**{name: part.subtract(Intervals.empty().union(*short)) for name, part in functions.items()}, **named},
        searching=Intervals.of_rows(trace, trace.rows(Category.CPU_OP, named=SEARCH.__eq__, threads=threads)),
        between=between,
        stretches={
            name: part.subtract(named[EVALUATING]).subtract(between) for name, part in stretches(trace, threads).items()
        },
        threads=threads,
    )


def _computing(trace: Trace, threads: Int64) -> Intervals:
    """Where operators neither call the runtime nor each other for as long as a pause: no launch takes that long."""
    calls = trace.rows(Category.RUNTIME, threads=threads)
    rows = np.concatenate((trace.rows(Category.CPU_OP, threads=threads), calls))
    edges = np.sort(np.concatenate((trace.start_ns[rows], trace.ends_ns(rows))))
    long = np.diff(edges) >= PAUSE_NS
    return Intervals.of(edges[:-1][long], edges[1:][long]).subtract(Intervals.of_rows(trace, calls))


def _pauses_of_compiled(trace: Trace, threads: Int64) -> Intervals:
    """Pauses within the code that ``torch.compile`` makes: ranges around it hold Python, also between two kernels."""
    rows = trace.rows(Category.CPU_OP, Category.RUNTIME, threads=threads)
    compiled = trace.names_where(COMPILED_CODE.match, rows)
    if not compiled.any():
        return Intervals.empty()
    return find_pauses(Intervals.of_rows(trace, rows[~compiled])).intersect(Intervals.of_rows(trace, rows[compiled]))


def _running(trace: Trace, threads: Int64) -> Int64:
    """Operators and calls of a rank on CPUs, without what autograd's engine calls them in, which covers hooks, too."""
    rows = trace.rows(Category.CPU_OP, Category.RUNTIME, threads=threads)
    return rows[~trace.names_where(_ENGINE.match, rows)]


def _between(trace: Trace, work: DeviceWork, threads: Int64) -> Intervals:
    """As in ``HostActivity``; nothing where neither forwards nor an optimizer's steps are marked."""
    until = np.sort(trace.start_ns[trace.rows(Category.ANNOTATION, named=_FORWARD.match, threads=threads)])
    rows = trace.rows(Category.ANNOTATION, Category.CPU_OP, named=OPTIMIZER_RANGE.match, threads=threads)
    stepped = np.sort(trace.ends_ns(rows))
    if len(until):
        stepped = np.sort(np.append(stepped, trace.start_ns[0]))
    elif len(stepped):
        until = _ends_of_loop(trace, work, threads, stepped)
        until = until[until >= stepped[0]]
    if not len(until):
        return Intervals.empty()
    last = stepped[np.searchsorted(stepped, until, side="right") - 1]
    # Of forwards without a step between them, the first one counts.
    first = np.diff(last, prepend=last[:1] - 1) > 0
    begin, until = last[first], until[first]
    if stepped[-1] > until[-1]:
        begin, until = np.append(begin, stepped[-1]), np.append(until, -NEVER)
    return Intervals.of(begin, until)


def _evaluating(trace: Trace, threads: Int64, between: Intervals) -> Intervals:
    """Where the model computes ``between`` an optimizer's step and the next forward, as much as in a forward or more:
    an evaluation of the module that a wrapper holds, whose own forwards have ranges. Nothing in recordings in which
    evaluations have ranges, as forwards then do.
    """
    forwards = Intervals.of_rows(trace, trace.rows(Category.ANNOTATION, named=_WRAPPED.match, threads=threads))
    recorded = len(trace.rows(Category.ANNOTATION, named=FORWARD.__eq__, threads=threads))
    if recorded or not len(forwards) or not len(between):
        return Intervals.empty()
    rows = trace.rows(Category.CPU_OP, named=lambda name: class_of_operator(name) in PRODUCTS, threads=threads)
    start_ns, end_ns = trace.start_ns[rows], trace.ends_ns(rows)
    order = np.argsort(start_ns)
    start_ns, end_ns = start_ns[order], end_ns[order]
    first, last = np.searchsorted(start_ns, between.start_ns), np.searchsorted(start_ns, between.end_ns)
    of_forward = np.searchsorted(start_ns, forwards.end_ns) - np.searchsorted(start_ns, forwards.start_ns)
    whole = last - first >= max(float(np.median(of_forward)), 1.0)
    return Intervals.of(start_ns[first[whole]], end_ns[last[whole] - 1])


def _ends_of_loop(trace: Trace, work: DeviceWork, threads: Int64, stepped_ns: Int64) -> Int64:
    """Where the loop may have ended that follows on the optimizer's step, where no range marks forwards, in time order:
    a batch is taken, a step begins, gradients are thrown away, the model begins to compute.

    Gradients that the loop throws away right after the step, before anything runs, do not end it: it goes on then.
    """
    ran = np.sort(trace.start_ns[trace.rows(Category.CPU_OP, Category.RUNTIME, threads=threads)])
    thrown = trace.start_ns[trace.rows(Category.ANNOTATION, named=_ZERO_GRAD.match, threads=threads)]
    step = stepped_ns[np.maximum(np.searchsorted(stepped_ns, thrown, side="right") - 1, 0)]
    thrown = thrown[np.searchsorted(ran, thrown) > np.searchsorted(ran, step)]
    rows = (
        loader_rows(trace, threads),
        trace.rows(Category.ANNOTATION, named=STEP.match, threads=threads),
        trace.rows(Category.ANNOTATION, named=_MODEL_RANGE.match, threads=threads),
        trace.rows(Category.CPU_OP, named=_is_of_model, threads=threads),
        trace.rows(Category.RUNTIME, named=GRAPH_LAUNCH.match, threads=threads),
        _launches_of_model(trace, work),
    )
    return np.sort(np.concatenate((thrown, *(trace.start_ns[each] for each in rows))))


def _is_of_model(operator: str) -> bool:
    return AUTOGRAD.match(operator) is not None or class_of_operator(operator) in _OF_MODEL


def _launches_of_model(trace: Trace, work: DeviceWork) -> Int64:
    """Calls that launch kernels that only a model runs, for traces without operators."""
    kernels = np.flatnonzero((work.launch != NONE) & (trace.category[work.row] == Category.KERNEL))
    return work.launch[kernels[trace.names_where(_kernel_is_of_model, work.row[kernels])]]


def _kernel_is_of_model(kernel: str) -> bool:
    return class_of_kernel(kernel) in _OF_MODEL


def loader_rows(trace: Trace, threads: Int64) -> Int64:
    """Outermost ranges in a data loader's ``__next__`` on the given threads, in time order; where there are none, those
    that the program names so.
    """
    rows = trace.rows(Category.ANNOTATION, Category.CPU_OP, named=_LOADER.search, threads=threads)
    if len(rows) == 0:
        rows = trace.rows(Category.ANNOTATION, Category.CPU_OP, named=_LOADING.match, threads=threads)
    if len(rows) == 0:
        return rows
    # torch's annotation and PerfScope's nest around one call: the outermost counts, per thread.
    order = np.lexsort((trace.start_ns[rows], trace.thread[rows]))
    rows = rows[order]
    outermost = []
    end, thread = 0, -1
    for row in rows:
        if trace.thread[row] != thread or trace.start_ns[row] >= end:
            outermost.append(row)
            thread, end = trace.thread[row], trace.start_ns[row] + trace.duration_ns[row]
    return np.sort(np.array(outermost, dtype=np.int64))


def training_threads(trace: Trace, work: DeviceWork) -> Int64:
    """The main thread (the one with the step annotations), autograd's, and those that launch device work.

    Where nothing marks steps, the thread with the most operator time counts as the main thread; without operators, that
    with the most time in ranges.
    """
    main = step_threads(trace)
    operators = trace.rows(Category.CPU_OP)
    if len(main) == 0:
        rows = operators if len(operators) else trace.rows(Category.ANNOTATION)
        time = np.bincount(trace.thread[rows], weights=trace.duration_ns[rows], minlength=1)
        main = np.array([int(np.argmax(time))][: len(rows)], dtype=np.int64)
    autograd = trace.thread[trace.rows(Category.CPU_OP, named=AUTOGRAD.match)]
    launching = trace.thread[work.launch[work.launch != NONE]]
    return distinct(np.concatenate((main, autograd, launching))).astype(np.int64)


def step_threads(trace: Trace) -> Int32:
    """The thread of each step annotation."""
    return trace.thread[trace.rows(Category.ANNOTATION, named=STEP.match)]
