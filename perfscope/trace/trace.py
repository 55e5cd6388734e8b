"""Trace: one rank's events, columnar, checked, never modified."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from perfscope.frozen import dataclass
from perfscope.trace.names import Names, is_kept

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
Int8 = NDArray[np.int8]
Ids = NDArray[np.int32 | np.int64]
"""64 bits where a writer's ids need them."""
Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

NONE = -1
"""In any id column: this event has no such id, or it is not recorded."""
NEVER = -(2**61)
"""A time (ns) before all others, also after some additions."""

_TWO_16 = 1 << 16

WHOLE_GRAPH = "CUDA graph "
"""Begins the name of a kernel that stands for a whole CUDA graph, whose own kernels the recording does not list."""


class Category(enum.IntEnum):
    """What an event is, independent of the tool that recorded it."""

    OTHER = 0
    CPU_OP = 1
    """A framework operator on a host thread."""
    ANNOTATION = 2
    """A named range on a host thread: steps, data loader, gloo collectives, the user's own."""
    PYTHON = 3
    """A Python function call."""
    RUNTIME = 4
    """A call of the device's runtime or driver: launches, copies, synchronizations."""
    KERNEL = 5
    MEMCPY = 6
    MEMSET = 7
    GPU_ANNOTATION = 8
    """A host range's copy on the device; it covers idle time, so it is not device work."""
    SYNC = 9
    """A wait on the device (event, stream, context); not device work."""


DEVICE_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)


@dataclass(frozen=True)
class Thread:
    """A host thread (or a device's stream track) as the trace names it."""

    pid: str
    tid: str
    name: str


@dataclass(frozen=True)
class Device:
    """A device as the trace describes it."""

    index: int
    name: str
    memory_bytes: int | None


@dataclass(frozen=True)
class ProcessGroup:
    """A process group that this rank belongs to. ``ranks`` is empty when the trace does not list them."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class ParseReport:
    """What a reader dropped or repaired. Nothing is dropped silently: the page repeats this."""

    dropped_events: int = 0
    """Events that could not be read."""
    repaired_events: int = 0
    """Events of invalid JSON that were repaired and then read; the file's metadata counts as one."""
    truncated: bool = False
    """The file ends before the trace does: the job was killed while it wrote."""
    notes: tuple[str, ...] = ()
    complete_until_ns: int | None = None
    """Of a truncated file: events that begin later may be missing. Profilers write all operators first, and then what
    devices did, in no order of time. None where nothing is missing."""
    all_operators: bool = True
    """No operator is missing: in the file all of them come before what devices did, and some of that is there."""
    unread_processes: tuple[str, ...] = ()
    """Processes of which no event is of a known kind, in a file without device work: they may be devices."""


@dataclass(frozen=True, eq=False)
class CollectiveArgs:
    """The recorded arguments of collectives: parallel arrays, one entry for each event that has any.

    ``row`` indexes the trace's events (ascending). ``kind``, ``group``, ``ranks`` and ``dtype`` index
    ``Trace.strings``. ``elements_in`` and ``elements_out`` count elements of ``dtype``; ``sequence`` is the sequence
    number within the group; ``peer`` is the global rank that a send goes to or a recv comes from. NONE where not
    recorded.
    """

    row: Int64
    kind: Int32
    group: Int32
    ranks: Int32
    dtype: Int32
    elements_in: Int64
    elements_out: Int64
    group_size: Int64
    sequence: Int64
    peer: Int64 = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if len(self.peer) != len(self.row):  # of a reader that has none
            object.__setattr__(self, "peer", np.full(len(self.row), NONE, dtype=np.int64))


def _no_numbers() -> Int64:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class GraphNodes:
    """Kernels that CUDA graphs launched, and which node of which graph each is: parallel arrays, one entry for each.

    ``row`` indexes the trace's events (ascending). ``node`` is the graph's id in the upper 32 bits and the node's in
    the lower ones, as in CUPTI's ``graphNodeId`` and in torch's annotations of kernels. ``annotation`` indexes
    ``Trace.strings``: the JSON text of what the program said of the node, where the trace has it; else NONE.
    """

    row: Int64 = field(default_factory=_no_numbers)
    node: Int64 = field(default_factory=_no_numbers)
    annotation: Int64 = field(default_factory=_no_numbers)


@dataclass(frozen=True, eq=False)
class MemoryCounter:
    """The allocator's own counters (torch's ``[memory]`` events), in time order. Bytes; NONE where not recorded."""

    time_ns: Int64
    device: Int64
    """Device index; NONE is the host."""
    allocated: Int64
    reserved: Int64


@dataclass(frozen=True, eq=False)
class Trace:
    """One rank's events in parallel arrays of one length, ordered by start; of equal starts the longer is first.

    Times are absolute ns on the rank's own clock; an event covers ``[start_ns, start_ns + duration_ns)``.
    """

    source: str
    """Path or URL that it was read from; for messages."""
    strings: tuple[str, ...]
    """Every string once; id columns index it."""
    category: Int8
    name: Int32
    """Index into ``strings``."""
    start_ns: Int64
    duration_ns: Int64
    thread: Int32
    """Index into ``threads``."""
    device: Int32
    """Device index of device work; NONE on the host."""
    stream: Int64
    """Stream of device work; NONE on the host."""
    correlation: Ids
    """Links device work to the runtime call that launched it; NONE if not recorded."""
    external_id: Ids
    """Links device work and runtime calls to the operator above them; NONE if not recorded."""
    shapes: Int32
    """Index into ``strings`` of the JSON text of the operator's input dimensions; NONE if not recorded."""
    types: Int32
    """Index into ``strings`` of the JSON text of the operator's input types; NONE if not recorded."""
    inputs: Int32
    """Index into ``strings`` of the JSON text of the operator's concrete scalar inputs; NONE if not recorded."""
    threads: tuple[Thread, ...]
    collectives: CollectiveArgs
    memory: MemoryCounter
    graph_nodes: GraphNodes = field(default_factory=GraphNodes)
    rank: int | None = None
    world_size: int | None = None
    backend: str = ""
    host: str = ""
    devices: tuple[Device, ...] = ()
    groups: tuple[ProcessGroup, ...] = ()
    has_shapes: bool = False
    """The profiler was set to record shapes."""
    versions: dict[str, str] = field(default_factory=dict)
    """Recorded versions: ``nccl``, ``cuda_runtime`` …"""
    parse_report: ParseReport = field(default_factory=ParseReport)

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> Int64:
        """First ns after each event."""
        return self.start_ns + self.duration_ns

    def ends_ns(self, rows: Int64) -> Int64:
        """First ns after each of some events: the column of all ends is not stored."""
        return self.start_ns[rows] + self.duration_ns[rows]

    def rows(
        self, *categories: Category, named: Callable[[str], object] | None = None, threads: Int64 | None = None
    ) -> Int64:
        """Rows of the given categories, ascending (so in time order).

        Where given, only those whose name makes ``named`` true, and those on ``threads``.
        """
        rows = self._rows_named(categories, named) if named else self._rows_of(categories)
        if threads is None:
            return rows
        wanted = np.zeros(len(self.threads) + 1, dtype=np.bool_)  # the last is for NONE
        wanted[threads] = True
        return rows[wanted[self.thread[rows]]]

    def _rows_of(self, categories: tuple[Category, ...]) -> Int64:
        if len(categories) > 1:
            chosen = np.zeros(len(Category), dtype=np.bool_)
            chosen[list(categories)] = True
            return np.flatnonzero(chosen[self.category])
        order, begin = self._by_category
        return order[begin[categories[0]] : begin[categories[0] + 1]].astype(np.int64)

    def _rows_named(self, categories: tuple[Category, ...], named: Callable[[str], object]) -> Int64:
        parts: list[Ids] = []
        for category in categories:
            by_name = self._by_name[category]
            parts += map(by_name.rows_at, by_name.names.where(named))
        if not parts:
            return np.empty(0, dtype=np.int64)
        rows: Int64 = (parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts))).astype(np.int64)
        return rows

    def names_where(self, predicate: Callable[[str], object], rows: Int64 | None = None) -> Bool:
        """For each event, or each of these rows: whether its name satisfies ``predicate``, which runs at most once per
        distinct name.
        """
        names = self.name if rows is None else self.name[rows]
        hit = np.zeros(len(self.strings), dtype=np.bool_)
        if len(names) >= len(self._names) or is_kept(predicate):
            hit[self._names.where(predicate)] = True
        else:
            hit[[name for name in sorted(set(names.tolist())) if predicate(self.strings[name])]] = True
        return hit[names]

    @functools.cached_property
    def _by_category(self) -> tuple[Ids, Int64]:
        """Rows by category, ascending in each; where each category's begin, then where the last one's end."""
        order = np.argsort(self.category, kind="stable")
        begin = np.zeros(len(Category) + 1, dtype=np.int64)
        np.cumsum(np.bincount(self.category, minlength=len(Category)), out=begin[1:])
        return (order if len(order) > np.iinfo(np.int32).max else order.astype(np.int32)), begin

    @functools.cached_property
    def _by_name(self) -> _ByName:
        """The rows of each category by name."""
        return _ByName(self)

    @functools.cached_property
    def _names(self) -> Names:
        """Strings that are names of events. Most strings are no names but texts of shapes, which are many and long."""
        numbers = np.flatnonzero(np.bincount(self.name, minlength=1)).tolist()
        return Names([self.strings[number] for number in numbers], numbers)

    def name_of(self, row: int) -> str:
        """The name of one event."""
        return self.strings[int(self.name[row])]

    def self_check(self) -> None:
        """Raise ValueError where the columns contradict each other."""
        columns = (
            self.category, self.name, self.duration_ns, self.thread, self.device, self.stream, self.correlation,
            self.external_id, self.shapes, self.types, self.inputs,
        )  # fmt: skip
        if any(len(column) != len(self) for column in columns):
            raise ValueError(f"{self.source}: columns differ in length")
        if len(self) == 0:
            return
        if (np.diff(self.start_ns) < 0).any():
            raise ValueError(f"{self.source}: events are not in time order")
        if (self.duration_ns < 0).any():
            raise ValueError(f"{self.source}: an event ends before it starts")
        for column, size, what in (
            (self.name, len(self.strings), "name"),
            (self.thread, len(self.threads), "thread"),
        ):
            if column.min() < 0 or column.max() >= size:
                raise ValueError(f"{self.source}: a {what} index is out of range")
        for column in (self.shapes, self.types, self.inputs):
            if column.min() < NONE or column.max() >= len(self.strings):
                raise ValueError(f"{self.source}: a string index is out of range")
        _check_ascending(self, "collective", self.collectives.row)
        _check_ascending(self, "graph node", self.graph_nodes.row)


@dataclass(frozen=True, eq=False)
class _NamedRows:
    """The rows of one category by name, ascending in each: those of the name with the number ``at`` from ``begins[at]``
    on.
    """

    names: Names
    rows: Ids
    begins: list[int]

    def rows_at(self, at: int) -> Ids:
        """Those of one name."""
        return self.rows[self.begins[at] : self.begins[at + 1]]


class _ByName(dict[Category, _NamedRows]):
    """Category -> its rows by name, found when first asked for: most questions are about a few of many names."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._order, self._begin = trace._by_category
        self._name, self._strings = trace.name, trace.strings

    def __missing__(self, category: Category) -> _NamedRows:
        rows = self._order[self._begin[category] : self._begin[category + 1]]
        names = self._name[rows]
        # Numbers of 16 bits are sorted in a fraction of the time.
        order = np.argsort(names.astype(np.uint16) if len(self._strings) <= _TWO_16 else names, kind="stable")
        names = names[order]
        begins = np.flatnonzero(np.append(True, names[1:] != names[:-1])) if len(names) else np.empty(0, dtype=np.int64)
        texts = [self._strings[name] for name in names[begins].tolist()]
        found = _NamedRows(Names(texts, range(len(texts))), rows[order], [*begins.tolist(), len(names)])
        self[category] = found
        return found


def _check_ascending(trace: Trace, what: str, rows: Int64) -> None:
    if len(rows) and (rows[0] < 0 or rows[-1] >= len(trace) or (np.diff(rows) <= 0).any()):
        raise ValueError(f"{trace.source}: {what} rows are not ascending rows of the trace")
