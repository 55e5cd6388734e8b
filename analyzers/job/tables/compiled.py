"""The tables of compiled code: its calls with the lines that they compute, and the time of each module in them."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Final

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.compiled_code import (
    UNKNOWN,
    CallSource,
    RankSources,
    event_name,
    is_cpp,
    lines_by_name,
    read_annotations,
)
from perfscope.analyzers.rank.work.tables import CompiledTimes
from perfscope.frozen import dataclass
from perfscope.recording import provenance
from perfscope.recording.compiled import Annotation, CompileCost, SourceLine, of_annotation
from perfscope.results.notes import Note, note
from perfscope.results.tables import CompiledModuleRow, CompiledRow, KernelRow, OperatorRow
from perfscope.trace.trace import NONE, Int64

LISTED: Final = 200
"""Rows of each table; the lightest beyond are left out."""
MOST_LINES: Final = 12
"""Lines of one row."""
UNSHOWN: Final = "(C++ kernels)"
"""Name of the code between a graph's calls on a rank without a device."""
UNKNOWN_SHARE: Final = 0.1
"""Share of the time in compiled code without a known line from which a note says so."""

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")

Key = tuple[str, bool | None, tuple[tuple[str, int], ...]]
"""Call, backward, lines as (file, line)."""


@dataclass
class _Total:
    """One call, wherever it stands, over all ranks and used steps."""

    source: CallSource
    count: int = 0
    host_ns: int = 0
    device_ns: int = 0
    kernels: dict[str, int] = field(default_factory=dict)
    """Kernel -> its ns."""
    owners: dict[tuple[str, str], None] = field(default_factory=dict)
    """(module, class), in the order in which they were met."""

    @property
    def ns(self) -> int:
        """Time on the device, or on the host of a rank that has none."""
        return self.device_ns or self.host_ns


@dataclass(frozen=True)
class CompiledTables:
    """What is known of a job's compiled code."""

    calls: tuple[CompiledRow, ...] = ()
    modules: tuple[CompiledModuleRow, ...] = ()
    notes: tuple[Note, ...] = ()
    sources: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    """Kernel or operator -> (modules, lines)."""


def compiled_tables(
    files: Mapping[int, Path],
    result: AlignedJob,
    of_inductor: Iterable[Path] = (),
    annotations: Mapping[int, Path] | None = None,
) -> CompiledTables:
    """Put the ranks' compiled calls and their kernels in CUDA graphs together.

    ``files``: what each rank noted of the code that it compiled; ``of_inductor``: what inductor wrote of its kernels,
    which holds for what no rank noted; ``annotations``: each rank's pickled annotations of kernels.
    """
    totals: dict[Key, _Total] = {}
    incomplete = False
    graphs = _InGraphs()
    costs: dict[int, CompileCost] = {}
    notes: list[Note] = []
    by_name = _of_inductor(of_inductor, notes)
    for rank, partial in sorted(result.partials.items()):
        times = partial.tables.compiled
        if not times.calls:
            continue
        sources = None
        annotated: dict[int, Annotation] = {}
        try:
            annotated = read_annotations(annotations[rank]) if annotations and rank in annotations else {}
            sources = RankSources.read(files[rank]) if rank in files else None
        except ValueError as error:
            notes.append(note("compiled", "compiled_unreadable", (rank,), error=str(error)))
        annotated |= sources.annotated if sources is not None else {}
        if sources is not None and sources.cost is not None:
            costs[rank] = sources.cost
        used = partial.steps.indices_of(result.steps)
        graphs.add(totals, times, used, annotated)
        incomplete |= _add_rank(totals, times, used, sources, annotated, by_name, on_device=partial.has_device_work)
    notes += _costs(costs)
    if graphs.unknown_ns > UNKNOWN_SHARE * max(graphs.ns, 1):
        notes.append(note("compiled", "graphs_not_annotated", share=graphs.unknown_ns / graphs.ns))
    if not totals:
        return CompiledTables(notes=tuple(notes), sources=_by_name(totals, by_name))
    shares = len(result.partials) * len(result.steps)
    whole = _whole_ns(result)
    ordered = sorted(totals.items(), key=lambda item: (-item[1].ns, item[0][0]))
    rows = [_row(key[0], total, shares, whole) for key, total in ordered]
    unknown = sum(total.ns for total in totals.values() if not total.source.lines)
    share = unknown / max(sum(total.ns for total in totals.values()), 1)
    if share >= UNKNOWN_SHARE:
        noted = any(total.source.backward is not None for total in totals.values() if not total.source.lines)
        kind = "compiled_from_cache" if incomplete else "compiled_in_graphs" if noted else "compiled_unknown"
        notes.append(note("compiled", kind, share=share))
    if any(row.name == UNSHOWN for row in rows):
        notes.append(note("compiled", "compiled_unshown"))
    return CompiledTables(
        tuple(rows[:LISTED]), tuple(_modules(totals.values(), shares)[:LISTED]), tuple(notes), _by_name(totals, by_name)
    )


def _costs(costs: Mapping[int, CompileCost]) -> list[Note]:
    """What compiling took of the rank that it took most of."""
    if not costs:
        return []
    rank = max(costs, key=lambda each: costs[each].whole_s)
    most = costs[rank]
    return [
        note("compiled", "compile_cost", (rank,), whole_s=most.whole_s, inductor_s=most.inductor_s, graphs=most.graphs)
    ]


def _of_inductor(paths: Iterable[Path], notes: list[Note]) -> dict[str, tuple[SourceLine, ...]]:
    """Call -> its lines, from inductor's own files; adds a note for each that cannot be read."""
    codes = []
    for path in paths:
        try:
            codes.append(provenance.read(path))
        except ValueError as error:
            notes.append(note("compiled", "compiled_unreadable", error=str(error)))
    return lines_by_name(codes)


def _add_rank(
    totals: dict[Key, _Total],
    times: CompiledTimes,
    used: Int64,
    sources: RankSources | None,
    annotated: Mapping[int, Annotation],
    by_name: Mapping[str, tuple[SourceLine, ...]],
    *,
    on_device: bool,
) -> bool:
    """Add a rank's calls in compiled code; is there a graph whose lines are missing because it came from a cache?"""
    columns = (table[:, used].sum(axis=1).tolist() for table in (times.count, times.host_ns, times.device_ns))
    incomplete = False
    in_graphs = _in_cuda_graphs(times, sources)
    listed = {graph for graph, call in zip(times.graphs, times.calls, strict=True) if is_cpp(event_name(call))}
    said = _annotations(times, annotated)
    for graph, call, number, kernel, annotation, count, host_ns, device_ns in zip(
        times.graphs, times.calls, times.number.tolist(), times.names, said, *columns, strict=True
    ):
        if not graph or not (count or device_ns) or (not call and (on_device or graph in listed)):
            continue
        source = sources.find(graph, call, number) if sources is not None else UNKNOWN
        source = in_graphs.get((graph, call, number), source)
        if not source.lines and annotation is not None:
            source = _annotated_source(annotation, source.backward)
        if not source.lines and event_name(call) in by_name:
            source = replace(source, lines=by_name[event_name(call)], complete=True)
        if not call and source is not UNKNOWN and not source.lines and source.complete:
            continue  # what it computes are operators alone
        incomplete |= source.backward is not None and not source.complete
        _add(totals, event_name(call) or UNSHOWN, source, kernel, (count, host_ns, device_ns))
    return incomplete


def _add(totals: dict[Key, _Total], name: str, source: CallSource, kernel: str, amounts: tuple[int, int, int]) -> None:
    """Add (calls, ns on the host, ns on the device) to the row of a call."""
    lines = tuple(sorted({(line.file, line.line) for line in source.lines if line.file}))
    if not lines:  # of an annotated kernel the module alone is known
        lines = tuple(sorted({(_NUMBER.sub("*", line.module), 0) for line in source.lines}))
    total = totals.setdefault((name, source.backward, lines), _Total(source))
    total.count += amounts[0]
    total.host_ns += amounts[1]
    total.device_ns += amounts[2]
    total.owners |= dict.fromkeys(map(_owner, source.lines))
    if kernel:
        total.kernels[kernel] = total.kernels.get(kernel, 0) + amounts[2]


@dataclass
class _InGraphs:
    """Time of the kernels in CUDA graphs outside of compiled code, and the part of which nothing is annotated."""

    ns: int = 0
    unknown_ns: int = 0

    def add(
        self, totals: dict[Key, _Total], times: CompiledTimes, used: Int64, annotated: Mapping[int, Annotation]
    ) -> None:
        """Add one rank's; a kernel by its annotation, those of one name and module in one row."""
        lengths = times.device_ns[:, used].sum(axis=1).tolist()
        lines = zip(times.graphs, times.names, _annotations(times, annotated), lengths, strict=True)
        for graph, kernel, annotation, ns in lines:
            if graph or not ns:
                continue
            self.ns += ns
            if annotation is None:
                self.unknown_ns += ns
            else:
                _add(totals, kernel, _annotated_source(annotation, None), kernel, (0, 0, ns))


def _annotations(times: CompiledTimes, annotated: Mapping[int, Annotation]) -> list[Annotation | None]:
    """What is said of the kernel of each line: by the trace, else by the rank's files."""
    return [
        of_annotation(json.loads(text)) if text else annotated.get(node)
        for text, node in zip(times.annotations, times.nodes.tolist(), strict=True)
    ]


def _annotated_source(annotation: Annotation, backward: bool | None) -> CallSource:
    line, is_backward = annotation
    return CallSource((line,), (), is_backward if backward is None else backward, complete=True)


def _in_cuda_graphs(times: CompiledTimes, sources: RankSources | None) -> dict[tuple[str, str, int], CallSource]:
    """(graph, kernel, number) -> the source of a kernel in a CUDA graph that its place there shows."""
    if sources is None:
        return {}
    launched: defaultdict[str, list[tuple[int, str, int]]] = defaultdict(list)
    for graph, call, number, order in zip(
        times.graphs, times.calls, times.number.tolist(), times.order.tolist(), strict=True
    ):
        if order != NONE:
            launched[graph].append((order, call, number))
    found: dict[tuple[str, str, int], CallSource] = {}
    for graph, kernels in launched.items():
        in_order = [(name, number) for _, name, number in sorted(kernels)]
        found |= {(graph, *kernel): source for kernel, source in sources.in_cuda_graph(graph, in_order).items()}
    return found


def _owner(line: SourceLine) -> tuple[str, str]:
    """(module, class) of a line; of one outside all modules its function."""
    return (line.module, line.kind) if line.module or line.kind else (f"{line.function}()", "")


def _whole_ns(result: AlignedJob) -> int:
    """All device work of the used steps; of a job without a device, its steps."""
    device = sum(
        int(partial.tables.kernels.total_ns[:, partial.steps.indices_of(result.steps)].sum())
        for partial in result.partials.values()
    )
    return device or int(result.step_ns * len(result.steps) * len(result.partials))


def _row(name: str, total: _Total, shares: int, whole_ns: int) -> CompiledRow:
    lines = _distinct(total.source.lines)
    return CompiledRow(
        name=name,
        kernels=tuple(sorted(total.kernels, key=lambda kernel: -total.kernels[kernel])[:MOST_LINES]),
        direction=None if total.source.backward is None else "backward" if total.source.backward else "forward",
        modules=folded_modules(path or kind for path, kind in total.owners),
        lines=tuple(f"{line.file}:{line.line}" for line in lines),
        code=tuple(line.code for line in lines),
        operators=total.source.operators,
        count_per_step=total.count / shares,
        host_us_per_step=total.host_ns / shares / 1e3,
        device_us_per_step=total.device_ns / shares / 1e3,
        share=total.ns / whole_ns if whole_ns else 0.0,
    )


def _distinct(lines: Iterable[SourceLine]) -> list[SourceLine]:
    """Each place in a file once."""
    return list({(line.file, line.line): line for line in reversed(tuple(lines)) if line.file}.values())[::-1][
        :MOST_LINES
    ]


def folded_modules(paths: Iterable[str]) -> tuple[str, ...]:
    """Modules that differ in numbers alone as one: ``layers.*.mlp``."""
    found: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for path in paths:
        found[_NUMBER.sub("*", path)][path] = None
    return tuple(pattern if len(members) > 1 else next(iter(members)) for pattern, members in found.items())[
        :MOST_LINES
    ]


def _modules(totals: Iterable[_Total], shares: int) -> list[CompiledModuleRow]:
    """Time of the calls that compute operations of each module; instances that differ in numbers together."""
    times: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    instances: defaultdict[str, set[str]] = defaultdict(set)
    kinds: dict[str, str] = {}
    for total in totals:
        owners: dict[str, None] = {}
        for path, kind in total.owners:
            pattern = _NUMBER.sub("*", path) if path else kind
            owners[pattern] = None
            instances[pattern].add(path or kind)
            kinds.setdefault(pattern, kind)
        for pattern in owners:
            times[pattern][bool(total.source.backward)] += total.ns
            times[pattern][2] += total.ns * (len(owners) > 1)
    rows = [
        CompiledModuleRow(
            module=next(iter(instances[pattern])) if len(instances[pattern]) == 1 else pattern,
            kind=kinds[pattern],
            instances=len(instances[pattern]),
            forward_us_per_step=forward / shares / 1e3,
            backward_us_per_step=backward / shares / 1e3,
            shared_us_per_step=shared / shares / 1e3,
        )
        for pattern, (forward, backward, shared) in times.items()
    ]
    return sorted(rows, key=lambda row: (-row.forward_us_per_step - row.backward_us_per_step, row.module))


def _by_name(
    totals: Mapping[Key, _Total], by_name: Mapping[str, tuple[SourceLine, ...]]
) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Where each kernel and each operator comes from, the costliest call first; ``by_name``: generated kernels' lines,
    also of those that run outside of graphs.
    """
    owners: defaultdict[str, dict[tuple[str, str], None]] = defaultdict(dict)
    lines: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for (name, _, _), total in sorted(totals.items(), key=lambda item: -item[1].ns):
        for each in (name, *total.kernels):
            owners[each] |= total.owners
            lines[each] |= dict.fromkeys(f"{line.file}:{line.line}" for line in _distinct(total.source.lines))
    for name, known in by_name.items():
        if "::" not in name and not lines.get(name):
            owners[name] = dict.fromkeys(map(_owner, known))
            lines[name] = dict.fromkeys(f"{line.file}:{line.line}" for line in _distinct(known))
    return {
        name: (folded_modules(path or kind for path, kind in found), tuple(lines[name])[:MOST_LINES])
        for name, found in owners.items()
    }


def kernels_with_sources(rows: Sequence[KernelRow], tables: CompiledTables) -> tuple[KernelRow, ...]:
    """The kernels, each with the modules and lines that it computes, where they are known."""
    found = tables.sources
    return tuple(
        replace(row, modules=found[row.name][0], lines=found[row.name][1]) if row.name in found else row for row in rows
    )


def operators_with_sources(rows: Sequence[OperatorRow], tables: CompiledTables) -> tuple[OperatorRow, ...]:
    """The operators, each with the modules and lines whose compiled code calls it, where they are known."""
    found = {row.name: tables.sources[event_name(row.name)] for row in rows if event_name(row.name) in tables.sources}
    return tuple(
        replace(row, modules=found[row.name][0], lines=found[row.name][1]) if row.name in found else row for row in rows
    )
