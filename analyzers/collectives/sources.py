"""What in a trace describes each communication kernel.

In this order: the kernel's own metadata; the ``record_param_comms`` operator around its launch (ROCm's kernels carry
none of their own); for a batch of sends and receipts, the operators before its launch; the backend's range around the
launch, which names the kind and, for a single send or receipt, the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.collectives.communication import kind_of, kind_of_kernel
from perfscope.analyzers.collectives.found import looked_up
from perfscope.analyzers.nesting import Nested
from perfscope.trace import NONE, Bool, Category, Int64, Trace

TITLE_PREFIX: Final = "nccl:"
"""Range of torch's ProcessGroupNCCL around a launch: ``nccl:all_to_all``, ``nccl:send 0->1``."""


@dataclass(frozen=True, eq=False)
class Sources:
    """For each kernel: the entry of ``trace.collectives`` that describes it, and the name (a string's index) of the
    backend's range around its launch where no entry does; NONE where there is none.

    ``batch_kernel`` (a place among the kernels) and ``batch_entry`` are the pairs of a batch: one kernel carries what
    several operators asked for, and ``entry`` is the first of them.
    """

    entry: Int64
    title: Int64
    batch_kernel: Int64
    batch_entry: Int64


def find_sources(trace: Trace, kernels: Int64, calls: Int64) -> Sources:
    """Find what describes the ``kernels`` (rows), which ``calls`` (rows, NONE: not recorded) launched."""
    operators = _Operators(trace)
    around = operators.around(calls)
    own = _own_entries(trace, kernels)
    entry = np.where(own == NONE, around, own)
    open_ = (entry == NONE) | operators.is_coalesced(entry)
    kernel, pair = operators.batches(calls, around, open_ & _may_be_batch(trace, kernels))
    first, place = np.unique(kernel, return_index=True)
    entry[first] = pair[place]
    return Sources(entry, _titles(trace, calls, entry), kernel, pair)


def _own_entries(trace: Trace, kernels: Int64) -> Int64:
    described = trace.collectives.row
    if len(described) == 0:
        return np.full(len(kernels), NONE, dtype=np.int64)
    place = np.minimum(np.searchsorted(described, kernels), len(described) - 1)
    return np.where(described[place] == kernels, place, NONE)


def _may_be_batch(trace: Trace, kernels: Int64) -> Bool:
    """By their names: the kernel for sends and receipts, or one that does everything (RCCL's)."""
    may = looked_up(trace, trace.name[kernels], lambda name: kind_of_kernel(name) in ("send_recv", "unknown"))
    return np.array(may, dtype=np.bool_)


def _titles(trace: Trace, calls: Int64, entry: Int64) -> Int64:
    """Names of the backend's ranges around the launches of kernels without an entry."""
    title = np.full(len(calls), NONE, dtype=np.int64)
    wanted = np.flatnonzero((entry == NONE) & (calls != NONE))
    if len(wanted) == 0:
        return title
    ranges = trace.names_where(lambda name: name.startswith(TITLE_PREFIX))
    nested = Nested.of(trace, np.flatnonzero(ranges & np.isin(trace.category, (Category.ANNOTATION, Category.CPU_OP))))
    found = nested.innermost(trace.thread[calls[wanted]], trace.start_ns[calls[wanted]])
    inside = found != NONE
    title[wanted[inside]] = trace.name[nested.row[found[inside]]]
    return title


class _Operators:
    """The host operators that say of collectives what they are."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        args = trace.collectives
        self._one_way = np.array(looked_up(trace, args.kind, lambda text: kind_of(text) in ("send", "recv")), np.bool_)
        self._coalesced = np.array(looked_up(trace, args.kind, lambda text: kind_of(text) == "coalesced"), np.bool_)
        self._entries = np.flatnonzero(trace.category[args.row] == Category.CPU_OP)

    def is_coalesced(self, entry: Int64) -> Bool:
        """Which entries say no more than that several things were asked for at once; none where there is no entry."""
        return (
            np.where(entry == NONE, False, self._coalesced[entry])
            if len(self._coalesced)
            else np.zeros(len(entry), dtype=np.bool_)
        )

    def around(self, calls: Int64) -> Int64:
        """The entry of the innermost operator around each launch; NONE where there is none."""
        result = np.full(len(calls), NONE, dtype=np.int64)
        known = np.flatnonzero(calls != NONE)
        if len(known) and len(self._entries):
            trace = self._trace
            nested = Nested.of(trace, trace.collectives.row[self._entries])
            found = nested.innermost(trace.thread[calls[known]], trace.start_ns[calls[known]])
            inside = found != NONE
            result[known[inside]] = np.searchsorted(trace.collectives.row, nested.row[found[inside]])
        return result

    def batches(self, calls: Int64, around: Int64, may_be: Bool) -> tuple[Int64, Int64]:
        """(kernel, entry) of every send and receipt that was asked for before the launch of a batch.

        Inside a batch (``batch_isend_irecv``, ``ncclGroupStart``) an operator launches nothing: all of it goes out in
        one kernel when the batch ends, on the same thread, before anything else is launched there.
        """
        trace = self._trace
        rows = trace.collectives.row[self._entries]
        waiting = self._one_way[self._entries] & ~np.isin(self._entries, around)
        entries, rows = self._entries[waiting], rows[waiting]
        launched = np.flatnonzero(calls != NONE)
        if len(entries) == 0 or len(launched) == 0:
            nothing = np.empty(0, dtype=np.int64)
            return nothing, nothing
        origin, span = int(trace.start_ns[0]), int(trace.end_ns.max() - trace.start_ns[0]) + 1
        launch = trace.thread[calls[launched]].astype(np.int64) * span + trace.start_ns[calls[launched]] - origin
        asked = trace.thread[rows].astype(np.int64) * span + trace.start_ns[rows] - origin
        order = np.argsort(launch, kind="stable")
        launched, launch = launched[order], launch[order]
        after = np.searchsorted(launch, asked)
        place = np.minimum(after, len(launched) - 1)
        kernel = launched[place]
        fits = (after < len(launched)) & (trace.thread[calls[kernel]] == trace.thread[rows]) & may_be[kernel]
        return kernel[fits], entries[fits]
