"""Writes SQLite exports as three generations of Nsight Systems do. Shares no code with the reader.

Table and column names are those of real exports: 2022.4 (schema 3.0), 2023.4 (3.7), 2026.2 (3.25); columns that no
reader could want are left out. As there, tables without rows are not made.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Literal

Generation = Literal["2022", "2023", "2026"]
GENERATIONS: tuple[Generation, ...] = ("2022", "2023", "2026")

EPOCH_NS = 1_700_000_000_000_000_000
"""When every session begins."""

_HOST = 1 << 48


def process_id(pid: int) -> int:
    """A process's global id."""
    return _HOST | pid << 24


def thread_id(pid: int, tid: int) -> int:
    """A thread's global id."""
    return process_id(pid) | tid


_ON_DEVICE = "start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, streamId INTEGER, correlationId INTEGER"
_TABLES = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{_ON_DEVICE}, globalPid INTEGER, demangledName INTEGER, shortName INTEGER, "
    "graphNodeId INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{_ON_DEVICE}, globalPid INTEGER, bytes INTEGER, copyKind INTEGER, srcKind INTEGER, "
    "dstKind INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{_ON_DEVICE}, globalPid INTEGER, value INTEGER, bytes INTEGER, memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{_ON_DEVICE}, globalPid INTEGER, graphId INTEGER, graphExecId INTEGER",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": f"{_ON_DEVICE}, globalPid INTEGER, syncType INTEGER, eventId INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER, "
    "correlationId INTEGER, nameId INTEGER, returnValue INTEGER, callchainId INTEGER",
    "OSRT_API": "start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER, nameId INTEGER, "
    "returnValue INTEGER",
    "NVTX_EVENTS": "start INTEGER, end INTEGER, eventType INTEGER, rangeId INTEGER, text TEXT, globalTid INTEGER, "
    "endGlobalTid INTEGER, textId INTEGER, domainId INTEGER",
    "CUDA_GPU_MEMORY_USAGE_EVENTS": "start INTEGER, globalPid INTEGER, deviceId INTEGER, contextId INTEGER, "
    "address INTEGER, pc INTEGER, bytes INTEGER, memKind INTEGER, memoryOperationType INTEGER, name TEXT, "
    "correlationId INTEGER, streamId INTEGER",
    "PROCESSES": "globalPid INTEGER, pid INTEGER, name TEXT",
    "ThreadNames": "nameId INTEGER, priority INTEGER, globalTid INTEGER",
    "TARGET_INFO_SYSTEM_ENV": "globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER, value TEXT",
    "TARGET_INFO_GPU": "vmId INTEGER, id INTEGER, name TEXT, totalMemory INTEGER, smCount INTEGER",
    "MPI_RANKS": "globalTid INTEGER, rank INTEGER",
    "META_DATA_CAPTURE": "name TEXT, value TEXT",
    "EXPORT_META_DATA": "name TEXT, value TEXT",
    "META_DATA_EXPORT": "name TEXT, value TEXT",
}
_BY_GENERATION: dict[Generation, dict[str, str]] = {
    "2022": {
        "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
        "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "deviceId INTEGER, contextId INTEGER, streamId INTEGER, "
        "correlationId INTEGER, globalPid INTEGER, eventId INTEGER",
    },
    "2023": {
        "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT",
        "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "deviceId INTEGER, contextId INTEGER, streamId INTEGER, "
        "correlationId INTEGER, globalPid INTEGER, eventId INTEGER",
    },
    "2026": {
        "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT, localTime TEXT, systemClockNs INTEGER",
        "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "timestamp INTEGER, deviceId INTEGER, contextId INTEGER, "
        "greenContextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, eventId INTEGER, "
        "eventSyncId INTEGER",
        "NVTX_EVENTS": f"{_TABLES['NVTX_EVENTS']}, jsonTextId INTEGER, jsonText TEXT, binaryData TEXT",
        "CUPTI_ACTIVITY_KIND_KERNEL": f"{_TABLES['CUPTI_ACTIVITY_KIND_KERNEL']}, greenContextId INTEGER, "
        "graphId INTEGER, mangledName INTEGER",
    },
}
_VERSIONS = {
    "2022": ("EXPORT_META_DATA", "2022.4.2.1", "3.0.0"),
    "2023": ("META_DATA_EXPORT", "2023.4.4.54", "3.7.2"),
    "2026": ("META_DATA_EXPORT", "2026.2.1.210", "3.25.0"),
}


class Export:
    """An export being written; times are ns since the session began."""

    def __init__(self, path: Path, generation: Generation = "2026", *, started: bool = True) -> None:
        self.path = path
        self._generation = generation
        self._tables = {**_TABLES, **_BY_GENERATION[generation]}
        self._made: set[str] = set()
        self._strings: dict[str, int] = {}
        self._database = sqlite3.connect(path)
        table, product, schema = _VERSIONS[generation]
        self.put(table, name="EXPORT_PRODUCT_VERSION", value=product)
        self.put(table, name="EXPORT_SCHEMA_VERSION", value=schema)
        if started:
            more = {"systemClockNs": 987_654_321} if generation == "2026" else {}
            self.put("TARGET_INFO_SESSION_START_TIME", utcEpochNs=EPOCH_NS, **more)
        self.string("[Unknown]")

    def put(self, table: str, **values: int | str | None) -> None:
        """Append a row; columns that the generation does not have are an error of the test."""
        if table not in self._made:
            self._database.execute(f"CREATE TABLE {table} ({self._tables[table]})")
            self._made.add(table)
        names, marks = ", ".join(f'"{name}"' for name in values), ", ".join("?" * len(values))
        self._database.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))

    def string(self, text: str) -> int:
        """The id of a text."""
        if text not in self._strings:
            self._strings[text] = 100 + 3 * len(self._strings)
            self.put("StringIds", id=self._strings[text], value=text)
        return self._strings[text]

    def _on_device(
        self,
        table: str,
        pid: int,
        start: int,
        end: int,
        where: tuple[int, int],
        correlation: int | None,
        **more: int | None,
    ) -> None:
        device, stream = where
        self.put(
            f"CUPTI_ACTIVITY_KIND_{table}", start=start, end=end, deviceId=device, contextId=1, streamId=stream,
            correlationId=correlation, globalPid=process_id(pid), **more,
        )  # fmt: skip

    def kernel(
        self, pid: int, name: str, start: int, end: int, where: tuple[int, int] = (0, 7), correlation: int | None = None
    ) -> None:
        """A kernel on (device, stream)."""
        short = name.split("(", maxsplit=1)[0]
        self._on_device(
            "KERNEL", pid, start, end, where, correlation, demangledName=self.string(name), shortName=self.string(short)
        )

    def copy(
        self,
        pid: int,
        start: int,
        end: int,
        kinds: tuple[int, int, int],
        where: tuple[int, int] = (0, 7),
        correlation: int | None = None,
    ) -> None:
        """A copy; ``kinds`` are those of the copy, its source's and its target's memory."""
        copy, source, target = kinds
        self._on_device(
            "MEMCPY", pid, start, end, where, correlation, bytes=64, copyKind=copy, srcKind=source, dstKind=target
        )

    def fill(
        self, pid: int, start: int, end: int, where: tuple[int, int] = (0, 7), correlation: int | None = None
    ) -> None:
        """A memset of device memory."""
        self._on_device("MEMSET", pid, start, end, where, correlation, value=0, bytes=64, memKind=2)

    def graph(self, pid: int, graph: int, start: int, end: int, correlation: int) -> None:
        """A whole graph's run."""
        self._on_device("GRAPH_TRACE", pid, start, end, (0, 7), correlation, graphId=graph, graphExecId=graph)

    def sync(self, pid: int, kind: int, start: int, end: int, stream: int) -> None:
        """A wait; reports put all of them on device 0."""
        self._on_device("SYNCHRONIZATION", pid, start, end, (0, stream), None, syncType=kind, eventId=0)

    def call(self, pid: int, tid: int, name: str, start: int, end: int, correlation: int | None) -> None:
        """A call into CUDA."""
        self.put(
            "CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, eventClass=0, globalTid=thread_id(pid, tid),
            correlationId=correlation, nameId=self.string(name), returnValue=0,
        )  # fmt: skip

    def os_call(self, pid: int, tid: int, name: str, start: int, end: int) -> None:
        """A call into the operating system."""
        self.put(
            "OSRT_API", start=start, end=end, eventClass=27, globalTid=thread_id(pid, tid), nameId=self.string(name),
            returnValue=0,
        )  # fmt: skip

    def nvtx(
        self, pid: int, tid: int, name: str, start: int, end: int | None, *, kind: int = 59, registered: bool = False
    ) -> None:
        """An NVTX event: 59 push/pop, 60 start/end, 34 mark."""
        text = {"textId": self.string(name)} if registered else {"text": name}
        self.put("NVTX_EVENTS", start=start, end=end, eventType=kind, globalTid=thread_id(pid, tid), domainId=0, **text)

    def process(self, pid: int, name: str) -> None:
        """A process's name."""
        self.put("PROCESSES", globalPid=process_id(pid), pid=pid, name=name)

    def machine(self, name: str, value: str) -> None:
        """A property of the machine."""
        self.put(
            "TARGET_INFO_SYSTEM_ENV", globalVid=_HOST, devStateName="Local (CLI)", name=name, nameEnum=0, value=value
        )

    def close(self) -> Path:
        """Finish the file."""
        self._database.commit()
        self._database.close()
        return self.path
