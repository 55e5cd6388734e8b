"""Execution traces of PyTorch: what its operators were given, to complete a trace that does not say.

``torch.profiler.ExecutionTraceObserver`` writes a node for each operator, with the id of its record function
(``rf_id``), its inputs with types and shapes, and the process groups. kineto writes the same id as ``External id``. The
format is that of ``torch/csrc/profiler/standalone/execution_trace_observer.cpp``, schemas 1.0 to 1.1.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from perfscope.analyzers.readers import sources
from perfscope.analyzers.readers.plain_values import mappings, text, whole
from perfscope.errors import TraceError
from perfscope.frozen import dataclass
from perfscope.redact import redact_value
from perfscope.trace.trace import NONE, Category, Int64, ProcessGroup, Trace

MAX_BYTES: Final = 2 << 30
_GROUPS: Final = "## process_group:init ##"
_ENOUGH: Final = 0.5
"""Share of a trace's operators whose ids and names must agree for the ids to be taken as the same."""
_NUMBERS: Final = re.compile(r"(?:GenericList\[)?(?:Int|Double|Bool|Sym(?:Int|Float|Bool))\b")
"""Types of inputs that kineto records with their values."""


class _Values(msgspec.Struct, gc=False):
    values: Any = ()
    shapes: Any = ()
    types: Any = ()


class _Attribute(msgspec.Struct, gc=False):
    name: str
    value: Any = None


class _Operator(msgspec.Struct, gc=False):
    name: str
    inputs: Any = None
    attrs: list[_Attribute] = []
    rf_id: int = NONE


class _Document(msgspec.Struct, gc=False):
    nodes: list[_Operator]


@dataclass(frozen=True)
class ExecutionTrace:
    """The operators of one process in the order of their ids, and its process groups."""

    path: Path
    ids: tuple[int, ...]
    names: tuple[str, ...]
    inputs: tuple[Any, ...]
    """``values``, ``shapes`` and ``types`` of each operator, as they are written."""
    groups: tuple[ProcessGroup, ...]


def read(path: Path) -> ExecutionTrace:
    """Read an execution trace. Raises TraceError, naming the file, where it cannot be read."""
    data = sources.read_whole(path, MAX_BYTES, "record fewer steps")
    try:
        nodes = msgspec.json.decode(data, type=_Document).nodes
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceError(
            f"{path}: is cut short or damaged ({error}): the observer was not stopped (unregister_callback) before "
            "the process ended"
        ) from error
    known = sorted(((_id(node), place) for place, node in enumerate(nodes)), key=lambda each: each[0])
    chosen = [(number, nodes[place]) for number, place in known if number > 0]
    return ExecutionTrace(
        path,
        tuple(number for number, _ in chosen),
        tuple(node.name for _, node in chosen),
        tuple(node.inputs for _, node in chosen),
        tuple(group for node in nodes if node.name == _GROUPS for group in _groups(node.inputs)),
    )


def complete(trace: Trace, execution: ExecutionTrace) -> Trace:
    """The trace, with inputs of operators and process groups where it has none and ``execution`` does.

    Operators are linked by their ids; where these mean something else (other versions), by the order of those of one
    name, if both files have equally many.
    """
    rows = trace.rows(Category.CPU_OP)
    node = _linked(trace, rows, execution)
    lacking = np.flatnonzero((node != NONE) & (trace.shapes[rows] == NONE))
    strings = _Strings(trace.strings)
    columns = {name: getattr(trace, name).copy() for name in ("shapes", "types", "inputs")}
    for place in lacking.tolist():
        described = _described(execution.inputs[int(node[place])])
        if described is not None:
            for name, words in zip(columns, described, strict=True):
                columns[name][rows[place]] = strings.number(words)
    filled = int((columns["shapes"][rows[lacking]] != NONE).sum())
    if not filled:
        return replace(trace, groups=_with_groups(trace.groups, execution.groups))
    note = f"shapes of {filled} operators are from the execution trace {execution.path.name}"
    report = replace(trace.parse_report, notes=(*trace.parse_report.notes, note))
    return replace(
        trace,
        strings=tuple(strings.all),
        has_shapes=True,
        groups=_with_groups(trace.groups, execution.groups),
        parse_report=report,
        **columns,
    )


def unusable(trace: Trace, error: TraceError) -> Trace:
    """The trace, whose parse report says why its execution trace could not complete it."""
    report = replace(trace.parse_report, notes=(*trace.parse_report.notes, str(error)))
    return replace(trace, parse_report=report)


class _Strings:
    """A trace's strings, and those that are added."""

    def __init__(self, known: tuple[str, ...]) -> None:
        self.all = list(known)
        self._numbers: dict[str, int] = {}

    def number(self, words: str) -> int:
        if words not in self._numbers:
            self._numbers[words] = len(self.all)
            self.all.append(words)
        return self._numbers[words]


def _linked(trace: Trace, rows: Int64, execution: ExecutionTrace) -> Int64:
    """For each of ``rows`` the place of its operator in ``execution``, or NONE."""
    numbers = {name: number for number, name in enumerate(trace.strings)}
    names = np.array([numbers.get(name, NONE) for name in execution.names], dtype=np.int64)
    ids = np.array(execution.ids, dtype=np.int64)
    if not len(ids) or not len(rows):
        return np.full(len(rows), NONE, dtype=np.int64)
    place = np.minimum(np.searchsorted(ids, trace.external_id[rows]), len(ids) - 1)
    same = (ids[place] == trace.external_id[rows]) & (names[place] == trace.name[rows])
    if same.mean() >= _ENOUGH:
        return np.where(same, place, NONE)
    return _by_order(trace.name[rows].astype(np.int64), names)


def _by_order(name: Int64, other: Int64) -> Int64:
    """For each event the place in ``other`` of the event of the same name that is as far along."""
    found = np.full(len(name), NONE, dtype=np.int64)
    mine, theirs = np.argsort(name, kind="stable"), np.argsort(other, kind="stable")
    for each in np.intersect1d(name, other).tolist():
        rows = mine[slice(*np.searchsorted(name[mine], [each, each + 1]))]
        places = theirs[slice(*np.searchsorted(other[theirs], [each, each + 1]))]
        if len(rows) == len(places):
            found[rows] = places
    return found


def _id(node: _Operator) -> int:
    return next((whole(each.value) for each in node.attrs if each.name == "rf_id"), node.rf_id)


def _described(inputs: Any) -> tuple[str, str, str] | None:
    """JSON texts of an operator's dimensions, types and concrete inputs, as kineto writes them; None without any."""
    try:
        given = msgspec.convert(inputs, _Values)
        rows = [_input(*each) for each in zip(given.values, given.shapes, given.types, strict=True)]
    except (msgspec.ValidationError, TypeError, ValueError):
        return None
    if not rows:
        return None
    shapes, types, concrete = ([row[column] for row in rows] for column in range(3))
    return json.dumps(shapes), json.dumps(types), json.dumps(concrete)


def _input(value: Any, shape: Any, kind: str) -> tuple[Any, str, str]:
    """Dimensions, type and concrete value of one input."""
    if kind.startswith("Tensor("):
        return shape, kind[len("Tensor(") : -1], ""
    if kind.startswith("GenericList[Tensor"):
        return shape, "TensorList", ""
    if _NUMBERS.match(kind) is None or isinstance(value, str):
        return [], "", ""  # a device, a text: kineto leaves these out, too
    return [], "ScalarList" if kind.startswith("GenericList") else "Scalar", str(value)


def _groups(inputs: Any) -> list[ProcessGroup]:
    """The groups that a process had when recording began: the observer writes torch's list of them as JSON."""
    try:
        listed = json.loads(msgspec.convert(inputs, _Values).values[0])
    except (msgspec.ValidationError, TypeError, ValueError, IndexError):
        return []
    groups = []
    for each in mappings(listed):
        ranks = each.get("ranks")
        size = whole(each.get("group_size"))
        members = tuple(map(whole, ranks)) if isinstance(ranks, list) and ranks else tuple(range(size))
        groups.append(ProcessGroup(text(each.get("pg_name")), redact_value(text(each.get("pg_desc"))), members))
    return groups


def _with_groups(own: tuple[ProcessGroup, ...], others: tuple[ProcessGroup, ...]) -> tuple[ProcessGroup, ...]:
    """The trace's groups; their ranks, and further groups, from ``others``."""
    known = {group.name: group for group in others if group.name}
    listed = tuple(
        replace(group, ranks=known[group.name].ranks) if not group.ranks and group.name in known else group
        for group in own
    )
    return (*listed, *(group for name, group in known.items() if name not in {each.name for each in own}))
