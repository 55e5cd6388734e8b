"""A backend's host ranges (gloo, MPI, Horovod) as collectives.

What each of them is, the collector says in a range around the operator that issued it. Recordings without these tell
kind, type and size, and of a send or receipt the peer; the group only where there is but one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod

import numpy as np

from perfscope.analyzers.collectives.communication import (
    DTYPE_BYTES,
    Group,
    Messages,
    dtype_of,
    is_host_communication,
    kind_of,
)
from perfscope.analyzers.collectives.found import Found, What, assumed_group
from perfscope.analyzers.collectives.issued import Event, Issued, issued_collectives
from perfscope.trace import NONE, Category, Int64, Trace


def host_communication_rows(trace: Trace) -> Int64:
    """Rows of the host ranges in which a backend carries out a collective."""
    hit = trace.names_where(is_host_communication)
    return np.flatnonzero(hit & np.isin(trace.category, (Category.ANNOTATION, Category.CPU_OP)))


def on_host(trace: Trace) -> Found:
    """The collectives that a rank's backend carried out on the host."""
    rows = host_communication_rows(trace)
    tensors = [_tensors(trace, row) for row in rows.tolist()]
    events = [
        Event(int(trace.start_ns[row]), int(trace.thread[row]), kind_of(trace.name_of(row)), size)
        for row, (_, size) in zip(rows.tolist(), tensors, strict=True)
    ]
    group = assumed_group(trace)
    said = [
        source or _alone(event, group)
        for event, source in zip(events, issued_collectives(trace, rows, events), strict=True)
    ]
    size = _column(
        [event.bytes if each.bytes == NONE else each.bytes for each, event in zip(said, events, strict=True)]
    )
    whats = [What(each.group, each.kind, each.dtype or dtype) for each, (dtype, _) in zip(said, tensors, strict=True)]
    described = list(dict.fromkeys(whats))
    place = {what: index for index, what in enumerate(described)}
    is_one_way = np.array([each.kind in ("send", "recv") for each in said], dtype=np.bool_)
    one_way = np.flatnonzero(is_one_way)
    issued = _column([each.start_ns for each in said])
    return Found(
        # gloo's range around a message begins when its operator, which may already wait for the wire, returns.
        start_ns=np.where(is_one_way, issued, trace.start_ns[rows]),
        end_ns=trace.end_ns[rows],
        stream=trace.thread[rows].astype(np.int64),
        issued_ns=issued,
        what=_column([place[what] for what in whats]),
        bytes=size,
        sequence=_column([each.sequence for each in said]),
        described=described,
        messages=Messages(
            collective=one_way,
            peer=_column([each.peer for each in said])[one_way],
            sends=np.array([each.kind == "send" for each in said], dtype=np.bool_)[one_way],
            bytes=size[one_way],
        ),
        on_host=True,
    )


def _alone(event: Event, group: Group) -> Issued:
    """What can be said of an event of which no operator is known."""
    gathered = event.kind == "all_gather" and group.size is not None and event.bytes != NONE
    size = event.bytes * (group.size or 1) if gathered else event.bytes
    return Issued(event.start_ns, group, event.kind, None, size, NONE, NONE)


def _column(values: Sequence[int]) -> Int64:
    return np.array(values, dtype=np.int64)


def _tensors(trace: Trace, row: int) -> tuple[str | None, int]:
    """Type and bytes of all input tensors of a host range; None and NONE where shapes were not recorded."""
    if trace.shapes[row] == NONE or trace.types[row] == NONE:
        return None, NONE
    shapes, types = (json.loads(trace.strings[index]) for index in (trace.shapes[row], trace.types[row]))
    tensors = [shape for shape in _leaves(shapes) if shape]
    dtype = next((known for text in _texts(types) if (known := dtype_of(text))), None)
    if dtype is None or not tensors:
        return dtype, NONE
    return dtype, sum(prod(shape) for shape in tensors) * DTYPE_BYTES[dtype]


def _leaves(shapes: list[object]) -> list[list[int]]:
    """Innermost lists of integers of nested ``Input Dims``."""
    if all(isinstance(item, int) for item in shapes):
        return [shapes]  # type: ignore[list-item]  # just checked
    return [leaf for item in shapes if isinstance(item, list) for leaf in _leaves(item)]


def _texts(types: list[object]) -> list[str]:
    return [
        text for item in types for text in (_texts(item) if isinstance(item, list) else [item]) if isinstance(text, str)
    ]
