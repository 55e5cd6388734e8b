"""The events of a Chrome trace as columns: added by batches, every string once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np

from perfscope.analyzers.readers.chrome_events import NOTHING, Args, Number
from perfscope.analyzers.readers.chrome_metadata import (
    LONGEST_NUMBER,
    array,
    first_ids,
    ids_of,
    integer_id,
    text_of,
)
from perfscope.analyzers.readers.chrome_repair import UNREADABLE
from perfscope.trace.columns import TYPES, GrowingColumns, InOrder
from perfscope.trace.trace import NONE, Category, Int64, MemoryCounter

_K = TypeVar("_K")

_CATEGORIES = {
    "cpu_op": Category.CPU_OP,
    "operator": Category.CPU_OP,
    "user_annotation": Category.ANNOTATION,
    "python_function": Category.PYTHON,
    "kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "memset": Category.MEMSET,
    "gpu_user_annotation": Category.GPU_ANNOTATION,
    "cuda_sync": Category.SYNC,
    "runtime": Category.RUNTIME,
    "mtia_ccp_events": Category.KERNEL,  # kineto: "MTIA on-device CCP events"
    "hpu_op": Category.RUNTIME,  # kineto: "HPU host side runtime event"
    "gpu_op": Category.KERNEL,  # Intel's unitrace
    "nvtx": Category.ANNOTATION,
    # What programs write that make such files themselves.
    **dict.fromkeys(("gpu_kernel", "cuda_kernel", "gpu", "compute"), Category.KERNEL),
    **dict.fromkeys(("nccl", "rccl", "communication", "comm", "collective"), Category.KERNEL),
}
_RUNTIME_SUFFIXES = ("_runtime", "_driver")
"""``cuda_runtime``, ``cuda_driver``, ``xpu_runtime``, ``mtia_runtime``, ``privateuse1_driver`` …"""

ABSENT: Final = len(Category)
"""The code of events that have no category, until ``chrome_dialects`` gives them one."""

ON_DEVICE = np.zeros(len(Category) + 1, dtype=np.bool_)
ON_DEVICE[[Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.GPU_ANNOTATION, Category.SYNC]] = True
"""Events on a device's streams."""
PLACED = ON_DEVICE.copy()
PLACED[ABSENT] = True
"""Events that may have a device and a stream among their arguments."""
DESCRIBED = np.zeros(len(Category) + 1, dtype=np.bool_)
DESCRIBED[[Category.CPU_OP, Category.ANNOTATION, Category.OTHER, Category.KERNEL, ABSENT]] = True
"""Events that may have shapes, or arguments of a collective or of a graph's node."""
ANNOTATED = ("name", "said", "annotation", "module_fqn", "autograd_phase")
"""Arguments of a graph's kernel in which the program says what it is."""

_SHAPES = list(TYPES).index("shapes")
_TWO_32 = 1 << 32
_HOST_DEVICE_TYPE = 0
"""c10::DeviceType::CPU."""


class Numbering(dict[_K, int], Generic[_K]):
    """Numbers its keys; ``make`` turns a new key into its number.

    ``make`` must not hold what holds the numbering: both would stay in memory until Python looks for such cycles.
    """

    def __init__(self, make: Callable[[_K], int]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: _K) -> int:
        number = self[key] = self._make(key)
        return number


class ChromeStrings:
    """Every string of a trace once, by name and by JSON text."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self.ids: Numbering[str] = Numbering(partial(_add, self.values))
        self.ids_of_json: Numbering[bytes] = Numbering(partial(_add_json, self.ids))
        """JSON text to the id of the same JSON in one spelling, without white space; NONE for no text and ``null``."""

    def id_of_value(self, raw: msgspec.Raw) -> int:
        """Id of a JSON string's content, of any other value's JSON text, or NONE."""
        text = bytes(raw)
        if text[:1] != b'"':
            return self.ids_of_json[text]
        return self.ids[text_of(text)]


def _add(values: list[str], value: str) -> int:
    values.append(value)
    return len(values) - 1


def _add_json(ids: Numbering[str], text: bytes) -> int:
    if text in (b"", b"null"):
        return NONE
    try:
        plain = msgspec.json.encode(msgspec.json.decode(text))
    except UNREADABLE:  # skipped as an argument, never checked as a value
        plain = text
    return ids[plain.decode("utf-8", "replace")]


class ChromeColumns:
    """Grows by batches; ``finish`` gives each column as one array."""

    COLLECTIVE_NAMES = (
        "row", "kind", "group", "description", "ranks", "dtype", "elements_in", "elements_out", "group_size",
        "sequence", "peer",
    )  # fmt: skip

    def __init__(self) -> None:
        self.strings = ChromeStrings()
        threads = self.threads = InOrder[tuple[str, str]]()
        """(pid, tid) as text, in order of appearance."""
        self._tracks: Numbering[tuple[Any, Any]] = Numbering(lambda track: threads[str(track[0]), str(track[1])])
        """(pid, tid) as written to the thread."""
        self._category_of: Numbering[str] = Numbering(category_of)
        self._events = GrowingColumns()
        self._collectives: list[tuple[int, ...]] = []
        self._graph_nodes: list[tuple[int, int, int]] = []
        self.step_numbers: dict[int, int] = {}
        """Row in the file -> step number, for events without a category that have one."""
        self.has_shapes = False

    @property
    def rows(self) -> int:
        """Events so far."""
        return len(self._events)

    def add(self, events: Sequence[Any], start_ns: Int64, duration_ns: Int64) -> None:
        """Append complete events with their times; ``start_ns`` still counts from the file's base.

        One list per column, made by one comprehension: any work per event costs more.
        """
        count = len(events)
        if not count:
            return
        categories, ids, tracks = self._category_of, self.strings.ids, self._tracks
        category = np.frombuffer(bytearray([categories[e.cat] for e in events]), dtype=np.int8)
        thread = array([tracks[track] for track in zip([e.pid for e in events], [e.tid for e in events], strict=True)])
        name = array([ids[e.name] for e in events])
        args = [e.args for e in events]
        device, stream = self._places(events, args, category)
        shapes, types, inputs = self._described(args, category)
        self._note_steps(args, category)
        external = first_ids(args, "external_id", "external_id_old")
        external[category == Category.PYTHON] = NONE  # nothing but consecutive numbers
        batch = (
            category, name, start_ns, duration_ns, thread, device, stream,
            first_ids(args, "correlation", "correlation_id", "connection_id"), external, shapes, types, inputs,
        )  # fmt: skip
        self._events.append(batch)

    def describe(
        self, at: int, category: bytearray, described: Sequence[tuple[int, Args]], steps: Sequence[tuple[int, int]]
    ) -> None:
        """Add what belongs to rows of a batch whose first row is or will be ``at``.

        ``described`` are collectives and nodes of graphs (row in the batch, arguments), ``steps`` (row in the batch,
        number of the step).
        """
        for row, args in described:
            if args.kind is not NOTHING or args.group is not NOTHING:
                self._add_collective(at + row, args)
        for row, args in described:
            if args.graph_node != NONE and category[row] == Category.KERNEL:
                self._add_graph_node(at + row, args)
        self.step_numbers.update((at + row, number) for row, number in steps)

    def append(self, batch: Sequence[Any]) -> None:
        """Append columns in the order of ``TYPES``, all ids the trace's own."""
        self.has_shapes = self.has_shapes or bool((batch[_SHAPES] != NONE).any())
        self._events.append(batch)

    def track(self, process: Number, thread: Number) -> int:
        """The number of a thread, from its process's and its own id as written."""
        return self._tracks[process, thread]

    def _note_steps(self, args: list[Args], category: Any) -> None:
        rows = np.flatnonzero(category == ABSENT).tolist()
        numbers = ids_of([args[row].step for row in rows]).tolist()
        self.step_numbers.update(
            (self.rows + row, number) for row, number in zip(rows, numbers, strict=True) if number >= 0
        )

    def _places(self, events: Sequence[Any], args: list[Args], category: Any) -> tuple[Any, Int64]:
        """(device, stream) of each event; NONE on the host. Where the arguments lack them, the track has them."""
        device, stream = np.full(len(args), NONE, dtype=np.int32), np.full(len(args), NONE, dtype=np.int64)
        there = PLACED[category]
        rows = np.flatnonzero(there)
        if not len(rows):
            return device, stream
        picked = list(compress(args, there.tolist()))
        on_device = ids_of([arg.device for arg in picked])
        on_stream = ids_of([arg.stream for arg in picked])
        certain = ON_DEVICE[category[rows]]
        for at in np.flatnonzero(certain & (on_device == NONE)).tolist():
            on_device[at] = integer_id(events[rows[at]].pid)
        for at in np.flatnonzero(certain & (on_stream == NONE)).tolist():
            on_stream[at] = integer_id(events[rows[at]].tid)
        device[rows], stream[rows] = np.clip(on_device, NONE, np.iinfo(np.int32).max), on_stream
        return device, stream

    def _described(self, args: list[Args], category: Any) -> tuple[Any, Any, Any]:
        """(shapes, types, concrete inputs) of each event as ids of their JSON text; adds collectives and nodes of
        graphs on the way.
        """
        described = DESCRIBED[category]
        rows = np.flatnonzero(described)
        picked = list(compress(args, described.tolist()))
        shapes = self._json_ids(len(args), rows, [arg.shapes for arg in picked])
        types = self._json_ids(len(args), rows, [arg.types for arg in picked])
        inputs = self._json_ids(len(args), rows, [arg.inputs for arg in picked])
        self.has_shapes = self.has_shapes or bool((shapes != NONE).any())
        for at in _said([arg.kind for arg in picked], [arg.group for arg in picked]):
            self._add_collective(self.rows + int(rows[at]), picked[at])
        for row in np.flatnonzero(category == Category.KERNEL).tolist():
            if args[row].graph_node != NONE:
                self._add_graph_node(self.rows + row, args[row])
        return shapes, types, inputs

    def _json_ids(self, count: int, rows: Int64, texts: list[msgspec.Raw]) -> Any:
        """A column with the ids of ``texts`` at ``rows`` and NONE elsewhere."""
        column = np.full(count, NONE, dtype=np.int32)
        if texts.count(NOTHING) < len(texts):
            ids = self.strings.ids_of_json
            # JSON has no zero byte. Splitting one copy takes half as long as copying each text.
            column[rows] = array([ids[text] for text in b"\0".join(texts).split(b"\0")])
        return column

    def _add_collective(self, row: int, args: Args) -> None:
        text = self.strings.id_of_value
        self._collectives.append((
            row, text(args.kind), text(args.group), text(args.group_description), text(args.ranks), text(args.dtype),
            _count(args.elements_in), _count(args.elements_out), _count(args.group_size), _count(args.sequence),
            _count(args.source if args.destination is NOTHING else args.destination),
        ))  # fmt: skip

    def _add_graph_node(self, row: int, args: Args) -> None:
        """A kernel of a CUDA graph: the node's id alone where it includes the graph's, else both in one."""
        node, graph = integer_id(args.graph_node), integer_id(args.graph)
        if node in (0, NONE):
            return
        if 0 < node < _TWO_32 and 0 < graph < _TWO_32 >> 1:
            node |= graph << 32
        said = {key: text_of(bytes(raw)) for key in ANNOTATED if (raw := getattr(args, key)) is not NOTHING}
        text = self.strings.ids[json.dumps(said)] if said else NONE
        self._graph_nodes.append((row, node, text))

    def finish(self) -> dict[str, Any]:
        """Every column, in the order of the file; no event can be added any more."""
        return self._events.finish()

    def finish_collectives(self) -> dict[str, Int64]:
        """Every column of the collectives, in the order of the file; ``row`` counts the events in that order."""
        table = np.array(self._collectives, dtype=np.int64).reshape(-1, len(self.COLLECTIVE_NAMES))
        return {name: table[:, at].copy() for at, name in enumerate(self.COLLECTIVE_NAMES)}

    def finish_graph_nodes(self) -> tuple[Int64, Int64, Int64]:
        """(row, node, annotation) of the kernels of CUDA graphs, in the order of the file."""
        table = np.array(self._graph_nodes, dtype=np.int64).reshape(-1, 3)
        return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()


class MemoryColumns:
    """The allocator's events; grows by batches as ``ChromeColumns`` does."""

    def __init__(self) -> None:
        self._batches: list[tuple[Int64, Int64, Int64, Int64]] = []

    def add(self, events: Sequence[Any], time_ns: Int64) -> None:
        """Append ``[memory]`` events with their times, which still count from the file's base."""
        args = [event.args for event in events]
        device = ids_of([a.device for a in args])
        device[ids_of([a.device_type for a in args]) == _HOST_DEVICE_TYPE] = NONE
        self._batches.append((time_ns, device, ids_of([a.allocated for a in args]), ids_of([a.reserved for a in args])))

    def finish(self, base_ns: int) -> MemoryCounter:
        """All of them, in time order."""
        parts = [np.concatenate(part) for part in zip(*self._batches, strict=True)] or [np.empty(0, np.int64)] * 4
        order = np.argsort(parts[0], kind="stable")
        return MemoryCounter(parts[0][order] + base_ns, parts[1][order], parts[2][order], parts[3][order])


def _said(*fields: list[msgspec.Raw]) -> list[int]:
    """Places, ascending, where any of the fields is there."""
    places: set[int] = set()
    for values in fields:
        if values.count(NOTHING) < len(values):  # counting compares identities first, and most often there are none
            places.update([at for at, value in enumerate(values) if value is not NOTHING])
    return sorted(places)


def _count(raw: msgspec.Raw) -> int:
    """A count, also one in quotes; NONE where not recorded."""
    text = bytes(raw).strip(b'"')
    return integer_id(int(text)) if text.isdigit() and len(text) <= LONGEST_NUMBER else NONE


def category_of(name: str) -> int:
    """The category for a trace's ``cat``, in upper or lower case; OTHER for unknown ones, ``ABSENT`` for none."""
    if not name:
        return ABSENT
    known = name.casefold()
    if (category := _CATEGORIES.get(known)) is not None:
        return category
    if known.endswith(_RUNTIME_SUFFIXES) or known == "hip" or known.startswith("hip_"):
        return Category.RUNTIME
    return Category.OTHER
