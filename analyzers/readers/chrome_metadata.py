"""A Chrome trace's metadata outside its events: its rank, its devices, its time base; ids however they are written."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import field
from operator import attrgetter
from typing import Any, Literal

import msgspec
import numpy as np

from perfscope.analyzers.readers.chrome_events import trailing
from perfscope.analyzers.readers.chrome_repair import UNREADABLE
from perfscope.frozen import dataclass
from perfscope.trace.trace import NEVER, NONE, Device, Int64, ProcessGroup
from perfscope.typed import MOST_RANKS, clean

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VALUE = msgspec.json.Decoder(msgspec.Raw)

_KEY = re.compile(
    rb'"(deviceProperties|distributedInfo|baseTimeNanoseconds|record_shapes|host_?name|[a-z_]{1,40}_version)"\s*:\s*'
)
_SCALAR = re.compile(rb'-?\d+(?:\.\d+)?(?=\s*[,}])|"[^"\\]*"')
_VERSION_SUFFIX = "_version"
TIME_BASE = "baseTimeNanoseconds"

_LAST_NUMBER = re.compile(r"(?<!\w)-?\d+$")
LONGEST_NUMBER = 100
"""Digits; Python refuses to turn thousands of them into a number."""
_TWO_63 = 1 << 63
_TWO_64 = 1 << 64


Soundness = Literal["whole", "invalid", "cut short"]


@dataclass(frozen=True)
class FileMetadata:
    """The metadata of a file. What is not recorded is None or empty."""

    base_ns: int | None = None
    """The events' times count from here, ns since the epoch; None: they count from the epoch."""
    rank: int | None = None
    world_size: int | None = None
    backend: str = ""
    host: str = ""
    devices: tuple[Device, ...] = ()
    groups: tuple[ProcessGroup, ...] = ()
    records_shapes: bool | None = None
    versions: dict[str, str] = field(default_factory=dict)


def fields_of(text: bytes) -> tuple[dict[str, Any], Soundness]:
    """The fields of a JSON object that describes a trace; from damaged text, those that can be read."""
    try:
        return {key: _value(bytes(raw)) for key, raw in _FIELDS.decode(text).items() if _is_wanted(key)}, "whole"
    except UNREADABLE as error:
        found: dict[str, Any] = {}
        for match in _KEY.finditer(text):
            value = _value_at(text, match.end())
            if value is not None:
                found.setdefault(match[1].decode(), value)
        return found, "cut short" if "truncated" in str(error) else "invalid"


def _is_wanted(key: str) -> bool:
    return _KEY.match(f'"{key}":'.encode()) is not None


def _value(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except UNREADABLE:
        return None


def _value_at(text: bytes, at: int) -> Any:
    """The whole value that starts at ``at``; None if the text ends within it or it is not JSON."""
    if (scalar := _SCALAR.match(text, at)) is not None:
        return _value(scalar[0])
    if text[at : at + 1] not in (b"{", b"["):
        return None
    try:
        _VALUE.decode(memoryview(text)[at:])
    except UNREADABLE as error:
        past = trailing(error)
        return None if past is None else _value(text[at : at + past])
    return _value(text[at:])


def interpret(fields: dict[str, Any]) -> FileMetadata:
    """Interpret the fields of a file; those of unknown form are left out."""
    distributed = fields.get("distributedInfo")
    if not isinstance(distributed, dict):
        distributed = {}
    world_size = _rank(distributed.get("world_size"))
    recorded = fields.get("record_shapes")
    versions = {
        key.removesuffix(_VERSION_SUFFIX): _text(value)
        for source in (fields, distributed)
        for key, value in source.items()
        if key.endswith(_VERSION_SUFFIX) and isinstance(value, (str, int, float)) and value != "unknown"
    }
    base_ns = integer(fields.get(TIME_BASE))
    return FileMetadata(
        base_ns=base_ns if base_ns is not None and NEVER < base_ns < -NEVER else None,
        rank=_rank(distributed.get("rank")),
        world_size=world_size,
        backend=_text(distributed.get("backend")),
        host=_text(fields.get("host_name") or fields.get("hostname")),
        devices=tuple(_devices(fields.get("deviceProperties"))),
        groups=tuple(_groups(distributed.get("pg_config"), world_size)),
        records_shapes=None if recorded is None else bool(recorded),
        versions=versions,
    )


def text_of(raw: bytes) -> str:
    """A JSON string's content, or any other value's JSON text."""
    value = _value(raw) if raw[:1] == b'"' else None
    return clean(value if isinstance(value, str) else raw.decode("utf-8", "replace").strip('"'))


def integer(value: Any) -> int | None:
    """An integer of 64 bits, also one written as a string; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return None
    try:
        number = int(value)
    except ValueError:
        return None
    return number if abs(number) < 1 << 63 else None


def _rank(value: Any) -> int | None:
    number = integer(value)
    return number if number is not None and 0 <= number <= MOST_RANKS else None


def _text(value: Any) -> str:
    return clean(value if isinstance(value, str) else "" if value is None else str(value))


def _devices(entries: Any) -> list[Device]:
    devices = []
    for entry in entries if isinstance(entries, list) else []:
        index = integer(entry.get("id")) if isinstance(entry, dict) else None
        if index is not None:
            devices.append(Device(index, _text(entry.get("name")), integer(entry.get("totalGlobalMem"))))
    return devices


def _groups(entries: Any, world_size: int | None) -> list[ProcessGroup]:
    groups = []
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or "pg_name" not in entry:
            continue
        ranks = ranks_of(entry.get("ranks"))
        # torch leaves the list empty for a group of all ranks.
        if not ranks and world_size and integer(entry.get("pg_size")) == world_size:
            ranks = tuple(range(world_size))
        groups.append(ProcessGroup(_text(entry["pg_name"]), _text(entry.get("pg_desc")), ranks))
    return groups


def ranks_of(value: Any) -> tuple[int, ...]:
    """The ranks in a list, also one written as a string; empty where it is elided with ``...`` or is no list."""
    if isinstance(value, str):
        value = _value(value.encode())
    if not isinstance(value, list):
        return ()
    ranks = [_rank(rank) for rank in value]
    return () if None in ranks else tuple(rank for rank in ranks if rank is not None)


def first_ids(args: Sequence[Any], name: str, *others: str) -> Int64:
    """The id of the first of these names that is there, for each event."""
    ids = ids_of(list(map(attrgetter(name), args)))
    for other in others:
        unsaid = np.flatnonzero(ids == NONE)
        ids[unsaid] = ids_of([getattr(args[row], other) for row in unsaid.tolist()])
    return ids


def array(values: list[int]) -> Int64:
    """A list as a new array; twice as fast as ``numpy.array``. Raises struct.error where one is no int64."""
    return np.frombuffer(bytearray(struct.pack(f"{len(values)}q", *values)), dtype=np.int64)


def ids_of(values: list[Any]) -> Int64:
    """A new array of ids however they are written."""
    try:
        return array(values)
    except struct.error:
        return array(
            [value if type(value) is int and -_TWO_63 <= value < _TWO_63 else integer_id(value) for value in values]
        )


def integer_id(value: Any) -> int:
    """An id as int64: from a float, a quoted number, the number that ends a string (``stream 7``); NONE without one."""
    if isinstance(value, str):
        value = _number_in(value.strip())
    elif isinstance(value, float):
        value = int(value) if value.is_integer() else NONE
    elif value is None:
        return NONE
    # Writers print pointers and "no id" as unsigned; what matters is that equal ids stay equal.
    value = value % _TWO_64
    return int(value if value < _TWO_63 else value - _TWO_64)


def _number_in(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        match = _LAST_NUMBER.search(text)
        return int(match[0]) if match and len(match[0]) <= LONGEST_NUMBER else NONE
