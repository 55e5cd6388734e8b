"""Collectives that a backend's threads carry out on the host for tensors of the device, as device lanes.

gloo copies such tensors to the host, exchanges them there and copies them back. To the device and to the other ranks
that is what a kernel of NCCL is: it begins when the gradients are there, takes as long as the slowest rank, and what
needs its result waits. So each range becomes a piece of device work on a lane of its thread, launched by the operator
that issued it; the copies inside it are a part of it. The host waits for it in no call of the runtime: where the
training threads do nothing until such a range ends, and then go on, a call is put in::

    training thread   backward ... issue | . . . . . . . . . . . . | optimizer
    gloo's thread                  | copy |    exchange    | copy  |
    becomes                        |        communication          |
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives.communication import (
    DTYPE_BYTES,
    device_communication,
    host_communication_rows,
    kind_of,
)
from perfscope.analyzers.rank.collectives.host import on_host
from perfscope.analyzers.rank.collectives.raw import RawCollectives
from perfscope.analyzers.rank.implied.inserted_calls import OF_COLLECTIVE, InsertedCalls, with_calls
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Category, CollectiveArgs, Int32, Int64, Trace

ISSUED: Final = "collective issued to the host's backend"
"""Name of the calls that launch these pieces of work."""

_BY_HOST: Final = re.compile(r"^(gloo|mpi):")
_OPERATOR: Final = re.compile(r"^c10d::(?!barrier|monitored|send|recv)[a-z_]+$")
"""torch.distributed's operators that hand a collective to the backend's threads."""
_ISSUING_NS: Final = 1_000
"""They do so at their end, at the latest."""
_WAIT_NS: Final = 100_000
"""Threads that do nothing for this long before a collective's end wait for it."""
_AT_ONCE_NS: Final = 500_000
"""A thread that waited goes on within this time, on a busy machine too."""


def with_host_lanes(trace: Trace, work: DeviceWork) -> Trace:
    """The trace with such collectives as device work; itself where it has none, no device, or also kernels that
    communicate.
    """
    if len(work) == 0 or device_communication(trace, work).any():
        return trace
    rows = host_communication_rows(trace)
    named = trace.names_where(_BY_HOST.match, rows)
    found = on_host(trace) if named.all() and len(rows) else None
    if found is None or not (work.launch != NONE).any():
        return trace
    collective = ~np.isin(np.array([key.kind for key in found.keys])[found.key], ("send", "recv"))
    chosen = np.flatnonzero(collective & (trace.duration_ns[rows] > 0))
    training = _training_threads(trace, work, rows)
    if len(chosen) == 0 or len(training) == 0:
        return trace
    changed = _as_work(trace, work, rows[chosen], found, chosen)
    begin, end = _waits(trace, training, np.sort(found.end_ns[chosen]))
    operators = _operators(trace, rows[chosen])
    issued = np.flatnonzero(operators != NONE)
    # The backend's thread may begin before the operator has returned.
    handed_ns = np.minimum(trace.ends_ns(operators[issued]), trace.start_ns[rows[chosen[issued]]])
    calls = InsertedCalls(
        start_ns=np.concatenate((handed_ns - _ISSUING_NS, begin)),
        end_ns=np.concatenate((handed_ns, end)),
        thread=np.concatenate((trace.thread[operators[issued]], np.full(len(begin), training[0], dtype=np.int32))),
        name=np.concatenate((np.zeros(len(issued), dtype=np.int32), np.ones(len(begin), dtype=np.int32))),
        names=(ISSUED, OF_COLLECTIVE),
        correlation=np.concatenate((_correlations(trace, len(chosen))[issued], np.full(len(begin), NONE))),
    )
    return with_calls(changed, calls)


def _operators(trace: Trace, rows: Int64) -> Int64:
    """The operator that issued each of the ranges: the first of its kind that began before it and issued no other. NONE
    where there is none, as at the begin of a recording.
    """
    operators = trace.rows(Category.CPU_OP, named=_OPERATOR.match)
    free: defaultdict[str, list[int]] = defaultdict(list)
    for row in operators[::-1].tolist():
        free[kind_of(trace.name_of(row))].append(row)
    found = []
    for row in rows.tolist():
        waiting = free[kind_of(trace.name_of(row))]
        found.append(waiting.pop() if waiting and trace.start_ns[waiting[-1]] <= trace.start_ns[row] else NONE)
    return np.array(found, dtype=np.int64)


def _as_work(trace: Trace, work: DeviceWork, rows: Int64, found: RawCollectives, chosen: Int64) -> Trace:
    """The ranges as kernels with the arguments of their collectives; the copies inside them as no work."""
    category, device = trace.category.copy(), trace.device.copy()
    stream, correlation = trace.stream.copy(), trace.correlation.copy()
    category[_inside(trace, work, rows)] = np.int8(Category.GPU_ANNOTATION)
    category[rows] = np.int8(Category.KERNEL)
    device[rows] = np.bincount(np.maximum(trace.device[work.row], 0)).argmax()
    lanes = distinct(trace.thread[rows])
    stream[rows] = trace.stream[work.row].max() + 1 + np.searchsorted(lanes, trace.thread[rows])
    correlation[rows] = _correlations(trace, len(rows))
    strings, args = _arguments(trace, rows, found, chosen)
    return replace(
        trace, category=category, device=device, stream=stream, correlation=correlation, strings=strings,
        collectives=args,
    )  # fmt: skip


def _correlations(trace: Trace, count: int) -> Int64:
    """Ids that the trace does not have, one for each collective."""
    return np.asarray(trace.correlation.max() + 1 + np.arange(count), dtype=np.int64)


def _inside(trace: Trace, work: DeviceWork, rows: Int64) -> Int64:
    """Rows of the work that the backend's threads launch in these ranges."""
    known = np.flatnonzero(work.launch != NONE)
    calls = work.launch[known]
    inside = np.zeros(len(known), dtype=np.bool_)
    for thread in distinct(trace.thread[rows]):
        own = Intervals.of_rows(trace, rows[trace.thread[rows] == thread])
        inside |= (trace.thread[calls] == thread) & own.covers(trace.start_ns[calls])
    return np.asarray(work.row[known[inside]], dtype=np.int64)


def _arguments(
    trace: Trace, rows: Int64, found: RawCollectives, chosen: Int64
) -> tuple[tuple[str, ...], CollectiveArgs]:
    """(the trace's strings and those of these collectives, the arguments of all)."""
    strings = list(trace.strings)
    known = {text: index for index, text in enumerate(strings)}

    def texts(values: Sequence[str]) -> Int32:
        """By key: the place of its text."""
        places = []
        for value in values:
            if value and value not in known:
                known[value] = len(strings)
                strings.append(value)
            places.append(known[value] if value else NONE)
        return np.array(places, dtype=np.int32)

    key, keys = found.key[chosen], found.keys
    element = np.array([DTYPE_BYTES.get(each.dtype or "", 0) for each in keys], dtype=np.int64)[key]
    elements = np.where((element > 0) & (found.bytes[chosen] > 0), found.bytes[chosen] // np.maximum(element, 1), NONE)
    old = trace.collectives
    kept = ~np.isin(old.row, rows)
    row = np.concatenate((old.row[kept], rows))
    order = np.argsort(row, kind="stable")

    def joined(before: Int64 | Int32, added: Int64 | Int32) -> Int64:
        return np.asarray(np.concatenate((before[kept], added))[order], dtype=np.int64)

    args = CollectiveArgs(
        row=row[order],
        kind=joined(old.kind, texts([each.kind for each in keys])[key]).astype(np.int32),
        group=joined(old.group, texts([each.group.name for each in keys])[key]).astype(np.int32),
        ranks=joined(old.ranks, texts([json.dumps(each.group.ranks) for each in keys])[key]).astype(np.int32),
        dtype=joined(old.dtype, texts([each.dtype or "" for each in keys])[key]).astype(np.int32),
        elements_in=joined(old.elements_in, elements),
        elements_out=joined(old.elements_out, elements),
        group_size=joined(old.group_size, np.array([each.group.size or NONE for each in keys], dtype=np.int64)[key]),
        sequence=joined(old.sequence, found.sequence[chosen]),
        peer=joined(old.peer, np.full(len(rows), NONE)),
    )
    return tuple(strings), args


def _training_threads(trace: Trace, work: DeviceWork, rows: Int64) -> Int32:
    """Threads that launch work, but for the backend's own; the one that launches most first."""
    thread, count = np.unique(trace.thread[work.launch[work.launch != NONE]], return_counts=True)
    training = ~np.isin(thread, trace.thread[rows])
    return np.asarray(thread[training][np.argsort(-count[training], kind="stable")], dtype=np.int32)


def _waits(trace: Trace, threads: Int32, ends_ns: Int64) -> tuple[Int64, Int64]:
    """(starts, ends) of the times in which these threads do nothing until a collective ends, and then go on."""
    rows = trace.rows(Category.CPU_OP, Category.RUNTIME, threads=threads.astype(np.int64))
    times = np.sort(np.concatenate((trace.start_ns[rows], trace.ends_ns(rows))))
    if len(times) == 0:
        return ends_ns[:0], ends_ns[:0]
    # The backend's thread signals first, and closes its range when it is scheduled again.
    after = np.searchsorted(times, ends_ns - _WAIT_NS, side="left")
    known = (after > 0) & (after < len(times))
    begin, goes_on = times[np.maximum(after - 1, 0)], times[np.minimum(after, len(times) - 1)]
    until = np.minimum(ends_ns, goes_on)
    waits = known & (goes_on <= ends_ns + _AT_ONCE_NS) & (until - begin >= _WAIT_NS)
    # Of several that end in one wait, the last is what the thread goes on for.
    _, last = np.unique(begin[waits][::-1], return_index=True)
    chosen = np.flatnonzero(waits)[::-1][last]
    return begin[chosen], until[chosen]
