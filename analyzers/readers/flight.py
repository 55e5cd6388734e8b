"""Dumps of torch's flight recorder: the last collectives of one rank, in pickle or in JSON, from torch 2.5 to today.

NCCL, RCCL and XCCL record events, so that ``state`` shows what was completed. Gloo records none: its operations stay
``scheduled``, and are done when they are ``retired``. Operations that were issued as one (``batch_isend_irecv``) have
an entry each, without events, and a last one, ``coalesced``, that shows the state of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from perfscope.analyzers.readers import plain_pickle, sources
from perfscope.analyzers.readers.plain_values import INT64, column, mapping, text, texts, whole
from perfscope.errors import TraceError
from perfscope.frozen import dataclass
from perfscope.trace.trace import Bool, Int64

MAX_ENTRIES: Final = 200_000
"""The last ones are read; torch's buffer holds 2,000 unless it is set otherwise."""
MAX_FRAMES: Final = 64
MAX_TENSORS: Final = 1000
"""Of one operation."""
MAX_DIMS: Final = 64
"""Of one tensor, as torch has it."""

SCHEDULED: Final = 0
STARTED: Final = 1
DONE: Final = 2
_STATES: Final = {"scheduled": SCHEDULED, "started": STARTED, "completed": DONE}
_PEERS: Final = re.compile(r"^(send|recv)\s+(\d{1,9})(?:->|<-)(\d{1,9}|any)$")
P2P: Final = ("send", "recv")
_NUMBERS: Final = ("p2p_seq_id", "collective_seq_id")
_NUMBER: Final = re.compile(r"^[0-9]{1,9}$")

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
    data = sources.read_whole(path, plain_pickle.MAX_BYTES, "record fewer entries")
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
            raise ValueError("neither a pickle nor JSON that is whole") from error
    if not isinstance(document, dict) or not {"entries", "pg_config", "pg_status"} & document.keys():
        raise ValueError("it has neither entries nor process groups")
    return _Builder(document, path).dump()


class _Builder:
    """Columns from the entries of one document. What is not of the type that torch writes counts as absent."""

    def __init__(self, document: Mapping[str, Any], path: str) -> None:
        self.path = path
        self.version = text(document.get("version"))
        entries = document.get("entries")
        entries = entries if isinstance(entries, list) else []
        self.entries = [entry for entry in entries[-MAX_ENTRIES:] if isinstance(entry, dict)]
        self.config = mapping(document.get("pg_config"))
        self.written_ns = whole(mapping(document.get("perfscope")).get("written_ns"))
        self.recorded_status = mapping(document.get("pg_status"))
        self.groups: dict[FlightGroup, int] = {}
        self.kinds: dict[OpKind, int] = {}
        self.by_id: dict[int, int] = {}
        """``pg_id`` -> index in ``groups``."""
        self._members: dict[str, tuple[int, ...]] = {}
        # The same few over and over: their parts are looked up.
        self._names: dict[str, tuple[str, str, int | None]] = {}
        self._seen_groups: dict[tuple[str, str, str], int] = {}
        self._sizes: dict[Sizes, Sizes] = {}

    def dump(self) -> FlightDump:
        named = [self._named(text(entry.get("profiling_name"))) for entry in self.entries]
        group = column(self._group(entry, name[0]) for entry, name in zip(self.entries, named, strict=True))
        kind = column(self._kind(entry, *name) for entry, name in zip(self.entries, named, strict=True))
        p2p = np.array(
            [bool(entry.get("is_p2p")) or name[1] in P2P for entry, name in zip(self.entries, named, strict=True)],
            dtype=np.bool_,
        )
        # Before torch 2.4 one number counted both.
        numbers = [column(whole(entry.get(key, entry.get("seq_id"))) for entry in self.entries) for key in _NUMBERS]
        sequence = np.where(p2p, *numbers)
        state = _closed_state(group, p2p, sequence, column(_state(entry.get("state")) for entry in self.entries))
        retired = np.array([entry.get("retired") is True for entry in self.entries], dtype=np.bool_)
        gloo = np.array([each.backend == "gloo" for each in self.kinds], dtype=np.bool_)[kind]
        state = np.where(gloo & retired, DONE, state)
        return FlightDump(
            path=self.path,
            version=self.version,
            status=self._status(),
            groups=tuple(self.groups),
            kinds=tuple(self.kinds),
            group=group,
            kind=kind,
            p2p=p2p,
            sequence=sequence,
            state=state,
            timed_out=~gloo & retired & (state != DONE),
            created_ns=self._times("time_created_ns"),
            completed_ns=self._times("time_discovered_completed_ns"),
            timeout_ns=np.minimum(self._times("timeout_ms"), 10**12) * 1_000_000,
            frames=self._frames(state),
            written_ns=self.written_ns,
        )

    def _times(self, key: str) -> Int64:
        return column(whole(entry.get(key)) for entry in self.entries)

    def _named(self, name: str) -> tuple[str, str, int | None]:
        """(backend, operator, peer) of a profiling name: ``nccl:send 0->1``."""
        if name not in self._names:
            backend, _, operator = name.partition(":")
            peers = _PEERS.match(operator)
            peer = int(peers[3]) if peers and peers[3] != "any" else None
            self._names[name] = (backend, peers[1] if peers else operator, peer)
        return self._names[name]

    def _group(self, entry: Mapping[str, Any], backend: str) -> int:
        """Index of an entry's group; an entry knows its name and description, the configuration its ranks."""
        named = entry.get("process_group")
        name, description = map(text, named) if isinstance(named, (list, tuple)) and len(named) == 2 else ("", "")
        key = (backend, name, description)
        index = self._seen_groups.get(key)
        if index is None:
            group = FlightGroup(backend, name, description, self._ranks_of(name))
            index = self._seen_groups[key] = self.groups.setdefault(group, len(self.groups))
        self.by_id.setdefault(whole(entry.get("pg_id"), -1), index)
        return index

    def _ranks_of(self, name: str) -> tuple[int, ...]:
        if name not in self._members:
            ranks = mapping(self.config.get(name)).get("ranks")
            if isinstance(ranks, list):
                numbers = tuple(rank for rank in ranks if type(rank) is int)
            else:
                numbers = tuple(int(digits) for digits in re.findall(r"\d{1,9}", text(ranks)))
            self._members[name] = tuple(sorted({rank for rank in numbers if 0 <= rank < 10**9}))
        return self._members[name]

    def _kind(self, entry: Mapping[str, Any], backend: str, operator: str, peer: int | None) -> int:
        """Index of what an entry does."""
        kind = OpKind(
            backend,
            operator,
            self._shape(entry.get("input_sizes")),
            self._shape(entry.get("output_sizes")),
            (*texts(entry.get("input_dtypes")), *texts(entry.get("output_dtypes"))),
            peer,
        )
        return self.kinds.setdefault(kind, len(self.kinds))

    def _shape(self, value: Any) -> Sizes:
        """Sizes of tensors. A pickle may name one list in many places, so that only the first are looked at."""
        tensors = value[:MAX_TENSORS] if isinstance(value, list) else []
        sizes = tuple(
            tuple(dim for dim in dims[:MAX_DIMS] if type(dim) is int and abs(dim) <= INT64)
            for dims in tensors
            if isinstance(dims, list)
        )
        return self._sizes.setdefault(sizes, sizes)

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
            fields = mapping(recorded[each])
            if each in self.by_id:
                statuses[self.by_id[each]] = GroupStatus(
                    whole(fields.get("last_enqueued_collective"), -1),
                    whole(fields.get("last_completed_collective"), -1),
                )
        return statuses

    def _place(self, number: int, name: str) -> None:
        if number not in self.by_id:
            backend = next((group.backend for group in self.groups), "nccl")
            description = text(mapping(self.config[name]).get("desc"))
            group = FlightGroup(backend, name, description, self._ranks_of(name))
            self.by_id[number] = self.groups.setdefault(group, len(self.groups))

    def _frames(self, state: Int64) -> dict[int, tuple[Frame, ...]]:
        wanted = np.flatnonzero(state != DONE)[:256].tolist()
        rows = {*wanted, len(self.entries) - 1} if self.entries else set()
        stacks = {row: _stack(self.entries[row].get("frames")) for row in sorted(rows)}
        return {row: stack for row, stack in stacks.items() if stack}


def _state(value: Any) -> int:
    return _STATES.get(value, SCHEDULED) if isinstance(value, str) else SCHEDULED


def _closed_state(group: Int64, p2p: Bool, sequence: Int64, state: Int64) -> Int64:
    """States with those of operations that were issued as one set to the state of the furthest of them."""
    if not len(state):
        return state
    same = label_rows(group, p2p, sequence)
    furthest = np.zeros(int(same.max()) + 1, dtype=np.int64)
    np.maximum.at(furthest, same, state)
    return furthest[same]


def label_rows(*columns: NDArray[Any]) -> Int64:
    """One number, from 0, for each combination of values in a row."""
    order = np.lexsort(columns)
    begins = np.zeros(len(order), dtype=np.bool_)
    for values in columns:
        begins[1:] |= np.diff(values[order]) != 0
    labels = np.empty(len(order), dtype=np.int64)
    labels[order] = np.cumsum(begins)
    return labels


def _stack(value: Any) -> tuple[Frame, ...]:
    calls = [call for call in value[:MAX_FRAMES] if isinstance(call, dict)] if isinstance(value, list) else []
    return tuple(Frame(text(call.get("filename")), whole(call.get("line")), text(call.get("name"))) for call in calls)
