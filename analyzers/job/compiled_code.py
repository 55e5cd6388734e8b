"""Which lines of the program a call in compiled code computes: what the ranks noted as they compiled, looked up."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from perfscope.analyzers.readers import plain_pickle
from perfscope.frozen import dataclass
from perfscope.recording.compiled import (
    FROM_CODE,
    NO_KEY,
    Annotation,
    CompiledCall,
    CompiledCode,
    CompiledGraph,
    SourceLine,
    load,
    of_annotation,
)
from perfscope.typed import read_bytes

_EXTERN: Final = re.compile(r"^extern_kernels\.(?:bias_)?(\w+)$")
_OPERATOR: Final = re.compile(r"^(?:torch\.ops\.)?(\w+)\.(\w+)(?:\.\w+)?$")
_OF_GRAPH: Final = re.compile(r"^graph_\d+_(?=cpp_)")
"""The C++ backend puts the graph's number before the kernel's name."""
_COPY: Final = re.compile(r"_\d+$")
"""Inductor numbers each use of a Triton kernel of the user's own."""


@dataclass(frozen=True)
class CallSource:
    """What one call in compiled code computes."""

    lines: tuple[SourceLine, ...]
    operators: tuple[str, ...]
    backward: bool | None
    """None where the graph is not known."""
    complete: bool
    """False: the graph came from a cache, and lines of its backward are missing."""


Kernel = tuple[str, int]
"""Name, and number among those of this name in one run of a graph."""
UNKNOWN: Final = CallSource((), (), None, complete=False)


def event_name(call: str) -> str:
    """The name of a call's event in a trace: ``extern_kernels.mm`` is ``aten::mm``, a kernel has its own."""
    if extern := _EXTERN.match(call):
        return f"aten::{extern[1]}"
    if operator := _OPERATOR.match(call):
        return f"{operator[1]}::{operator[2]}"
    return _OF_GRAPH.sub("", call)


class RankSources:
    """Looks up the calls of one rank's compiled graphs."""

    def __init__(self, code: CompiledCode) -> None:
        self._lines = code.lines
        self.cost = code.cost
        self.annotated: dict[int, Annotation] = {
            each.node: (code.lines[each.line], each.backward) for each in code.nodes if 0 <= each.line < len(code.lines)
        }
        """Node of a CUDA graph -> what was said of it as the graph was captured."""
        self._graphs: defaultdict[str, list[dict[str, list[CompiledCall]]]] = defaultdict(list)
        self._described: dict[str, CompiledGraph] = {}
        for graph in code.graphs:
            named: defaultdict[str, list[CompiledCall]] = defaultdict(list)
            for call in graph.calls:
                named[event_name(call.name)].append(call)
            if graph.key == NO_KEY or graph.key not in self._described:
                self._graphs[graph.key].append(named)
            self._described[graph.key] = graph

    @classmethod
    def read(cls, path: Path) -> RankSources:
        """Those in a rank's file. Raises ValueError naming the file and what is wrong with it."""
        return cls(load(path))

    def find(self, key: str, name: str, number: int) -> CallSource:
        """The source of a graph's call by its name and its number among those of this name, counted from 0.

        Where the numbers differ (several graphs without a key, code with branches), all that have the name.
        """
        described, graphs = self._described.get(key), self._graphs.get(key, [])
        if described is None:
            return UNKNOWN
        name = event_name(name)
        own = [calls for graph in graphs if (calls := graph.get(name) or graph.get(_COPY.sub("", name)))]
        if not name:
            chosen = [call for graph in graphs for calls in graph.values() for call in calls if is_cpp(call.name)]
        elif len(own) == 1 and number < len(own[0]):
            chosen = [own[0][number]]
        else:
            chosen = [call for calls in own for call in calls]
        return self._source(chosen, described, several=len(graphs) > 1)

    def in_cuda_graph(self, key: str, kernels: Sequence[Kernel]) -> dict[Kernel, CallSource]:
        """The sources of kernels of other names than the code's calls, as those of operators, that one launch of a CUDA
        graph runs; ``kernels`` are (name, number) of all of them, in their order.

        Generated kernels are in the code and mark the place: what runs between two of them are the operators called
        between them. With one operator, all kernels there are its; with as many kernels as operators, each has one,
        since none launches nothing. Elsewhere, and where the order is not the code's, they are not known.
        """
        described = self._described.get(key)
        if described is None or len(self._graphs[key]) > 1:
            return {}
        counted: defaultdict[str, int] = defaultdict(int)
        places: dict[Kernel, int] = {}
        for place, call in enumerate(described.calls):
            name = event_name(call.name)
            places[name, counted[name]] = place
            counted[name] += 1
        found: dict[Kernel, CallSource] = {}
        waiting: list[Kernel] = []
        last = -1
        for kernel in (*kernels, None):
            place = len(described.calls) if kernel is None else places.get(kernel, -1)
            if kernel is not None and place < 0:
                waiting.append(kernel)
                continue
            if place <= last:
                return {}
            operators = [call for call in described.calls[last + 1 : place] if "::" in event_name(call.name)]
            if len(operators) == 1:
                operators *= len(waiting)
            if len(operators) == len(waiting):
                for each, call in zip(waiting, operators, strict=True):
                    found[each] = self._source((call,), described, several=False)
            waiting, last = [], place
        return found

    def _source(self, calls: Iterable[CompiledCall], graph: CompiledGraph, *, several: bool) -> CallSource:
        calls = list(calls)
        places = dict.fromkeys(place for call in calls for place in call.lines if place < len(self._lines))
        return CallSource(
            lines=_without_nameless([self._lines[place] for place in places]),
            operators=tuple(dict.fromkeys(name for call in calls for name in call.operators)),
            backward=None if several else graph.backward,
            complete=graph.known_from != FROM_CODE or not graph.backward,
        )


def _without_nameless(lines: Sequence[SourceLine]) -> tuple[SourceLine, ...]:
    """The lines, without those of no module where the same line is there with its module: parts of a backward have
    none.
    """
    owned = {(line.file, line.line) for line in lines if line.module or line.kind}
    return tuple(line for line in lines if line.module or line.kind or (line.file, line.line) not in owned)


def lines_by_name(codes: Iterable[CompiledCode]) -> dict[str, tuple[SourceLine, ...]]:
    """The lines that the calls of each name compute, whatever graph they are in."""
    found: defaultdict[str, dict[SourceLine, None]] = defaultdict(dict)
    for code in codes:
        for call in (call for graph in code.graphs for call in graph.calls):
            found[event_name(call.name)] |= dict.fromkeys(
                code.lines[place] for place in call.lines if place < len(code.lines)
            )
    return {name: _without_nameless(tuple(lines)) for name, lines in found.items()}


def is_cpp(name: str) -> bool:
    """Is it a generated C++ kernel, which no event shows unless its profile was asked for?"""
    return name.startswith("cpp_")


def read_annotations(path: Path) -> dict[int, Annotation]:
    """Node of a graph -> what was said of it, from torch's annotations as the program pickled them
    (``recording.kernel_annotations``). Raises ValueError naming the file and what is wrong with it.
    """
    try:
        raw = plain_pickle.loads(read_bytes(path, plain_pickle.MAX_BYTES))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; pickle it as dict(get_kernel_annotations())") from error
    said = raw.items() if isinstance(raw, dict) else ()
    found = ((node, of_annotation(each)) for node, each in said if isinstance(node, int))
    return {node: annotation for node, annotation in found if annotation is not None}
