"""Dumps of torch's flight recorder: the last collectives of one rank, in pickle or in JSON, from torch 2.5 to today.

NCCL, RCCL and XCCL record events, so that ``state`` shows what was completed. Gloo records none: its operations stay
``scheduled``, and are done when they are ``retired``. Operations that were issued as one (``batch_isend_irecv``) have
an entry each, without events, and a last one, ``coalesced``, that shows the state of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from perfscope.analyzers.readers import plain_pickle, sources
from perfscope.errors import TraceError
from perfscope.trace.trace import Bool, Int64

MAX_ENTRIES: Final = 200_000
"""The last ones are read; torch's buffer holds 2,000 unless it is set otherwise."""
MAX_FRAMES: Final = 64

SCHEDULED: Final = 0
STARTED: Final = 1
DONE: Final = 2
_STATES: Final = {"scheduled": SCHEDULED, "started": STARTED, "completed": DONE}
_PEERS: Final = re.compile(r"^(send|recv)\s+(\d{1,9})(?:->|<-)(\d{1,9}|any)$")
_NUMBER: Final = re.compile(r"^[0-9]{1,9}$")
_INT64: Final = 2**63 - 1

Sizes = tuple[tuple[int, ...], ...]


class Frame(NamedTuple):
    """One call of a stack."""

    file: str
    line: int
    function: str


class OpKind(NamedTuple):
    """What an operation does, apart from when: the same for all calls from one place with one shape."""

    backend: str
    operator: str
    """``all_reduce``, ``send`` …"""
    input_sizes: Sizes
    output_sizes: Sizes
    dtypes: tuple[str, ...]
    """Of inputs, then of outputs."""
    peer: int | None
    """Of a send or recv: the other side, by its number in the group."""


class FlightGroup(NamedTuple):
    """A process group as one rank knows it."""

    backend: str
    name: str
    description: str
    ranks: tuple[int, ...]
    """Global ranks; empty where they are not recorded (gloo)."""


class GroupStatus(NamedTuple):
    """Sequence numbers of the last operations of a group, of either kind; -1: none."""

    enqueued: int
    completed: int


@dataclass(frozen=True, eq=False)
class FlightDump:
    """What one rank's flight recorder held; rows in the order in which operations were issued.

    ``group`` and ``kind`` index ``groups`` and ``kinds``; ``sequence`` counts collectives and, apart from them, sends
    and recvs of a group. ``state`` is ``SCHEDULED``, ``STARTED`` or ``DONE``. Times are ns since 1970, 0: not known.
    """

    path: str
    version: str
    groups: tuple[FlightGroup, ...]
    kinds: tuple[OpKind, ...]
    group: Int64
    kind: Int64
    p2p: Bool
    sequence: Int64
    state: Int64
    timed_out: Bool
    created_ns: Int64
    completed_ns: Int64
    timeout_ns: Int64
    frames: dict[int, tuple[Frame, ...]] = field(default_factory=dict)
    """Row -> its stack, innermost call first; of the last row and of those that are not done."""
    status: dict[int, GroupStatus] = field(default_factory=dict)
    """Index in ``groups`` -> status, as far as it is known which group it is of."""

    written_ns: int = 0
    """When it was dumped; only dumps of ``perfscope run`` tell."""
    modified_ns: int = 0
    """When its file was last written: a copy may be years younger."""

    @property
    def last_event_ns(self) -> int:
        """The last moment at which the rank did anything; 0 without any."""
        return int(max(self.created_ns.max(initial=0), self.completed_ns.max(initial=0)))

    @property
    def last_ns(self) -> int:
        """The last moment that the dump knows of; 0 without any."""
        return max(self.last_event_ns, self.written_ns)


def read(path: Path) -> FlightDump:
    """Read one dump. Raises TraceError, naming the file, where it is not one or cannot be used."""
    data = _bytes_of(path)
    try:
        return replace(parse(data, str(path)), modified_ns=path.stat().st_mtime_ns)
    except ValueError as error:
        raise TraceError(f"{path}: cannot be read as a flight-recorder dump ({error}); dump it again") from error


def parse(data: bytes, path: str = "") -> FlightDump:
    """The dump in ``data``. Raises ValueError where it is none."""
    if data[:1] == b"\x80":
        document = plain_pickle.loads(data)
    else:
        try:
            document = msgspec.json.decode(data)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"neither a pickle nor JSON: {error}") from error
    if not isinstance(document, dict) or not {"entries", "pg_config", "pg_status"} & document.keys():
        raise ValueError("it has neither entries nor process groups")
    return _Builder(document, path).dump()


def _bytes_of(path: Path) -> bytes:
    """The unpacked content, read in pieces: its size is not known before."""
    data, piece = bytearray(), memoryview(bytearray(1 << 20))
    with sources.opened(path) as source:
        while got := source.readinto(piece):
            data += piece[:got]
            if len(data) > plain_pickle.MAX_BYTES:
                raise TraceError(f"{path}: larger than {plain_pickle.MAX_BYTES >> 20} MiB; record fewer entries")
    return bytes(data)


class _Builder:
    """Columns from the entries of one document. What is not of the type that torch writes counts as absent."""

    def __init__(self, document: Mapping[str, Any], path: str) -> None:
        self.path = path
        self.version = _text(document.get("version"))
        entries = document.get("entries")
        entries = entries if isinstance(entries, list) else []
        self.entries = [entry for entry in entries[-MAX_ENTRIES:] if isinstance(entry, dict)]
        self.config = _mapping(document.get("pg_config"))
        self.written_ns = _whole(_mapping(document.get("perfscope")).get("written_ns"))
        self.recorded_status = _mapping(document.get("pg_status"))
        self.groups: dict[FlightGroup, int] = {}
        self.kinds: dict[OpKind, int] = {}
        self.by_id: dict[int, int] = {}
        """``pg_id`` -> index in ``groups``."""
        self._sizes: dict[int, Sizes] = {}
        self._members: dict[str, tuple[int, ...]] = {}
        # The same few texts over and over: their parts are looked up.
        self._seen_groups: dict[tuple[str, str, str], int] = {}

    def dump(self) -> FlightDump:
        rows = np.array([self._row(entry) for entry in self.entries], dtype=np.int64).reshape(-1, 9)
        group, kind, p2p, sequence, state, retired, created, completed, timeout = rows.T
        state = _closed_state(group, p2p, sequence, state)
        gloo = np.array([each.backend == "gloo" for each in self.kinds], dtype=np.bool_)[kind]
        state = np.where(gloo & (retired > 0), DONE, state)
        return FlightDump(
            path=self.path,
            version=self.version,
            status=self._status(),
            groups=tuple(self.groups),
            kinds=tuple(self.kinds),
            group=group,
            kind=kind,
            p2p=p2p > 0,
            sequence=sequence,
            state=state,
            timed_out=~gloo & (retired > 0) & (state != DONE),
            created_ns=created,
            completed_ns=completed,
            timeout_ns=timeout * 1_000_000,
            frames=self._frames(state),
            written_ns=self.written_ns,
        )

    def _row(self, entry: Mapping[str, Any]) -> tuple[int, ...]:
        group = self._group(entry)
        kind = self._kind(entry, group)
        p2p = bool(entry.get("is_p2p")) or kind.operator in ("send", "recv")
        # Before torch 2.4 one number counted both.
        number = entry.get("p2p_seq_id" if p2p else "collective_seq_id", entry.get("seq_id"))
        state = entry.get("state")
        return (
            group,
            self.kinds.setdefault(kind, len(self.kinds)),
            p2p,
            _whole(number),
            _STATES.get(state, SCHEDULED) if isinstance(state, str) else SCHEDULED,
            entry.get("retired") is True,
            _whole(entry.get("time_created_ns")),
            _whole(entry.get("time_discovered_completed_ns")),
            min(_whole(entry.get("timeout_ms")), 10**12),
        )

    def _group(self, entry: Mapping[str, Any]) -> int:
        """Index of an entry's group; an entry knows its name and description, the configuration its ranks."""
        named = entry.get("process_group")
        name, description = map(_text, named) if isinstance(named, (list, tuple)) and len(named) == 2 else ("", "")
        backend = _text(entry.get("profiling_name")).partition(":")[0]
        key = (backend, name, description)
        if key not in self._seen_groups:
            group = FlightGroup(backend, name, description, self._ranks_of(name))
            self._seen_groups[key] = self.groups.setdefault(group, len(self.groups))
        index = self._seen_groups[key]
        self.by_id.setdefault(_whole(entry.get("pg_id"), -1), index)
        return index

    def _ranks_of(self, name: str) -> tuple[int, ...]:
        if name not in self._members:
            ranks = _mapping(self.config.get(name)).get("ranks")
            if isinstance(ranks, list):
                numbers = tuple(rank for rank in ranks if type(rank) is int)
            else:
                numbers = tuple(int(digits) for digits in re.findall(r"\d{1,9}", _text(ranks)))
            self._members[name] = tuple(sorted({rank for rank in numbers if 0 <= rank < 10**9}))
        return self._members[name]

    def _kind(self, entry: Mapping[str, Any], group: int) -> OpKind:
        backend, _, operator = _text(entry.get("profiling_name")).partition(":")
        named = _PEERS.match(operator)
        return OpKind(
            backend,
            named[1] if named else operator,
            self._shape(entry.get("input_sizes")),
            self._shape(entry.get("output_sizes")),
            (*_texts(entry.get("input_dtypes")), *_texts(entry.get("output_dtypes"))),
            int(named[3]) if named and named[3] != "any" else None,
        )

    def _shape(self, value: Any) -> Sizes:
        """Sizes of tensors. A pickle may name one list in many places: each is looked at once."""
        known = self._sizes.get(id(value))
        if known is None:
            tensors = value if isinstance(value, list) else []
            known = tuple(
                tuple(dim for dim in dims if type(dim) is int and abs(dim) <= _INT64)
                for dims in tensors
                if isinstance(dims, list)
            )
            self._sizes[id(value)] = known
        return known

    def _status(self) -> dict[int, GroupStatus]:
        """Statuses are by ``pg_id``, which counts the groups of a rank in the order of their making.

        Entries show the group of an id; else its place does, where as many groups as ids are known by number.
        """
        recorded = {int(key): value for key, value in self.recorded_status.items() if _NUMBER.match(str(key))}
        ids = sorted(recorded)
        names = [name for name in self.config if _NUMBER.match(str(name))]
        if len(names) == len(self.config) == len(ids):
            ordered = dict(zip(ids, sorted(names, key=int), strict=True))
            found = {each: list(self.groups)[index].name for each, index in self.by_id.items()}
            if all(ordered.get(each) == name for each, name in found.items() if each in ordered):
                for each, name in ordered.items():
                    self._place(each, name)
        statuses = {}
        for each in ids:
            fields = _mapping(recorded[each])
            if each in self.by_id:
                statuses[self.by_id[each]] = GroupStatus(
                    _whole(fields.get("last_enqueued_collective"), -1),
                    _whole(fields.get("last_completed_collective"), -1),
                )
        return statuses

    def _place(self, number: int, name: str) -> None:
        if number not in self.by_id:
            backend = next((group.backend for group in self.groups), "nccl")
            description = _text(_mapping(self.config[name]).get("desc"))
            group = FlightGroup(backend, name, description, self._ranks_of(name))
            self.by_id[number] = self.groups.setdefault(group, len(self.groups))

    def _frames(self, state: Int64) -> dict[int, tuple[Frame, ...]]:
        wanted = np.flatnonzero(state != DONE)[:256].tolist()
        rows = {*wanted, len(self.entries) - 1} if self.entries else set()
        stacks = {row: _stack(self.entries[row].get("frames")) for row in sorted(rows)}
        return {row: stack for row, stack in stacks.items() if stack}


def _closed_state(group: Int64, p2p: Int64, sequence: Int64, state: Int64) -> Int64:
    """States with those of operations that were issued as one set to the state of the furthest of them."""
    if not len(state):
        return state
    keys = np.stack([group, p2p, sequence], axis=1)
    _, same = np.unique(keys, axis=0, return_inverse=True)
    furthest = np.zeros(int(same.max()) + 1, dtype=np.int64)
    np.maximum.at(furthest, same.ravel(), state)
    return furthest[same.ravel()]


def _stack(value: Any) -> tuple[Frame, ...]:
    calls = [call for call in value[:MAX_FRAMES] if isinstance(call, dict)] if isinstance(value, list) else []
    return tuple(
        Frame(_text(call.get("filename")), _whole(call.get("line")), _text(call.get("name"))) for call in calls
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value[:1000] if isinstance(value, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_text(each) for each in value[:1000]) if isinstance(value, list) else ()


def _whole(value: Any, otherwise: int = 0) -> int:
    """A whole number, which JSON may give as text."""
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
        return int(value)
    return value if type(value) is int and abs(value) <= _INT64 else otherwise
