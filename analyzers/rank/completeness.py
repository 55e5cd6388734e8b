"""Which steps of a file that ends early lack work of the device.

Profilers write what devices did in buffers, one for each thread that launches, in no order of time: where the file ends
early, work of any step may be missing. Operators are written before it. One that launches work wherever else it runs,
and has launched nothing in a step, shows that the step's work is not there.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.trace.trace import DEVICE_WORK, NONE, Bool, Category, Int64, Trace

_ALWAYS: Final = 0.95
"""From this share of its calls in one step on one thread an operator is taken to launch work whenever it runs …"""
_CALLS: Final = 3
"""… if there are as many."""
_MISSING: Final = 0.02
"""Share of the calls of such operators without work from which a step is not whole."""


def whole_steps(trace: Trace, start_ns: Int64, end_ns: Int64) -> Bool:
    """Of steps by their windows on the host: which are whole. All of them in a file that does not end early."""
    cut_ns = trace.parse_report.complete_until_ns
    if cut_ns is None or not len(start_ns):
        return np.ones(len(start_ns), dtype=np.bool_)
    return np.asarray((end_ns <= cut_ns) & ~_lack_work(trace, start_ns, end_ns), dtype=np.bool_)


def _lack_work(trace: Trace, start_ns: Int64, end_ns: Int64) -> Bool:
    rows = trace.rows(Category.CPU_OP)
    rows = rows[trace.external_id[rows] != NONE]
    step = np.searchsorted(start_ns, trace.start_ns[rows], side="right") - 1
    inside = (step >= 0) & (trace.start_ns[rows] < end_ns[np.maximum(step, 0)])
    rows, step = rows[inside], step[inside]
    names, name = np.unique(trace.name[rows], return_inverse=True)
    launching = trace.external_id[trace.rows(Category.RUNTIME, *DEVICE_WORK)]
    launches = np.isin(trace.external_id[rows], launching)
    # The buffers of one thread may be there, those of another one not.
    threads, thread = np.unique(trace.thread[rows], return_inverse=True)
    shape = len(names), len(start_ns), len(threads)
    cell = np.ravel_multi_index((name, step, thread), shape)
    calls, launched = (np.bincount(cell[which], minlength=np.prod(shape)).reshape(shape) for which in (..., launches))
    always = ((launched >= _ALWAYS * calls) & (calls >= _CALLS)).any(axis=(1, 2))
    expected, there = (count[always].sum(axis=(0, 2)) for count in (calls, launched))
    return np.asarray(expected - there > _MISSING * expected, dtype=np.bool_)
