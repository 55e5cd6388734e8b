"""One rank's compiled graphs: what each call in their code took, on the host and on the device.

Inductor's code runs in a range that names its graph, and calls generated kernels and operators in the same order each
time. So a call is identified by its graph, its name and its number among those of this name in one run of the graph;
which lines of the program it computes is looked up when the ranks are put side by side. Kernels that CUDA graphs launch
are identified by their node, too, in compiled code and elsewhere.
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.attribution import Attribution
from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.analyzers.rank.nesting import Nested
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.work.per_step import sums
from perfscope.analyzers.rank.work.tables import CompiledTimes
from perfscope.trace.trace import NONE, Bool, Category, Int64, Trace

GRAPH: Final = re.compile(r"^## Call CompiledFxGraph (\S+) ##$")
"""The range around one run of a graph (``CompiledFxGraph.__call__``)."""

MOST_CALLS: Final = 10_000
"""Lines of a rank's table; the lightest calls beyond are left out."""

_OPERATORS: Final = (Category.CPU_OP, Category.ANNOTATION)
"""What the range is in newer and older versions of torch."""


def compiled_times(trace: Trace, work: DeviceWork, steps: Steps, attribution: Attribution) -> CompiledTimes:
    """Add up each step's calls inside compiled graphs."""
    runs = trace.rows(*_OPERATORS, named=GRAPH.match)
    if len(runs) == 0 and len(trace.graph_nodes.row) == 0:
        return CompiledTimes.none(len(steps))
    ranges = Nested.of(trace, np.union1d(trace.rows(Category.CPU_OP), runs))
    is_run: Bool = trace.names_where(GRAPH.match, ranges.row)
    is_call = np.append(is_run, False)[ranges.parent] & ~is_run
    names = trace.name[ranges.row].astype(np.int64)
    host_step = steps.of_host_time(trace.start_ns[ranges.row])
    calls = np.flatnonzero(is_call)
    number = np.full(len(ranges), NONE, dtype=np.int64)
    number[calls] = _numbers(ranges.parent[calls], names[calls])
    # A run's own time, without the operators that it calls, is that of kernels which no event shows.
    own, at_run = ranges.own_ns(), np.flatnonzero(is_run)
    hosts = len(calls) + len(at_run)
    host = np.stack(
        (
            np.concatenate((names[ranges.parent[calls]], names[at_run])),
            np.concatenate((names[calls], np.full(len(at_run), NONE))),
            np.concatenate((number[calls], np.zeros(len(at_run), dtype=np.int64))),
            np.full(hosts, NONE),
            np.full(hosts, NONE),
        )
    )
    length = np.concatenate(((ranges.end - ranges.start)[calls], own[at_run]))
    step = host_step[np.concatenate((calls, at_run))]
    device, piece, order = _on_device(trace, work, ranges, is_run, is_call, names, number)
    on_device = (device, (work.end_ns - work.start_ns)[piece], attribution.step[piece], order)
    return _table(trace, steps, (host, length, step, np.full(len(length), NONE)), on_device)


def _on_device(
    trace: Trace, work: DeviceWork, ranges: Nested, is_run: Bool, is_call: Bool, names: Int64, number: Int64
) -> tuple[Int64, Int64, Int64]:
    """(graph, call, its number, kernel, node) of each piece of work that a run or another CUDA graph launches, which
    pieces these are, and of those that the code launches itself, as a CUDA graph's, the place among them.

    Such a piece is a call of its own name.
    """
    around = ranges.nearest(ranges.around(trace, work.launch), is_run | is_call)
    node = _nodes(trace, work)
    apart = np.flatnonzero((around == NONE) & (node != NONE))
    piece = np.flatnonzero(around != NONE)
    around, kernel = around[piece], trace.name[work.row[piece]].astype(np.int64)
    direct = is_run[around]
    run = np.where(direct, around, ranges.parent[around])
    call, count = np.where(direct, kernel, names[around]), number[around]
    count[direct] = _numbers(run[direct], kernel[direct])
    order = np.full(len(piece), NONE, dtype=np.int64)
    order[direct] = _numbers(run[direct], np.zeros(int(direct.sum()), dtype=np.int64))
    keys = np.stack((names[run], call, count, kernel, node[piece]))
    kernel = trace.name[work.row[apart]].astype(np.int64)
    nothing = np.full(len(apart), NONE)
    keys_apart = np.stack((nothing, kernel, np.zeros(len(apart), dtype=np.int64), kernel, node[apart]))
    return (
        np.concatenate((keys, keys_apart), axis=1),
        np.concatenate((piece, apart)),
        np.concatenate((order, nothing)),
    )


def _nodes(trace: Trace, work: DeviceWork) -> Int64:
    """The graph's node that each piece of work is; NONE where it is none."""
    rows = trace.graph_nodes.row
    node = np.full(len(work), NONE, dtype=np.int64)
    if len(rows):
        place = np.minimum(np.searchsorted(rows, work.row), len(rows) - 1)
        found = rows[place] == work.row
        node[found] = trace.graph_nodes.node[place[found]]
    return node


def _numbers(run: Int64, name: Int64) -> Int64:
    """Each event's number among those of one name in one run, in their order; from 0."""
    order = np.lexsort((np.arange(len(run)), name, run))
    begins = np.ones(len(order), dtype=np.bool_)
    begins[1:] = (np.diff(run[order]) != 0) | (np.diff(name[order]) != 0)
    first = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order)) - first
    return number


def _table(trace: Trace, steps: Steps, *parts: tuple[Int64, Int64, Int64, Int64]) -> CompiledTimes:
    """``parts``: (keys [5, events], ns, step, order) of the host's calls, then of device work."""
    keys = np.concatenate([part[0] for part in parts], axis=1)
    length, step, order = (np.concatenate([part[at] for part in parts]) for at in (1, 2, 3))
    on_host = np.arange(len(length)) < len(parts[0][1])
    inside = step >= 0
    keys, length, step, order = keys[:, inside], length[inside], step[inside], order[inside]
    on_host = on_host[inside]
    lines, line = np.unique(keys, axis=1, return_inverse=True)
    line = line.reshape(-1)
    first = np.full(lines.shape[1], np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(first, line, order)
    kept = np.sort(np.argsort(-np.bincount(line, weights=length, minlength=lines.shape[1]), kind="stable")[:MOST_CALLS])
    place = np.full(lines.shape[1], NONE, dtype=np.int64)
    place[kept] = np.arange(len(kept))
    line = place[line]
    chosen = line >= 0

    def table(where: Bool, weights: Int64 | None = None) -> Int64:
        at = np.flatnonzero(where & chosen)
        return sums(line[at], step[at], len(kept), len(steps), None if weights is None else weights[at])

    def texts(ids: Int64) -> tuple[str, ...]:
        return tuple("" if name == NONE else trace.strings[name] for name in ids.tolist())

    graph, call, number, kernel, node = lines[:, kept]
    nodes = trace.graph_nodes
    said = dict(zip(nodes.node.tolist(), nodes.annotation.tolist(), strict=True))
    return CompiledTimes(
        graphs=tuple(match[1] if (match := GRAPH.match(name)) else "" for name in texts(graph)),
        calls=texts(call),
        number=number,
        order=first[kept],
        names=texts(kernel),
        nodes=node,
        annotations=tuple(
            "" if (text := said.get(each, NONE)) == NONE else trace.strings[text] for each in node.tolist()
        ),
        count=table(on_host),
        host_ns=table(on_host, length),
        kernels=table(~on_host),
        device_ns=table(~on_host, length),
    )
