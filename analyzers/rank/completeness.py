"""Which steps of a recording lack work of the device.

A recording that ends while the device is behind its host has launches without kernels: steps with such are not whole.

Profilers write what devices did in buffers, one for each thread that launches, in no order of time: where the file ends
early, work of any step may be missing. Operators are written before it. One that launches work in another step, on the
same thread, and has launched nothing in this one, shows that the step's work is not there. So does a launch whose
kernel is missing, and a step without any work.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.kernel_classes import PRODUCTS, class_of_operator
from perfscope.analyzers.rank.nesting import Nested
from perfscope.frozen import dataclass
from perfscope.trace.trace import DEVICE_WORK, NONE, Bool, Category, Int64, Trace

_LAUNCH: Final = re.compile(r"(cuda|hip|cu)\w*LaunchKernel")
"""Names of calls that launch one kernel, whatever happens."""
_ALWAYS: Final = 0.95
"""From this share of its calls in a step on one thread an operator is taken to launch work whenever it runs there …"""
_CALLS: Final = 3
"""… if there are as many."""
_MISSING: Final = 0.02
"""Share of such calls without work from which a step is not whole."""


def whole_steps(trace: Trace, start_ns: Int64, end_ns: Int64) -> Bool:
    """Of steps by their windows on the host: which are whole. All of them where each lacks kernels, as in a recording
    that leaves most out, and that of a whole file.
    """
    work, cut_ns = trace.rows(*DEVICE_WORK), trace.parse_report.complete_until_ns
    if not len(start_ns) or not len(work):
        return np.asarray(np.ones(len(start_ns), dtype=np.bool_) if cut_ns is None else end_ns <= cut_ns)
    windows, calls = _HostWindows(start_ns, end_ns), trace.rows(Category.RUNTIME)
    with_work = (trace.correlation[calls] != NONE) & np.isin(trace.correlation[calls], trace.correlation[work])
    ran = _launches(trace, windows, calls, with_work).complete()
    if cut_ns is None:
        return ran if ran.any() else ~ran
    launched = windows.count(trace.start_ns[calls[with_work]] if with_work.any() else trace.start_ns[work])
    whole = (launched > 0) & ran & _operators(trace, windows, calls[with_work], work).complete()
    before_cut = end_ns <= cut_ns
    if trace.parse_report.all_operators:  # devices' events are in no order of time: those of a late step may be there
        before_cut |= _as_many(np.where(whole, launched, 0))
    return np.asarray(whole & before_cut, dtype=np.bool_)


def _as_many(launched: Int64) -> Bool:
    """Which steps launched as much as another one did, and none more: where work is missing, that is no coincidence."""
    most = (launched >= (1 - _MISSING) * launched.max()) & (launched >= _CALLS)
    return np.asarray(most & (most.sum() > 1), dtype=np.bool_)


@dataclass(frozen=True, eq=False)
class _HostWindows:
    """Steps on the host, in order, ns."""

    start_ns: Int64
    end_ns: Int64

    def step(self, time_ns: Int64) -> Int64:
        """Index of the step of each time; -1 outside all."""
        step = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        return np.where((step >= 0) & (time_ns < self.end_ns[np.maximum(step, 0)]), step, -1)

    def count(self, time_ns: Int64) -> Int64:
        """How many of these times lie in each step."""
        return np.bincount(self.step(time_ns) + 1, minlength=len(self.start_ns) + 1)[1:].astype(np.int64)


@dataclass(frozen=True, eq=False)
class _LaunchCounts:
    """By step: how many calls that launch work there are, and of how many the work is in the file."""

    expected: Int64
    there: Int64

    def complete(self) -> Bool:
        """Of which steps the work is there."""
        return np.asarray(self.expected - self.there <= _MISSING * self.expected, dtype=np.bool_)


def _launches(trace: Trace, windows: _HostWindows, calls: Int64, with_work: Bool) -> _LaunchCounts:
    """Calls that launch a kernel: each does."""
    launches = trace.names_where(_LAUNCH.match, calls)
    return _LaunchCounts(
        windows.count(trace.start_ns[calls[launches]]), windows.count(trace.start_ns[calls[launches & with_work]])
    )


def _operators(trace: Trace, windows: _HostWindows, calls: Int64, work: Int64) -> _LaunchCounts:
    """Operators that always launch work. ``calls`` are those whose ``work`` is in the file."""
    rows = trace.rows(Category.CPU_OP)
    rows = rows[trace.external_id[rows] != NONE]
    step = windows.step(trace.start_ns[rows])
    rows, step = rows[step >= 0], step[step >= 0]
    names, name = np.unique(trace.name[rows], return_inverse=True)
    launches = _launch(trace, rows, calls, work)
    threads, thread = np.unique(trace.thread[rows], return_inverse=True)
    shape = len(names), len(windows.start_ns), len(threads)
    cell = np.ravel_multi_index((name, step, thread), shape)
    ran, launched = (np.bincount(cell[which], minlength=np.prod(shape)).reshape(shape) for which in (..., launches))
    always = np.asarray(((launched >= _ALWAYS * ran) & (ran >= _CALLS)).any(axis=1), dtype=np.bool_)
    always |= _products(trace, names, always)[:, None] & (ran >= _CALLS).any(axis=1)
    return _LaunchCounts(*(np.where(always[:, None], count, 0).sum(axis=(0, 2)) for count in (ran, launched)))


def _products(trace: Trace, names: Int64, always: Bool) -> Bool:
    """Which of these operators multiply matrices, and always launch work on some thread: the buffers of other threads
    may be missing in all steps. Operators of other kinds may work on the host, on some threads.
    """
    products = [class_of_operator(trace.strings[name]) in PRODUCTS for name in names.tolist()]
    return np.asarray(always.any(axis=1) & np.array(products, dtype=np.bool_), dtype=np.bool_)


def _launch(trace: Trace, operators: Int64, calls: Int64, work: Int64) -> Bool:
    """Of these rows of operators: which launched device work that is in the file, by the calls that launched it.

    By external ids. Where these are other numbers than the operators', as Kineto wrote them for some versions of torch,
    each call belongs to the innermost operator around it.
    """
    by_id = np.isin(trace.external_id[operators], trace.external_id[np.concatenate((work, calls))])
    if by_id.any():
        return np.asarray(by_id, dtype=np.bool_)
    nested = Nested.of(trace, operators)
    around = nested.around(trace, calls)
    return np.isin(operators, nested.row[around[around != NONE]])
