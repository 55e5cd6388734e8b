"""Builds the trace of one process of an Nsight Systems export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from perfscope.analyzers.readers import nsys_processes
from perfscope.analyzers.readers.nsys_columns import (
    MEMORY_COLUMNS,
    MEMORY_EVENTS,
    NsysColumns,
    memory_counter,
    numbered,
)
from perfscope.analyzers.readers.nsys_names import Range, call_of, copy_of, fill_of, range_of, sync_of
from perfscope.analyzers.readers.nsys_tables import Owner, Tables, read_rows, read_strings, tid_of
from perfscope.errors import TraceError
from perfscope.execution.memory_bound import MemoryBound
from perfscope.redact import redact_names
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import (
    NEVER,
    NONE,
    WHOLE_GRAPH,
    Category,
    CollectiveArgs,
    Device,
    Int32,
    Int64,
    ParseReport,
    Thread,
    Trace,
)
from perfscope.typed import clean

_CALLS: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
_SYNCS: Final = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_EVENTS: Final = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
_OS_CALLS: Final = "OSRT_API"
_DEVICE_COLUMNS: Final = ("start", "end", "deviceId", "streamId", "correlationId")

_NO_STREAM: Final = (1 << 32) - 1
"""CUPTI's "no stream"."""
_EARLIEST_EPOCH_NS: Final = 10**18
"""2001. Later times count from the epoch: the report was exported with ``--ts-normalize true``."""

Table = dict[str, Int64]
"""Columns of the rows of one process."""


def build(tables: Tables, process: nsys_processes.RankSlice, source: str) -> Trace:
    """The trace of one process; ``source`` is its name in messages. Raises TraceError if it has no events."""
    return _NsysBuilder(tables, process, source).build()


class _NsysBuilder:
    def __init__(self, tables: Tables, process: nsys_processes.RankSlice, source: str) -> None:
        self._tables = tables
        self._process = process
        self._source = source
        self._columns = NsysColumns()
        self._memory_bound = MemoryBound(source)
        self._rows = 0
        self._names: dict[int, str] = {}
        self._notes: list[str] = []

    def build(self) -> Trace:
        kernels = self._device_table(nsys_processes.KERNELS, "demangledName", "shortName", "mangledName")
        calls = self._host_table(_CALLS, "correlationId", "nameId")
        os_calls = self._host_table(_OS_CALLS, "nameId")
        kernels["name"] = _first_of(kernels["demangledName"], kernels["shortName"], kernels["mangledName"])
        ranges, plain = self._ranges()
        self._read_names(kernels["name"], calls["nameId"], os_calls["nameId"], ranges["textId"])
        training = np.union1d(calls["globalTid"], ranges["globalTid"])
        uses_nccl = any(self._names.get(number, "").startswith("nccl") for number in distinct(kernels["name"]).tolist())
        # Each table is released once it is in the columns: the largest ones would otherwise be in memory twice.
        self._add_device_work(kernels)
        del kernels
        self._add_syncs()
        self._add_calls(Category.RUNTIME, calls, call_of, calls["correlationId"])
        del calls
        self._add_ranges(ranges, plain)
        del ranges, plain
        self._add_os_calls(os_calls, training)
        del os_calls
        return self._trace("nccl" if uses_nccl else "")

    def _read_names(self, *columns: Int64) -> None:
        wanted = {number for ids in columns for number in distinct(ids).tolist()} - {NONE}
        self._names = read_strings(self._tables, wanted)
        if missing := len(wanted) - len(self._names):
            self._notes.append(f"{missing} names are not in the report; events with them are called [name N]")

    def _table(self, table: str, columns: Sequence[str], owner: str) -> Table:
        chunks = []
        for chunk in self._tables.read(table, columns, only=Owner(owner, self._process.key)):
            chunks.append(chunk)
            self._rows += len(chunk.integers[columns[0]])
            self._memory_bound.check(self._rows)
        return {
            name: np.concatenate([np.empty(0, np.int64), *(chunk.integers[name] for chunk in chunks)])
            for name in columns
        }

    def _device_table(self, table: str, *more: str) -> Table:
        return self._table(table, [*_DEVICE_COLUMNS, *more], "globalPid")

    def _host_table(self, table: str, *more: str) -> Table:
        return self._table(table, ["start", "end", "globalTid", *more], "globalTid")

    def _number(self, ids: Int64, name_of: Callable[[str], str] = str) -> Int32:
        """Numbers in the trace's strings of string ids of the export."""
        return numbered(ids, lambda number: self._columns.strings[name_of(self._name(number))])

    def _name(self, number: int) -> str:
        return self._names.get(number, f"[name {number}]")

    def _add_device_work(self, kernels: Table) -> None:
        self._add_on_device(Category.KERNEL, kernels, self._number(kernels["name"]))
        self._add_graphs(kernels["correlationId"])
        copies = self._device_table(nsys_processes.COPIES, "copyKind", "srcKind", "dstKind")
        what = np.stack([copies["copyKind"], copies["srcKind"], copies["dstKind"]], axis=1)
        self._add_on_device(Category.MEMCPY, copies, self._described(what, copy_of))
        fills = self._device_table(nsys_processes.FILLS, "memKind")
        self._add_on_device(Category.MEMSET, fills, self._described(fills["memKind"][:, np.newaxis], fill_of))

    def _described(self, what: Int64, name_of: Callable[..., str]) -> Int32:
        """Numbers of the names that ``name_of`` makes of each row's values."""
        return numbered(what, lambda values: self._columns.strings[name_of(*values)])

    def _add_graphs(self, kernel_correlation: Int64) -> None:
        """CUDA graphs recorded as a whole, without those whose nodes are recorded too."""
        graphs = self._device_table(nsys_processes.GRAPHS, "graphId")
        whole = ~np.isin(graphs["correlationId"], kernel_correlation[kernel_correlation != NONE])
        graphs = {name: column[whole] for name, column in graphs.items()}
        if not len(graphs["start"]):
            return
        names = self._described(graphs["graphId"][:, np.newaxis], lambda graph: f"{WHOLE_GRAPH}{graph}")
        self._add_on_device(Category.KERNEL, graphs, names)
        self._notes.append(
            f"{len(names)} CUDA graph launches were recorded as one kernel each, so communication and idle time inside "
            "them count as compute; record with nsys profile --cuda-graph-trace=node"
        )

    def _add_on_device(self, category: Category, table: Table, names: Int32) -> None:
        stream = np.where(table["streamId"] == _NO_STREAM, NONE, table["streamId"])
        self._columns.add(
            category, names, table["start"], table["end"], self._tracks(table["deviceId"], stream),
            device=table["deviceId"], stream=stream, correlation=table["correlationId"],
        )  # fmt: skip

    def _tracks(self, first: Int64, second: Int64) -> Int32:
        """Numbers of the tracks named by two columns."""
        return numbered(
            np.stack([first, second], axis=1), lambda pair: self._columns.threads[str(pair[0]), str(pair[1])]
        )

    def _add_syncs(self) -> None:
        """Waits and event records, without their device: reports give device 0 for those of every context."""
        syncs = self._device_table(_SYNCS, "syncType")
        syncs["deviceId"][:] = NONE
        self._add_on_device(Category.SYNC, syncs, self._described(syncs["syncType"][:, np.newaxis], sync_of))
        events = self._table(_EVENTS, ["timestamp", *_DEVICE_COLUMNS[2:]], "globalPid")
        # Before 2025 an event's completion is not recorded, and later only on request.
        timed = events["timestamp"] > 0
        events = {name: column[timed] for name, column in events.items()}
        events["start"] = events["end"] = events["timestamp"]
        names = np.full(len(events["start"]), self._columns.strings["Event Record"], dtype=np.int32)
        self._add_on_device(Category.SYNC, events, names)

    def _add_calls(
        self, category: Category, table: Table, name_of: Callable[[str], str], correlation: Int64 | None = None
    ) -> None:
        more = {} if correlation is None else {"correlation": correlation}
        names = self._number(table["nameId"], name_of)
        self._columns.add(category, names, table["start"], table["end"], self._threads(table["globalTid"]), **more)

    def _threads(self, tids: Int64) -> Int32:
        pid = str(self._process.pid)
        return numbered(tids, lambda tid: self._columns.threads[pid, str(tid_of(tid))])

    def _ranges(self) -> tuple[Table, Table]:
        """(NVTX ranges; category, name and shapes of those with a text of their own)."""
        ranges: list[Table] = []
        plain: list[Table] = []
        integers = ["start", "end", "eventType", "globalTid", "textId"]
        for chunk in self._tables.read(
            nsys_processes.RANGES, integers, ["text"], Owner("globalTid", self._process.key)
        ):
            chosen = np.flatnonzero(np.isin(chunk.integers["eventType"], nsys_processes.RANGE_EVENTS))
            table = {name: column[chosen] for name, column in chunk.integers.items()}
            texts = [chunk.texts["text"][row] for row in chosen.tolist()]
            # A text of its own takes precedence over a registered one.
            table["textId"][[at for at, text in enumerate(texts) if text is not None]] = NONE
            ranges.append(table)
            plain.append(self._meaning([None if text is None else range_of(text) for text in texts]))
        return _joined(ranges, integers), _joined(plain, ["category", "name", "shapes"])

    def _meaning(self, ranges: Sequence[Range | None]) -> Table:
        """Category, name and shapes of ranges; NONE where not known yet."""
        strings = self._columns.strings
        kinds: dict[Range | None, int] = {None: 0}
        place = [kinds.setdefault(one, len(kinds)) for one in ranges]
        values = [(NONE, NONE, NONE)]
        values += [
            (int(one.category), strings[one.name], strings[one.shapes] if one.shapes else NONE)
            for one in kinds
            if one is not None
        ]
        table = np.array(values, dtype=np.int64)[place].reshape(-1, 3)
        return {"category": table[:, 0], "name": table[:, 1], "shapes": table[:, 2]}

    def _add_ranges(self, ranges: Table, what: Table) -> None:
        registered = np.flatnonzero(ranges["textId"] != NONE)
        numbers, place = np.unique(ranges["textId"][registered], return_inverse=True)
        meaning = self._meaning([range_of(self._name(number)) for number in numbers.tolist()])
        for column, values in meaning.items():
            what[column][registered] = values[place]
        nameless = what["category"] == NONE  # a range without any message
        what["category"][nameless] = Category.ANNOTATION
        what["name"][nameless] = self._columns.strings[""]
        endless = int((ranges["end"] == NONE).sum())
        if endless:
            self._notes.append(f"{endless} NVTX ranges never end: the recording stopped inside them")
        self._columns.add(
            what["category"].astype(np.int8), what["name"].astype(np.int32), ranges["start"], ranges["end"],
            self._threads(ranges["globalTid"]), shapes=what["shapes"],
        )  # fmt: skip

    def _add_os_calls(self, table: Table, known: Int64) -> None:
        """Calls into the operating system by training threads; other threads (watchdogs …) only wait."""
        training = np.isin(table["globalTid"], known)
        self._add_calls(Category.OTHER, {name: column[training] for name, column in table.items()}, str)

    def _trace(self, backend: str) -> Trace:
        columns = self._columns.finish()
        if not len(columns["start_ns"]):
            raise TraceError(
                f"{self._source}: has no kernel, CUDA call or NVTX range that can be read; record with nsys profile "
                "-t cuda,nvtx,osrt"
            )
        epoch_ns = self._epoch_ns(int(columns["start_ns"][-1]))
        columns["start_ns"] += epoch_ns
        self._note_devices(columns)
        return Trace(
            source=self._source,
            strings=redact_names(tuple(map(clean, self._columns.strings))),
            **columns,
            threads=self._threads_by_number(),
            collectives=_no_collectives(),
            memory=memory_counter(self._table(MEMORY_EVENTS, MEMORY_COLUMNS, "globalPid"), epoch_ns),
            rank=self._process.rank,
            world_size=self._process.world_size,
            backend=backend,
            host=nsys_processes.target_property(self._tables, "Hostname"),
            devices=self._devices(),
            has_shapes=bool((columns["shapes"] != NONE).any()),
            versions=self._versions(),
            parse_report=ParseReport(dropped_events=self._columns.dropped, notes=tuple(self._notes)),
        )

    def _epoch_ns(self, last: int) -> int:
        """Zero of the session's own clock, ns since the epoch."""
        if last > _EARLIEST_EPOCH_NS:
            return 0
        for (start,) in read_rows(self._tables, "TARGET_INFO_SESSION_START_TIME", ["utcEpochNs"]):
            if start != NONE and NEVER < start < -NEVER:
                return int(start)
        self._notes.append("the report has no start time: this rank's clock cannot be aligned with other ranks'")
        return 0

    def _note_devices(self, columns: dict[str, Any]) -> None:
        used = distinct(columns["device"][columns["category"] == Category.KERNEL]).tolist()
        if len(used) > 1:
            listed = ", ".join(str(device) for device in used)
            self._notes.append(f"one process uses devices {listed}: their work is analyzed as that of one device")

    def _threads_by_number(self) -> tuple[Thread, ...]:
        named = self._table("ThreadNames", ["nameId", "globalTid"], "globalTid")
        texts = read_strings(self._tables, set(distinct(named["nameId"]).tolist()))
        pid = str(self._process.pid)
        names: dict[tuple[str, str], list[str]] = {}
        for number, tid in zip(named["nameId"].tolist(), named["globalTid"].tolist(), strict=True):
            labels = names.setdefault((pid, str(tid_of(tid))), [])
            if number in texts and texts[number] not in labels:
                labels.append(texts[number])
        return tuple(Thread(*key, " / ".join(names.get(key, ()))) for key in self._columns.threads)

    def _devices(self) -> tuple[Device, ...]:
        rows = read_rows(self._tables, "TARGET_INFO_GPU", ["id", "totalMemory"], ["name"])
        devices = {id_: Device(id_, name or "", memory if memory > 0 else None) for id_, memory, name in rows}
        return tuple(devices.values())

    def _versions(self) -> dict[str, str]:
        versions = {"cuda_driver": nsys_processes.target_property(self._tables, "CudaDriverVersion")}
        for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
            if values := dict(read_rows(self._tables, table, [], ["name", "value"])):
                versions["nsys"] = values.get("EXPORT_PRODUCT_VERSION") or ""
                versions["nsys_schema"] = values.get("EXPORT_SCHEMA_VERSION") or ""
        return {name: value for name, value in versions.items() if value}


def _first_of(*columns: Int64) -> Int64:
    """Per row the first value that is not NONE."""
    first = columns[0]
    for column in columns[1:]:
        first = np.where(first == NONE, column, first)
    return first


def _joined(parts: list[Table], names: Sequence[str]) -> Table:
    return {name: np.concatenate([np.empty(0, np.int64), *(part[name] for part in parts)]) for name in names}


def _no_collectives() -> CollectiveArgs:
    """A report records nothing of collectives beyond the kernels' names."""
    numbers, texts = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
    return CollectiveArgs(numbers, texts, texts, texts, texts, numbers, numbers, numbers, numbers)
