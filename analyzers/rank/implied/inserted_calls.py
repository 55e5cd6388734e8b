"""Calls of the runtime that a trace does not hold, put into it: whatever is asked of the trace then sees them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.frozen import dataclass
from perfscope.trace.trace import NONE, Category, Int32, Int64, Trace

OF_COLLECTIVE: Final = "cudaEventSynchronize (of a collective on the host, not recorded)"
"""A host waits for a collective that its own threads carry out."""


@dataclass(frozen=True, eq=False)
class InsertedCalls:
    """Calls, in any order: parallel arrays. ``name`` indexes ``names``; ``correlation`` is NONE where it launches
    nothing.
    """

    start_ns: Int64
    end_ns: Int64
    thread: Int32
    name: Int32
    names: tuple[str, ...]
    correlation: Int64


def with_calls(trace: Trace, calls: InsertedCalls) -> Trace:
    """The trace with these calls, each behind what begins at the same time."""
    order = np.argsort(calls.start_ns, kind="stable")
    start_ns = calls.start_ns[order]
    at = np.searchsorted(trace.start_ns, start_ns, side="right")
    none = np.full(len(at), NONE)

    def moved(rows: Int64) -> Int64:
        return np.asarray(rows + np.searchsorted(at, rows, side="right"), dtype=rows.dtype)

    return replace(
        trace,
        strings=(*trace.strings, *calls.names),
        category=np.insert(trace.category, at, np.int8(Category.RUNTIME)),
        name=np.insert(trace.name, at, (len(trace.strings) + calls.name[order]).astype(np.int32)),
        start_ns=np.insert(trace.start_ns, at, start_ns),
        duration_ns=np.insert(trace.duration_ns, at, calls.end_ns[order] - start_ns),
        thread=np.insert(trace.thread, at, calls.thread[order]),
        device=np.insert(trace.device, at, none),
        stream=np.insert(trace.stream, at, none),
        correlation=np.insert(trace.correlation, at, calls.correlation[order]),
        external_id=np.insert(trace.external_id, at, none),
        shapes=np.insert(trace.shapes, at, none),
        types=np.insert(trace.types, at, none),
        inputs=np.insert(trace.inputs, at, none),
        collectives=replace(trace.collectives, row=moved(trace.collectives.row)),
        graph_nodes=replace(trace.graph_nodes, row=moved(trace.graph_nodes.row)),
    )
