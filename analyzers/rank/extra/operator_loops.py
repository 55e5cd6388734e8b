"""Loops over many tensors, outside the model: small operators one after the other, for which one call for all of them
(``torch._foreach_*``, a fused optimizer) would do.

Python takes from one operator to the next as long as a small one takes itself. A call for many tensors leaves the
arithmetic, and on CPUs also a part of what each operator takes however little it computes, but for a fused optimizer.
It works in place, so that on CPUs copies and conversions of each tensor (``clone``, ``to``) are spared as well, but for
those of a batch that is prepared. Example: a loop that clips 400 gradients calls four operators of 1 µs for each, 1 µs
apart: 3.2 ms, of which a call for all leaves 0.8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np

from perfscope.analyzers.rank.extra.extra_work import kernel_loops
from perfscope.analyzers.rank.host_activity import HostActivity
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.kernel_classes import EMBEDDING, NORMALISATION, PRODUCTS, class_of_operator
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.analyzers.rank.loop_phases import IN_OPTIMIZER, OF_BATCH
from perfscope.analyzers.rank.nesting import Nested
from perfscope.analyzers.rank.partial import ExtraWork, LoopPart, OperatorLoops
from perfscope.analyzers.rank.pauses import PAUSE_NS
from perfscope.analyzers.rank.steps import Steps
from perfscope.frozen import dataclass
from perfscope.trace.trace import NONE, Bool, Category, Int64, Trace

REPEATED: Final = 20
"""Calls of one operator, in one part of one step, from which they are a loop's."""
_NAMED: Final = 6
"""Operators of a loop that are named, the most frequent."""
_ENTERING: Final = 0.5
"""Part of what an operator takes at least that it does not take inside a call for many tensors: on CPUs these call the
operators from C++ (of 400 tensors of 64 numbers, clipping then takes 0.3 of a loop's time, averaging 0.1 to 0.5, Adam's
update 0.5)."""
_FOR_LISTS: Final = re.compile(
    r"aten::(abs|add|addcdiv|addcmul|clamp(_min|_max)?|copy|div|exp|lerp|linalg_vector_norm|log|max|maximum|minimum|mul|neg"
    r"|norm|pow|reciprocal|rsqrt|sign|sqrt|square|sub|sum|zero|fill)_?$"
)
"""Operators of which torch has a version for lists of tensors, or that are a part of a norm: no layers of a model."""
_BESIDE: Final = re.compile(
    r"aten::(detach|item|to|_to_copy|clone|empty_like|zeros_like|isfinite|isnan|isinf|all|any)_?$"
)
"""What such loops call besides: they copy, convert and read tensors."""
_LAYERS: Final = (*PRODUCTS, NORMALISATION, EMBEDDING)
"""Classes of operators that no such loop calls."""
_FUSED: Final = re.compile(r"^Optimizer\.step#(?:Adam|AdamW|SGD|Adagrad)\.")
"""Steps of optimizers that torch has fused, on CPUs too."""


@dataclass(frozen=True, eq=False)
class _Outermost:
    """The outermost operators of the training threads, rows of the trace in their order; which of them are
    ``_FOR_LISTS``, which ``_BESIDE``, and which are layers of a model.
    """

    rows: Int64
    for_lists: Bool
    beside: Bool
    layers: Bool

    @classmethod
    def of(cls, trace: Trace, operators: Nested, host: HostActivity) -> _Outermost:
        rows = np.sort(operators.row[operators.parent == NONE])
        rows = rows[np.isin(trace.thread[rows], host.threads)]
        predicates = (_FOR_LISTS.match, _BESIDE.match, lambda name: class_of_operator(name) in _LAYERS)
        return cls(rows, *(trace.names_where(predicate, rows) for predicate in predicates))


@dataclass(frozen=True, eq=False)
class _Calls:
    """Operators of loops, rows of the trace; ``follows`` are those with no other operator between the one before and
    them.
    """

    rows: Int64
    follows: Bool

    def slots(self, trace: Trace) -> tuple[Int64, Int64]:
        """(end of the operator before, row) of each that follows on one."""
        places = np.flatnonzero(self.follows)
        return trace.ends_ns(self.rows[places - 1]), self.rows[places]


def operator_loops(
    trace: Trace, work: DeviceWork, steps: Steps, host: HostActivity, operators: Nested, parts: dict[str, Intervals]
) -> OperatorLoops:
    """Those of one rank, by the part of the training loop (``parts_of_loop``) that they are in."""
    outermost = _Outermost.of(trace, operators, host)
    if len(work):
        others = {name: part for name, part in parts.items() if name != IN_OPTIMIZER}
        called = {name: _calls(trace, outermost, part) for name, part in others.items()}
        loops = {
            name: kernel_loops(trace, work, steps, part, Intervals.of_rows(trace, called[name].rows))
            for name, part in others.items()
        }
        took = {name: loop.device.within(steps.start_ns, steps.end_ns) for name, loop in loops.items()}
    else:
        called = {name: _calls(trace, outermost, part) for name, part in parts.items()}
        loops = {name: _spared(trace, steps, calls, name) for name, calls in called.items()}
        took = {name: _took(trace, steps, calls) for name, calls in called.items()}
    return OperatorLoops(
        tuple(
            LoopPart(name, loop.count, took[name], _names(trace, called[name]))
            for name, loop in loops.items()
            if loop.count.any()
        ),
        optimizer=loops.get(IN_OPTIMIZER, _nothing(steps)) if not len(work) else None,
        others=_together(loops, steps),
    )


def _calls(trace: Trace, outermost: _Outermost, part: Intervals) -> _Calls:
    """The outermost operators in a part that are called again and again in one of its stretches, with no layer of a
    model between them: a model that is evaluated there adds and scales tensors, too.
    """
    inside = part.covers(trace.start_ns[outermost.rows])
    rows, listed = outermost.rows[inside], outermost.for_lists[inside]
    taken = listed | (outermost.beside[inside] & listed.any())
    stretch = np.searchsorted(part.start_ns, trace.start_ns[rows], side="right")
    run = stretch + np.cumsum(outermost.layers[inside])
    _, which, count = np.unique(np.stack((run, trace.name[rows])), axis=1, return_inverse=True, return_counts=True)
    taken &= count[which.reshape(-1)] >= REPEATED
    follows = taken & np.append(False, taken[:-1]) & (np.diff(stretch, prepend=-1) == 0)
    return _Calls(rows[taken], follows[taken])


def _spared(trace: Trace, steps: Steps, calls: _Calls, name: str) -> ExtraWork:
    """From one operator of a loop to the next, copies and conversions, and ``_ENTERING`` of what each other operator
    takes at least, with a fused optimizer all of it: as a share of the whole loop, since a thread that loses its core
    does so in proportion.
    """
    begin, rows = calls.slots(trace)
    step, between_ns = steps.of_host_time(trace.start_ns[rows]), np.maximum(trace.start_ns[rows] - begin, 0)
    fused = name == IN_OPTIMIZER and trace.names_where(_FUSED.match, trace.rows(Category.ANNOTATION)).any()
    whole = trace.names_where(_BESIDE.match, rows) & (name != OF_BATCH)
    share = _share(trace, step, between_ns, rows, whole, 1.0 if fused else _ENTERING) if len(rows) else 0.0
    end = begin + np.round(share * (trace.ends_ns(rows) - begin)).astype(np.int64)
    close = between_ns < PAUSE_NS
    return ExtraWork(Intervals.of(begin[close], end[close]), Intervals.empty(), steps.count(step))


def _share(trace: Trace, step: Int64, between_ns: Int64, rows: Int64, whole: Bool, of_least: float) -> float:
    """The share of loops that one call for all tensors spares, of the ``whole`` operators all. Steps call the same
    operators for the same tensors, so each takes the median of the steps that call as many: that leaves out when the
    thread had no core.
    """
    count = np.bincount(step[step >= 0])
    usual = np.bincount(count[count > 0]).argmax() if (count > 0).any() else 0
    chosen = np.isin(step, np.flatnonzero(count == usual)) if usual else step == step
    lines = (-1, usual or len(step))
    gap, took = (np.median(each[chosen].reshape(lines), axis=0) for each in (between_ns, trace.duration_ns[rows]))
    names, whole = trace.name[rows[chosen]].reshape(lines)[0], whole[chosen].reshape(lines)[0]
    least = np.full(len(trace.strings), np.inf)
    np.minimum.at(least, names, took)
    spared = gap + np.where(whole, took, of_least * least[names])
    return float(spared.sum() / max((gap + took).sum(), 1))


def _took(trace: Trace, steps: Steps, calls: _Calls) -> Int64:
    """Time of the loops' operators in each step, and from one to the next."""
    begin, rows = calls.slots(trace)
    close = trace.start_ns[rows] - begin < PAUSE_NS
    between = Intervals.of(begin[close], trace.start_ns[rows][close])
    return between.union(Intervals.of_rows(trace, calls.rows)).within(steps.host_start_ns, steps.host_end_ns)


def _names(trace: Trace, calls: _Calls) -> tuple[str, ...]:
    name, count = np.unique(trace.name[calls.rows], return_counts=True)
    return tuple(trace.strings[at] for at in name[np.argsort(-count, kind="stable")][:_NAMED].tolist())


def _together(loops: Mapping[str, ExtraWork], steps: Steps) -> ExtraWork:
    """All but the optimizer's."""
    others = [loop for name, loop in loops.items() if name != IN_OPTIMIZER]
    host, device = (Intervals.empty().union(*parts) for parts in ([o.host for o in others], [o.device for o in others]))
    return ExtraWork(host, device, sum((loop.count for loop in others), np.zeros(len(steps), dtype=np.int64)))


def _nothing(steps: Steps) -> ExtraWork:
    return ExtraWork(Intervals.empty(), Intervals.empty(), np.zeros(len(steps), dtype=np.int64))
