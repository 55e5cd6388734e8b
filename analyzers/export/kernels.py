"""What computes in one rank's steps, piece after piece: kernels, or a host's operators, with FLOPs and bytes."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import numpy as np

from perfscope.analyzers.rank.attribution import Attribution, attribute
from perfscope.analyzers.rank.collectives.communication import DTYPE_BYTES, dtype_of
from perfscope.analyzers.rank.host_activity import host_activity
from perfscope.analyzers.rank.launches import DeviceWork, device_work
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.time_breakdown import computing_rows
from perfscope.frozen import dataclass
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Float64, Int64, Trace


@dataclass(frozen=True, eq=False)
class Computation:
    """Consecutive time in which something computes: parallel arrays, ascending, disjoint; own clock, ns.

    Where several kernels run at a time, the one that began first has the time. ``flops`` and ``bytes`` (of the inputs
    of the operator that launched it, shared among its kernels) are of the whole kernel, 0 where not recorded;
    ``stream`` is NONE on a host.
    """

    start_ns: Int64
    end_ns: Int64
    name: Int64
    """Index into ``names``."""
    names: tuple[str, ...]
    flops: Float64
    bytes: Float64
    stream: Int64

    def __len__(self) -> int:
        return len(self.start_ns)


def computation(trace: Trace, steps: Steps) -> Computation:
    """The kernels of a rank that are no communication; its operators where it has no device work."""
    work = device_work(trace)
    attribution = attribute(trace, work, steps)
    if len(work) == 0:
        return _of_host(trace, work, attribution)
    chosen = np.flatnonzero(attribution.is_kernel & ~attribution.is_communication)
    operator = attribution.operator[chosen]
    known = operator != NONE
    row = np.full(len(chosen), NONE, dtype=np.int64)
    row[known] = attribution.operators.row[operator[known]]
    length = np.maximum(work.end_ns[chosen] - work.start_ns[chosen], 1).astype(np.float64)
    total = np.bincount(operator[known], weights=length[known], minlength=len(attribution.operators) + 1)
    share = np.where(known, length / np.maximum(total[operator], 1.0), 0.0)
    rows = work.row[chosen]
    return _in_turn(
        trace, rows, attribution.flops[chosen], _input_bytes(trace, row) * share, trace.stream[rows].astype(np.int64)
    )


def _of_host(trace: Trace, work: DeviceWork, attribution: Attribution) -> Computation:
    rows = np.sort(computing_rows(trace, host_activity(trace, work)))
    found = _in_turn(trace, rows, np.zeros(len(rows)), _input_bytes(trace, rows), np.full(len(rows), NONE))
    calls = attribution.calls
    begun = trace.start_ns[attribution.operators.row[calls.place]]
    place = np.searchsorted(found.start_ns, begun, side="right") - 1
    inside = (place >= 0) & (begun < found.end_ns[np.maximum(place, 0)]) if len(found) else place >= 0
    np.add.at(found.flops, place[inside], calls.hardware[inside])
    return found


def _in_turn(trace: Trace, rows: Int64, flops: Float64, size: Float64, stream: Int64) -> Computation:
    """Each of the events at ``rows`` from the end of those that began before it, if that is not its own."""
    start, end = trace.start_ns[rows], trace.ends_ns(rows)
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    until = np.maximum.accumulate(end) if len(end) else end
    begin = np.maximum(start, np.append(start[:1], until[:-1]))
    kept = end > begin
    order, begin, end = order[kept], begin[kept], end[kept]
    names = distinct(trace.name[rows[order]])
    return Computation(
        start_ns=begin,
        end_ns=end,
        name=np.searchsorted(names, trace.name[rows[order]]),
        names=tuple(trace.strings[name] for name in names.tolist()),
        flops=flops[order],
        bytes=size[order],
        stream=stream[order],
    )


def _input_bytes(trace: Trace, rows: Int64) -> Float64:
    """Bytes of the inputs of the operators at ``rows`` (NONE: 0)."""
    known = np.flatnonzero(rows != NONE)
    shapes, types = trace.shapes[rows[known]], trace.types[rows[known]]
    both = np.stack((shapes, types)).astype(np.int64)
    kinds, kind = np.unique(both, axis=1, return_inverse=True)
    of_kind = [
        input_bytes(trace.strings[shape], trace.strings[dtype]) if NONE not in (shape, dtype) else 0
        for shape, dtype in kinds.T.tolist()
    ]
    size = np.zeros(len(rows), dtype=np.float64)
    size[known] = np.array(of_kind, dtype=np.float64)[kind.reshape(-1)] if of_kind else 0.0
    return size


@functools.lru_cache(maxsize=65536)
def input_bytes(shapes: str, types: str) -> int:
    """Bytes of all tensors among an operator's inputs, from the JSON texts of their dimensions and types.

    ``[[32, 64], []]`` and ``["float", "Scalar"]`` are 8192 bytes. What cannot be read counts nothing.
    """
    try:
        pairs = list(zip(json.loads(shapes), json.loads(types), strict=True))
    except (ValueError, TypeError, RecursionError):
        return 0
    return sum(_elements(shape) * DTYPE_BYTES.get(dtype_of(str(dtype)) or "", 0) for shape, dtype in pairs)


def _elements(shape: Any) -> int:
    """Elements of a tensor, or of a list of them; a scalar has one, which is no tensor of any size."""
    if not isinstance(shape, list) or not shape:
        return 0
    if all(isinstance(each, int) for each in shape):
        return math.prod(each for each in shape if each >= 0)
    return sum(_elements(each) for each in shape)
