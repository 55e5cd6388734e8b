"""What the training loop computes beside the training: between the optimizer's step and the forward, between the
backward and the optimizer's step, and in hooks of the backward.

Rollouts and other forwards without gradients, metrics, statistics of gradients and averages of parameters are such
work, in however many operators. Loading, evaluations, checkpoints, collections and the compiler have names of their
own, and communication is accounted for by itself.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.host_activity import (
    BETWEEN,
    COLLECTING,
    COMPILING,
    EVALUATING,
    LOADER_STARTING,
    SAVING,
    HostActivity,
)
from perfscope.analyzers.rank.host_lane import LATER
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.kernel_classes import EMBEDDING, PRODUCTS, class_of_operator
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.analyzers.rank.loop_phases import AUTOGRAD, IN_OPTIMIZER, OF_BATCH, outside_the_model
from perfscope.analyzers.rank.nesting import Nested
from perfscope.analyzers.rank.partial import LoopWork
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.time_breakdown import COMMUNICATION_OPERATOR
from perfscope.recording.vocabulary import EVALUATION, NO_GRADIENTS
from perfscope.trace.trace import NONE, Category, Int64, Trace

HOOKS: Final = "hooks of the backward"
"""Name of what functions run that a program has registered on parameters and gradients."""

_NAMED: Final = (COLLECTING, COMPILING, LOADER_STARTING, SAVING)
_NO_GRADIENTS: Final = frozenset({EVALUATION, NO_GRADIENTS})
"""Ranges around forwards without gradients."""
_TOP: Final = 3
"""Operators that are named, those that take longest."""
_LAYERS: Final = (*PRODUCTS, EMBEDDING)
"""Classes of operators that show a model."""
_TO_DEVICE: Final = re.compile("^Memcpy HtoD|^CopyHostToDevice")
"""Copies from the host, by CUPTI's and ROCm's names."""
ENGINE: Final = "autograd::engine::evaluate_function: "
"""What names of the engine's functions begin with."""
_OF_ENGINE: Final = re.compile(
    r"\w+Backward\w*$|torch::|(?:\w+::)*(?:CompiledFunction|reducer)|"
    r"aten::(?:add|addcmul|alias|as_strided|clone|contiguous|copy|detach|div|empty\w*|expand|fill|mul|new_\w+|reshape|sum|"
    r"sum_to_size|to|_to_copy|view|zero|zeros\w*)_?$"
)
"""What autograd's engine calls beside a node's own operators: it adds gradients up, casts and keeps them; and reducers
copy and scale them."""
_SENDING: Final = re.compile(
    rf"{COMMUNICATION_OPERATOR.pattern}|^torch(?:::|\.)distributed(?:::|\.)(?:ddp\.)?reducer\b"
)
"""Operators that start communication or wait for it, and those of DistributedDataParallel's reducer."""
_SHARDED: Final = re.compile(r"^(?:FSDP::|FullyShardedDataParallel\.|fsdp::|perfscope::reduce)")
"""Ranges and operators of frameworks whose own hooks reduce gradients."""


def parts_of_loop(trace: Trace, work: DeviceWork, steps: Steps, host: HostActivity) -> dict[str, Intervals]:
    """The optimizer's step and the loop between two phases, without loading and evaluations, by name. The loop between
    optimizer and forward is ``OF_BATCH`` from the first batch on that arrives there.
    """
    elsewhere = host.loading.union(_evaluations(steps, host))
    parts = outside_the_model(trace, host.threads)
    # Before the backward it is the model, or its loss, that autograd has to see.
    parts = {name: part.subtract(elsewhere) for name, part in parts.items() if not name.endswith("backward")}
    return parts | _before_and_after(parts.pop(BETWEEN, Intervals.empty()), _arrivals(trace, work, host))


def loop_work(
    trace: Trace, work: DeviceWork, steps: Steps, host: HostActivity, operators: Nested, parts: dict[str, Intervals],
    communication: Intervals,
) -> tuple[LoopWork, ...]:  # fmt: skip
    """That of one rank, by the part of the loop that it is in; ``operators`` are nested, ``parts`` those of
    ``parts_of_loop``, and in ``communication`` threads of the host carry it out.
    """
    outermost = operators.row[operators.parent == NONE]
    rows = np.sort(outermost[np.isin(trace.thread[outermost], host.threads)])
    rows = rows[~trace.names_where(_SENDING.match, rows)]
    found = {}
    named = (host.named[name] for name in _NAMED)
    sending = Intervals.of_rows(trace, trace.rows(Category.CPU_OP, named=_SENDING.match, threads=host.threads))
    elsewhere = sending.union(_evaluations(steps, host), *named)
    if not len(work):
        # Where a range marks no backward, reducers wait for the others behind the last of autograd's functions. And
        # long pauses are no work of operators, whatever few of these are beside them.
        elsewhere = elsewhere.union(communication, host.pauses)
    for name, part in parts.items():
        if name != IN_OPTIMIZER:
            inside = rows[part.covers(trace.start_ns[rows])]
            found[name] = part.subtract(elsewhere), inside
    if not len(work):
        found[HOOKS] = _hooks(trace, host, operators)
    forwards = trace.rows(Category.ANNOTATION, named=_NO_GRADIENTS.__contains__, threads=host.threads)
    return tuple(
        LoopWork(
            name,
            took_ns=took_ns(trace, work, steps, part),
            forwards=steps.count(steps.of_host_time(_starts(trace, forwards, part))),
            operators=longest(trace, inside),
            of_model=bool(trace.names_where(lambda operator: class_of_operator(operator) in _LAYERS, inside).any()),
        )
        for name, (part, inside) in found.items()
        if len(inside)
    )


def _evaluations(steps: Steps, host: HostActivity) -> Intervals:
    """Those of a few steps. What most steps have is no evaluation of the training, but a part of it: a rollout, say."""
    evaluating = host.named[EVALUATING]
    most = 2 * np.count_nonzero(evaluating.within(steps.host_start_ns, steps.host_end_ns)) > len(steps)
    return Intervals.empty() if most else evaluating


def _arrivals(trace: Trace, work: DeviceWork, host: HostActivity) -> Int64:
    """When hosts have taken a batch from the loader, or told the device to copy it."""
    copies = work.launch[(work.launch != NONE) & trace.names_where(_TO_DEVICE.search, work.row)]
    return np.sort(np.concatenate((host.loading.end_ns, trace.ends_ns(copies))))


def _before_and_after(between: Intervals, arrivals_ns: Int64) -> dict[str, Intervals]:
    """The loop between optimizer and forward, from the first arrival in each stretch on the batch's preparation."""
    first = np.append(arrivals_ns, LATER)[np.searchsorted(arrivals_ns, between.start_ns)]
    arrived = np.minimum(first, between.end_ns)
    parts = {
        BETWEEN: Intervals.of(between.start_ns, arrived),
        OF_BATCH: Intervals.of(arrived, between.end_ns),
    }
    return {name: part for name, part in parts.items() if len(part)}


def _hooks(trace: Trace, host: HostActivity, operators: Nested) -> tuple[Intervals, Int64]:
    """(when hooks run that a program has registered, their operators): from the first operator within one of autograd's
    functions that is not the function's, the engine's or a reducer's to the last. Nothing where a framework's hooks
    reduce gradients.
    """
    if any(_SHARDED.match(name) for name in trace.strings):
        return Intervals.empty(), np.empty(0, dtype=np.int64)
    of_engine = trace.names_where(AUTOGRAD.match, operators.row)
    # Hooks for gradients that are there run within the node that keeps these.
    around = of_engine | trace.names_where("torch::autograd::AccumulateGrad".__eq__, operators.row)
    parent = operators.parent
    own = of_engine | trace.names_where(_OF_ENGINE.match, operators.row)
    own |= trace.names_where(COMMUNICATION_OPERATOR.match, operators.row)
    others = np.flatnonzero((parent != NONE) & around[parent] & ~own)
    others = others[np.isin(trace.thread[operators.row[others]], host.threads)]
    rows, function = operators.row[others], parent[others]
    first = np.flatnonzero(np.diff(function, prepend=-1))
    start, end = trace.start_ns[rows], trace.ends_ns(rows)
    return Intervals.of(start[first], np.maximum.reduceat(end, first) if len(first) else end), rows


def took_ns(trace: Trace, work: DeviceWork, steps: Steps, part: Intervals) -> Int64:
    """Time of a part in each step: the host's; of a device from the first to the last kernel of a stretch."""
    if not len(work):
        return part.within(steps.host_start_ns, steps.host_end_ns)
    launched = np.flatnonzero((work.launch != NONE) & (trace.category[work.row] == Category.KERNEL))
    at_ns = trace.start_ns[work.launch[launched]]
    inside = part.covers(at_ns)
    launched, at_ns = launched[inside], at_ns[inside]
    order = np.argsort(at_ns, kind="stable")
    launched, stretch = launched[order], np.searchsorted(part.start_ns, at_ns[order], side="right")
    first = np.flatnonzero(np.diff(stretch, prepend=-1))
    if not len(first):
        return np.zeros(len(steps), dtype=np.int64)
    begin, until = (
        np.minimum.reduceat(work.start_ns[launched], first),
        np.maximum.reduceat(work.end_ns[launched], first),
    )
    return Intervals.of(begin, until).within(steps.start_ns, steps.end_ns)


def _starts(trace: Trace, rows: Int64, part: Intervals) -> Int64:
    """When those ranges begin that do so in a part."""
    starts = trace.start_ns[rows]
    return starts[part.covers(starts)]


def longest(trace: Trace, rows: Int64, most: int = _TOP) -> tuple[str, ...]:
    """Names of the operators that take longest in all, without what autograd's engine puts before them."""
    name, of = np.unique(trace.name[rows], return_inverse=True)
    took = np.bincount(of, weights=trace.duration_ns[rows])
    names = (trace.strings[at] for at in name[np.argsort(-took, kind="stable")][:most].tolist())
    return tuple(name.removeprefix(ENGINE) for name in names)
