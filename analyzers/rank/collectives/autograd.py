"""Which collectives a rank issued in a backward: from one of autograd's functions, or from a thread of its own; and
which once the step's last backward was over, as a loop over the gradients does.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.host_activity import STEP, step_threads
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.loop_phases import AUTOGRAD, OPTIMIZER_RANGE
from perfscope.trace.trace import NEVER, NONE, Bool, Category, Int32, Int64, Trace

OF_PARAMETER: Final = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
"""Autograd's function of each parameter. DistributedDataParallel's hook runs in it, which reduces a bucket whose last
gradient has come: its communication hook casts and divides there."""

_SYNCHRONIZED_NORM: Final = re.compile("SyncBatch[Nn]orm(Function)?(Backward)?$")
"""Functions of torch's ``SyncBatchNorm`` and apex's, which gather statistics in the forward and sum their gradients."""

_OPTIMIZER: Final = re.compile("Optimizer.step#")

_OF_MODEL: Final = re.compile(r"(?!record_param_comms$)\w+$|_c10d_functional|Torch-Compiled Region")
"""Operators in whose forward the model communicates for itself: autograd functions, whose names are those of Python
classes, functional collectives, and compiled code.
"""


def in_backward(trace: Trace, issued_ns: Int64, calls: Int64 | None = None) -> Bool:
    """Whether each collective was issued in a backward, by the host time of its issue (NONE: not known, False) and the
    row of its launch (NONE: not known). All False where the recording has none of autograd's functions.
    """
    rows = trace.rows(Category.CPU_OP, named=AUTOGRAD.match)
    inside: Bool = Intervals.of_rows(trace, rows).covers(issued_ns) & (issued_ns != NONE)
    if calls is None or not (calls != NONE).any():
        return inside
    by_thread = np.isin(trace.thread[calls], _own_threads(trace, trace.thread[rows]))
    return np.asarray(inside | (by_thread & (calls != NONE)), dtype=np.bool_)


def in_parameters(trace: Trace, issued_ns: Int64) -> Bool:
    """Whether each collective was issued in autograd's function of a parameter, by the host time of its issue."""
    rows = trace.rows(Category.CPU_OP, named=OF_PARAMETER.__eq__)
    return np.asarray(Intervals.of_rows(trace, rows).covers(issued_ns) & (issued_ns != NONE), dtype=np.bool_)


def operators_of_model(trace: Trace, threads: Int64) -> Intervals:
    """When operators run on these threads that communicate because the model needs it."""
    return Intervals.of_rows(trace, trace.rows(Category.CPU_OP, named=_OF_MODEL.match, threads=threads))


def in_norms(trace: Trace, issued_ns: Int64) -> Bool:
    """Whether each collective was issued in a batch normalization that all ranks compute together."""
    rows = trace.rows(Category.CPU_OP, named=_SYNCHRONIZED_NORM.search)
    return np.asarray(Intervals.of_rows(trace, rows).covers(issued_ns) & (issued_ns != NONE), dtype=np.bool_)


def after_backward(trace: Trace, issued_ns: Int64) -> Bool:
    """Whether each collective was issued between the last of autograd's functions of its step and the optimizer's step
    or the next step, by the host time of its issue (NONE: not known, False). All False where the recording has none of
    autograd's functions.
    """
    functions = np.sort(trace.start_ns[trace.rows(Category.CPU_OP, named=AUTOGRAD.match)])
    steps = trace.rows(Category.ANNOTATION, Category.CPU_OP, named=OPTIMIZER_RANGE.match)
    steps = np.append(steps, trace.rows(Category.ANNOTATION, named=STEP.match))
    bounds = np.concatenate(([NEVER], np.sort(trace.start_ns[steps]), [-NEVER]))
    if len(functions) == 0:
        return np.zeros(len(issued_ns), dtype=np.bool_)
    following = np.searchsorted(functions, issued_ns)
    bound = np.searchsorted(bounds, issued_ns, side="right")
    before = functions[np.maximum(following - 1, 0)]
    none_before = (following == 0) | (before < bounds[bound - 1])
    more = np.append(functions, -NEVER)[following] < bounds[np.minimum(bound, len(bounds) - 1)]
    return np.asarray(~none_before & ~more & (issued_ns != NONE), dtype=np.bool_)


def _own_threads(trace: Trace, autograd: Int32) -> Int32:
    """Of the threads with autograd's functions those on which no training loop runs; none where the loop's thread is
    not known.
    """
    loop = step_threads(trace)
    if len(loop) == 0:
        loop = trace.thread[trace.rows(Category.ANNOTATION, named=_OPTIMIZER.match)]
    return np.setdiff1d(autograd, loop) if len(loop) else loop
