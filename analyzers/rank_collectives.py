"""One rank's collectives with what the recording says of each: group, kind, type, size, sequence, step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from perfscope.analyzers.communication import (
    DTYPE_BYTES,
    Collectives,
    Group,
    device_communication,
    dtype_of,
    is_host_communication,
    kind_of,
    kind_of_kernel,
    parse_ranks,
)
from perfscope.analyzers.launches import DeviceWork
from perfscope.analyzers.steps import Steps
from perfscope.trace import NONE, Category, Int64, Trace

UNKNOWN_GROUP = Group(name="unknown", ranks=(), size=None)


@dataclass(frozen=True, kw_only=True)
class _Described:
    """One collective before it becomes a line of ``Collectives``."""

    start_ns: int
    end_ns: int
    stream: int
    issued_ns: int | None
    """Host time at which it was issued; None where the launch is not recorded."""
    group: Group
    kind: str
    dtype: str | None
    bytes: int | None
    sequence: int


def find_collectives(trace: Trace, work: DeviceWork, steps: Steps) -> Collectives:
    """Communication kernels where the rank has device work, the backend's host ranges otherwise."""
    if len(work):
        return _columns(_on_device(trace, work), steps)
    return _columns(_on_host(trace), steps)


def host_communication_rows(trace: Trace) -> Int64:
    """Rows of the host ranges in which a backend carries out a collective."""
    hit = trace.names_where(is_host_communication)
    return np.flatnonzero(hit & np.isin(trace.category, (Category.ANNOTATION, Category.CPU_OP)))


def assumed_group(trace: Trace) -> Group:
    """The group of a collective that names none: the only one there is, else unknown.

    Where the recording lists no groups but the world's size, that is the whole world.
    """
    rank_sets = {group.ranks for group in trace.groups if len(group.ranks) > 1}
    if len(rank_sets) == 1:
        ranks = rank_sets.pop()
        name = next(group.name for group in trace.groups if group.ranks == ranks)
        return Group(name=name, ranks=ranks, size=len(ranks))
    if not rank_sets and trace.world_size is not None and trace.world_size > 1:
        return Group(name="world", ranks=tuple(range(trace.world_size)), size=trace.world_size)
    return UNKNOWN_GROUP


def _on_device(trace: Trace, work: DeviceWork) -> list[_Described]:
    chosen = np.flatnonzero(device_communication(trace, work))
    described_by = _describing_rows(trace, work.row[chosen], work.launch[chosen])
    fallback = assumed_group(trace)
    listed = {group.name: group.ranks for group in trace.groups}
    issued = work.launch_start_ns(trace)
    found = []
    for index, description in zip(chosen, described_by, strict=True):
        row = int(work.row[index])
        base: dict[str, Any] = {
            "start_ns": int(work.start_ns[index]),
            "end_ns": int(work.end_ns[index]),
            "stream": int(trace.stream[row]),
            "issued_ns": None if work.launch[index] == NONE else int(issued[index]),
        }
        if description == NONE:
            kind = kind_of_kernel(trace.name_of(row))
            found.append(_Described(**base, group=fallback, kind=kind, dtype=None, bytes=None, sequence=NONE))
        else:
            found.append(_described(trace, int(description), listed, fallback, trace.name_of(row), **base))
    return found


def _describing_rows(trace: Trace, kernels: Int64, launches: Int64) -> Int64:
    """For each kernel, the entry of ``trace.collectives`` that describes it; NONE where nothing does.

    The kernel itself where it carries the metadata; else the innermost described host operator
    (``record_param_comms``) around the launch, on the launching thread. ROCm's kernels need the latter.
    """
    described = trace.collectives.row
    position = np.searchsorted(described, kernels)
    own = (position < len(described)) & (described[np.minimum(position, len(described) - 1)] == kernels) if len(
        described
    ) else np.zeros(len(kernels), dtype=np.bool_)  # fmt: skip
    entries = np.where(own, position, NONE)
    on_host = np.flatnonzero(trace.category[described] == Category.CPU_OP) if len(described) else described
    for index in np.flatnonzero(~own & (launches != NONE)):
        call = launches[index]
        rows = described[on_host]
        around = on_host[
            (trace.thread[rows] == trace.thread[call])
            & (trace.start_ns[rows] <= trace.start_ns[call])
            & (trace.end_ns[rows] >= trace.start_ns[call])
        ]
        if len(around):
            entries[index] = around[-1]
    return entries


def _described(
    trace: Trace,
    entry: int,
    listed: dict[str, tuple[int, ...]],
    fallback: Group,
    kernel: str,
    **base: Any,
) -> _Described:
    args = trace.collectives

    def text(index: int) -> str:
        return trace.strings[index] if index != NONE else ""

    name = text(int(args.group[entry]))
    ranks = parse_ranks(text(int(args.ranks[entry]))) or listed.get(name, ())
    size = len(ranks) or (int(args.group_size[entry]) if args.group_size[entry] > 0 else None)
    group = Group(name=name, ranks=ranks, size=size) if name or ranks else fallback
    kind = kind_of(text(int(args.kind[entry])))
    if kind in ("unknown", "coalesced") and kind_of_kernel(kernel) != "unknown":
        kind = kind_of_kernel(kernel)
    dtype = dtype_of(text(int(args.dtype[entry])))
    elements_in, elements_out = int(args.elements_in[entry]), int(args.elements_out[entry])
    larger = kind in ("all_gather", "reduce_scatter", "gather", "scatter")
    elements = max(elements_in, elements_out) if larger or elements_in <= 0 else elements_in
    size_bytes = elements * DTYPE_BYTES[dtype] if dtype is not None and elements > 0 else None
    return _Described(**base, group=group, kind=kind, dtype=dtype, bytes=size_bytes, sequence=int(args.sequence[entry]))


def _on_host(trace: Trace) -> list[_Described]:
    group = assumed_group(trace)
    found = []
    for row in host_communication_rows(trace):
        kind = kind_of(trace.name_of(row))
        dtype, elements = _first_tensor(trace, int(row))
        if elements is not None and kind == "all_gather" and group.size:
            elements *= group.size
        found.append(
            _Described(
                start_ns=int(trace.start_ns[row]),
                end_ns=int(trace.end_ns[row]),
                stream=int(trace.thread[row]),
                issued_ns=int(trace.start_ns[row]),
                group=group,
                kind=kind,
                dtype=dtype,
                bytes=elements * DTYPE_BYTES[dtype] if elements is not None and dtype is not None else None,
                sequence=NONE,
            )
        )
    return found


def _first_tensor(trace: Trace, row: int) -> tuple[str | None, int | None]:
    """Type and elements over all input tensors of a host range, where shapes were recorded."""
    if trace.shapes[row] == NONE or trace.types[row] == NONE:
        return None, None
    shapes, types = (json.loads(trace.strings[index]) for index in (trace.shapes[row], trace.types[row]))
    tensors = [shape for shape in _leaves(shapes) if shape]
    dtype = next((dtype_of(text) for text in _texts(types) if dtype_of(text)), None)
    return dtype, sum(prod(shape) for shape in tensors) if tensors else None


def _leaves(shapes: list[object]) -> list[list[int]]:
    """Innermost lists of integers of nested ``Input Dims``."""
    if all(isinstance(item, int) for item in shapes):
        return [shapes]  # type: ignore[list-item]  # just checked
    return [leaf for item in shapes if isinstance(item, list) for leaf in _leaves(item)]


def _texts(types: list[object]) -> list[str]:
    return [
        text for item in types for text in (_texts(item) if isinstance(item, list) else [item]) if isinstance(text, str)
    ]


def _step(found: list[_Described], steps: Steps) -> Int64:
    """By the host time of issue; where that is not recorded, by the device's window around the start."""
    issued = np.array([NONE if entry.issued_ns is None else entry.issued_ns for entry in found], dtype=np.int64)
    start = np.array([entry.start_ns for entry in found], dtype=np.int64)
    return np.where(issued == NONE, steps.of_device_time(start), steps.of_host_time(issued))


def _columns(found: list[_Described], steps: Steps) -> Collectives:
    found.sort(key=lambda entry: (entry.start_ns, entry.end_ns))
    groups = tuple(dict.fromkeys(entry.group for entry in found))
    kinds = tuple(dict.fromkeys(entry.kind for entry in found))
    dtypes = tuple(dict.fromkeys(entry.dtype for entry in found if entry.dtype is not None))
    group_index = {group: index for index, group in enumerate(groups)}

    def column(values: list[int]) -> Int64:
        return np.array(values, dtype=np.int64)

    return Collectives(
        start_ns=column([entry.start_ns for entry in found]),
        end_ns=column([entry.end_ns for entry in found]),
        group=column([group_index[entry.group] for entry in found]).astype(np.int32),
        kind=column([kinds.index(entry.kind) for entry in found]).astype(np.int32),
        dtype=column([NONE if entry.dtype is None else dtypes.index(entry.dtype) for entry in found]).astype(np.int32),
        bytes=column([NONE if entry.bytes is None else entry.bytes for entry in found]),
        sequence=column([entry.sequence for entry in found]),
        step=_step(found, steps),
        stream=column([entry.stream for entry in found]),
        groups=groups,
        kinds=kinds,
        dtypes=dtypes,
    )
