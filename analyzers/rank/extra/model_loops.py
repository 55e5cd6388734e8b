"""Loops of a model over rows, samples or time steps: the same small operators again and again, with no layer between
them, in its forward, its backward, or a function of autograd that a program has written.

One operator on the whole tensor (gathering, scattering, a reduction by segments) does the same. In the backward of a
loop over slices each of them fills a gradient of the whole tensor.
Example: a backward that copies row by row calls aten::select and aten::copy_ 2,000 times each.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.extra.loop_work import ENGINE, longest, took_ns
from perfscope.analyzers.rank.host_activity import COMPILED_CODE, HostActivity
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.kernel_classes import EMBEDDING, NORMALISATION, PRODUCTS, class_of_operator
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.analyzers.rank.loop_phases import IN_BACKWARD, IN_FORWARD, LOOP, split
from perfscope.analyzers.rank.nesting import Nested
from perfscope.analyzers.rank.partial import LoopWork
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.time_breakdown import COMMUNICATION_OPERATOR
from perfscope.frozen import dataclass
from perfscope.trace.trace import NONE, Bool, Int64, Trace

LOOPS: Final = "loops of the model"
"""Name of what all of them do."""
REPEATED: Final = 100
"""Calls of one operator with no layer between them from which they are a loop's."""
_FORWARD: Final = (IN_FORWARD, f"{LOOP}forward and backward")
"""The loss often follows the model's own forward."""
_OF_PARAMETERS: Final = re.compile(f"(?:{ENGINE})?torch::autograd::AccumulateGrad$")
"""What autograd does once for each parameter: no loop of the model's."""
_LAYERS: Final = (*PRODUCTS, NORMALISATION, EMBEDDING)
"""Classes of operators that are layers."""


@dataclass(frozen=True, eq=False)
class _Siblings:
    """Operators that have many siblings, one call after the other: indices of the nested operators, and for each a
    number that two share with no layer between them.
    """

    index: Int64
    run: Int64


def model_loops(
    trace: Trace, work: DeviceWork, steps: Steps, host: HostActivity, operators: Nested
) -> tuple[LoopWork, ...]:
    """Those of one rank together, none or one; ``operators`` are nested. The forward's operators are named, where it
    loops: the backward's follow from these.
    """
    siblings = _siblings(trace, operators, _with_layers(trace, operators))
    rows = operators.row[siblings.index]
    name = trace.name[rows].astype(np.int64)
    _, which, count = np.unique(siblings.run * len(trace.strings) + name, return_inverse=True, return_counts=True)
    repeated = (count[which] >= REPEATED) & np.isin(trace.thread[rows], host.threads)
    repeated &= ~trace.names_where(_OF_PARAMETERS.match, rows) & ~trace.names_where(COMMUNICATION_OPERATOR.match, rows)
    if not repeated.any():
        return ()
    index, run, rows = siblings.index[repeated], siblings.run[repeated], rows[repeated]
    phases = split(trace, Intervals.of(trace.start_ns[:1], trace.end_ns.max(keepdims=True)), host.threads)
    forward, backward = (
        Intervals.empty().union(*(phases[name] for name in names if name in phases)).covers(trace.start_ns[rows])
        for names in (_FORWARD, (IN_BACKWARD,))
    )
    of_model = forward | backward
    if not of_model.any():
        return ()
    named = forward if forward.any() else backward
    around = operators.parent[index[named]]
    within = operators.row[np.unique(around[around != NONE])]
    loops = LoopWork(
        LOOPS,
        took_ns=took_ns(trace, work, steps, _extents(trace, rows[of_model], run[of_model])),
        forwards=np.zeros(len(steps), dtype=np.int64),
        operators=(*longest(trace, within, most=1), *longest(trace, rows[named])),
        of_model=True,
    )
    return (loops,)


def _with_layers(trace: Trace, operators: Nested) -> Bool:
    """Which of the nested operators are a layer, or have one inside."""
    is_layer: Bool = trace.names_where(_is_layer, operators.row)
    around = np.unique(operators.parent[is_layer])
    while len(around := around[around != NONE]):
        is_layer[around] = True
        around = np.unique(operators.parent[around])
    return is_layer


def _is_layer(name: str) -> bool:
    return class_of_operator(name) in _LAYERS or COMPILED_CODE.match(name) is not None


def _siblings(trace: Trace, operators: Nested, is_layer: Bool) -> _Siblings:
    """Of operators outside code that ``torch.compile`` has made."""
    many = np.bincount(operators.parent + 1, minlength=len(operators) + 1) >= REPEATED
    many[1:] &= ~trace.names_where(COMPILED_CODE.match, operators.row)
    index = np.flatnonzero(many[operators.parent + 1])
    index = index[np.argsort(operators.parent[index], kind="stable")]
    parent, thread = operators.parent[index], trace.thread[operators.row[index]]
    another = np.diff(parent, prepend=NONE - 1) != 0
    another |= np.diff(thread, prepend=NONE - 1) != 0
    return _Siblings(index, np.cumsum(another | is_layer[index]))


def _extents(trace: Trace, rows: Int64, run: Int64) -> Intervals:
    """From the first of the operators of each run to the end of its last."""
    order = np.argsort(run, kind="stable")
    rows, run = rows[order], run[order]
    first = np.flatnonzero(np.diff(run, prepend=-1))
    return Intervals.of(
        np.minimum.reduceat(trace.start_ns[rows], first), np.maximum.reduceat(trace.ends_ns(rows), first)
    )
