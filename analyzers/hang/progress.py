"""How far each rank came in each process group, and what it has issued that is not done, from flight-recorder dumps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Final, NamedTuple

import numpy as np

from perfscope.analyzers.readers.flight import DONE, STARTED, FlightDump, GroupStatus, OpKind, label_rows
from perfscope.frozen import dataclass
from perfscope.trace.clock import align
from perfscope.trace.trace import Int64

ROOTED: Final = frozenset({"broadcast", "reduce", "gather", "scatter", "_broadcast_oop", "_reduce_oop"})
"""May be done on one rank before the others come."""

_CLOCK_ROWS: Final = 200
"""Collectives of each rank by whose ends clocks are aligned."""
_NO_GROUP: Final = ("0", "default_pg")


@dataclass(frozen=True)
class Group:
    """A process group of the job; ``index`` numbers them."""

    index: int
    backend: str
    name: str
    description: str
    ranks: tuple[int, ...]


class OpenOp(NamedTuple):
    """An operation that one rank has issued and that is not done there.

    ``row`` orders those of a rank; messages that were issued as one have that of the first.
    """

    rank: int
    row: int
    group: int
    p2p: bool
    sequence: int
    kind: OpKind
    peer: int | None
    """Of a send or recv: the other side's global rank, where it is known."""
    started: bool
    timed_out: bool
    created_ns: int


@dataclass(frozen=True, eq=False)
class Progress:
    """Where the ranks of a job stand. ``created_ns`` of operations is on the clock of the lowest rank."""

    dumps: Mapping[int, FlightDump]
    groups: tuple[Group, ...]
    numbers: Mapping[int, Mapping[int, int]]
    """Rank -> index of a group in its dump -> index in ``groups``."""
    issued: dict[tuple[int, int], int]
    """(group, rank) -> sequence number of the last collective that the rank issued; absent: none is known."""
    completed: dict[int, int]
    """Group -> sequence number up to which all ranks came, since one has completed it."""
    open_ops: dict[int, list[OpenOp]]
    """Rank -> what it waits for, in the order of issue: without what others show to have been done long ago."""
    behind: dict[int, list[OpenOp]]
    """Rank -> collectives that are done on other ranks, but not on it: its device, or its watchdog, stands still."""
    offsets_ns: Mapping[int, int]
    only_active: bool
    """The dumps hold only what is not done."""
    p2p_rows: dict[tuple[int, int, int, str], list[tuple[int, int, int]]] = field(default_factory=dict)
    """(group, sender, receiver, "send" or "recv") -> (sequence number, state, row) of the rank that issued them."""
    p2p_status: dict[tuple[int, int], int] = field(default_factory=dict)
    """(group, rank) -> the last number that the status of a group has."""

    def has_come(self, rank: int, group: int, sequence: int) -> bool | None:
        """Did a rank issue a collective? None where nothing tells: it left no dump, or one that holds nothing."""
        dump = self.dumps.get(rank)
        if dump is None:
            return None
        known = self.issued.get((group, rank))
        if known is None and not len(dump.group) and not self.only_active:
            return None
        return max(known or 0, self.completed.get(group, 0)) >= sequence

    @property
    def world(self) -> tuple[int, ...]:
        """Every rank that a dump is of or that a group names."""
        return tuple(sorted({*self.dumps, *(rank for group in self.groups for rank in group.ranks)}))


def progress(dumps: Mapping[int, FlightDump], world_size: int | None = None) -> Progress:
    """Where the ranks stand. ``world_size`` is used for groups whose ranks gloo does not record."""
    groups, numbers = _groups(dumps, world_size)
    issued, completed, mixed = _collectives(dumps, numbers)
    p2p_status = _from_status(dumps, numbers, mixed, issued, completed)
    offsets = _clock_offsets(dumps, numbers)
    open_ops, behind = {}, {}
    for rank, dump in dumps.items():
        open_ops[rank], behind[rank] = _open(rank, dump, numbers[rank], groups, completed, offsets.get(rank, 0))
    rows = [dump.state for dump in dumps.values()]
    first = [int(dump.sequence.min()) for dump in dumps.values() if len(dump.sequence)]
    return Progress(
        dumps=dumps,
        groups=groups,
        numbers=numbers,
        issued=issued,
        completed=completed,
        open_ops=open_ops,
        behind=behind,
        offsets_ns=offsets,
        only_active=bool(first) and min(first) > 1 and not any((state == DONE).any() for state in rows),
        p2p_rows=_p2p_rows(dumps, numbers, groups),
        p2p_status=p2p_status,
    )


def _groups(
    dumps: Mapping[int, FlightDump], world_size: int | None
) -> tuple[tuple[Group, ...], dict[int, dict[int, int]]]:
    """(the job's groups, rank -> index in its dump -> index in the job). One name may mean several groups."""
    keys: dict[tuple[str, str, tuple[int, ...]], int] = {}
    descriptions: list[str] = []
    users: list[set[int]] = []
    numbers: dict[int, dict[int, int]] = {}
    for rank, dump in dumps.items():
        numbers[rank] = {}
        for index, group in enumerate(dump.groups):
            number = keys.setdefault((group.backend, group.name, group.ranks), len(keys))
            if number == len(users):
                users.append(set())
                descriptions.append(group.description)
            users[number].add(rank)
            numbers[rank][index] = number
    everyone = {*dumps, *range(world_size or 0), *(rank for _, _, ranks in keys for rank in ranks)}
    made = []
    for (backend, name, ranks), number in keys.items():
        default = name == _NO_GROUP[0] or descriptions[number] == _NO_GROUP[1]
        members = ranks or tuple(sorted(everyone if default else users[number]))
        made.append(Group(number, backend, name, descriptions[number], members))
    return tuple(made), numbers


def _collectives(
    dumps: Mapping[int, FlightDump], numbers: Mapping[int, Mapping[int, int]]
) -> tuple[dict[tuple[int, int], int], dict[int, int], set[int]]:
    """(last collective issued by group and rank, last one completed by group, groups that have sends or recvs)."""
    issued: dict[tuple[int, int], int] = {}
    completed: dict[int, int] = {}
    mixed: set[int] = set()
    for rank, dump in dumps.items():
        rooted = np.array([kind.operator in ROOTED for kind in dump.kinds], dtype=np.bool_)[dump.kind]
        for index, number in numbers[rank].items():
            mine = dump.group == index
            if (mine & dump.p2p).any():
                mixed.add(number)
            mine &= ~dump.p2p
            status = dump.status.get(index)
            if status is not None and mine.any() and _is_of_messages(status, int(dump.sequence[mine].max())):
                mixed.add(number)
            if mine.any():
                issued[number, rank] = int(dump.sequence[mine].max())
            done = mine & (dump.state == DONE) & ~rooted
            if done.any():
                completed[number] = max(completed.get(number, 0), int(dump.sequence[done].max()))
    return issued, completed, mixed


def _is_of_messages(status: GroupStatus, last: int) -> bool:
    """Does a status have numbers of sends or recvs, though the dump shows collectives alone, the last one ``last``?"""
    return status.completed > status.enqueued or status.enqueued != last


def _from_status(
    dumps: Mapping[int, FlightDump],
    numbers: Mapping[int, Mapping[int, int]],
    mixed: set[int],
    issued: dict[tuple[int, int], int],
    completed: dict[int, int],
) -> dict[tuple[int, int], int]:
    """Add what the groups' statuses say about collectives; returns the numbers of groups with sends or recvs.

    A status has one number, of whichever kind came last. Gloo's counts both together, and says nothing here.
    """
    p2p: dict[tuple[int, int], int] = {}
    for rank, dump in dumps.items():
        for index, status in dump.status.items():
            number = numbers[rank][index]
            if dump.groups[index].backend == "gloo":
                continue
            if number in mixed:
                p2p[number, rank] = status.enqueued
                continue
            issued[number, rank] = max(issued.get((number, rank), 0), status.enqueued)
            completed[number] = max(completed.get(number, 0), status.completed)
    return p2p


def _open(
    rank: int,
    dump: FlightDump,
    numbers: Mapping[int, int],
    groups: tuple[Group, ...],
    completed: Mapping[int, int],
    offset_ns: int,
) -> tuple[list[OpenOp], list[OpenOp]]:
    """(what one rank waits for, which of its collectives are done elsewhere only)."""
    if not len(dump.group):
        return [], []
    local = np.array([completed.get(numbers[index], 0) for index in range(len(dump.groups))], dtype=np.int64)
    own = np.zeros(len(dump.groups), dtype=np.int64)
    finished = ~dump.p2p & (dump.state == DONE)
    np.maximum.at(own, dump.group[finished], dump.sequence[finished])
    waiting = dump.state != DONE
    # What was issued on a communicator before something that is done, is done: also where it has no event.
    waiting &= dump.p2p | (dump.sequence > own[dump.group])
    if not finished.any():
        # Parts of messages that were issued as one have no events, and stay in a dump of active operations for ever.
        waiting &= ~dump.p2p | (dump.sequence > _completed_messages(dump)[dump.group])
    elsewhere = waiting & ~dump.p2p & (dump.sequence <= local[dump.group])
    ops, behind = [], []
    first: dict[tuple[int, int], int] = {}
    for row in np.flatnonzero(waiting).tolist():
        op = op_of(rank, dump, row, groups[numbers[int(dump.group[row])]], offset_ns)
        if elsewhere[row]:
            behind.append(op)
        else:
            ops.append(op._replace(row=first.setdefault((op.group, op.sequence), row)) if op.p2p else op)
    return _without_passed_messages(ops, dump), behind


def op_of(rank: int, dump: FlightDump, row: int, group: Group, offset_ns: int) -> OpenOp:
    """What a rank issued in one row of its dump."""
    kind = dump.kinds[dump.kind[row]]
    return OpenOp(
        rank,
        row,
        group.index,
        bool(dump.p2p[row]),
        int(dump.sequence[row]),
        kind,
        _global(group, kind.peer),
        bool(dump.state[row] == STARTED),
        bool(dump.timed_out[row]),
        int(dump.created_ns[row]) + offset_ns,
    )


def _completed_messages(dump: FlightDump) -> Int64:
    """Number of the last message that is done in each group, from its status; 0 where it has collectives, too."""
    done = [dump.status[index].completed if index in dump.status else 0 for index in range(len(dump.groups))]
    found: Int64 = np.array(done, dtype=np.int64)
    found[dump.group[~dump.p2p]] = 0
    return found


def _without_passed_messages(ops: list[OpenOp], dump: FlightDump) -> list[OpenOp]:
    """Without sends and recvs that a later one of the same pair shows to be done."""
    last: dict[tuple[int, int | None, str], int] = {}
    for row in np.flatnonzero(dump.p2p & (dump.state == DONE)).tolist():
        kind = dump.kinds[dump.kind[row]]
        last[int(dump.group[row]), kind.peer, kind.operator] = row
    return [
        op
        for op in ops
        if not op.p2p or last.get((int(dump.group[op.row]), op.kind.peer, op.kind.operator), -1) < op.row
    ]


def _global(group: Group, peer: int | None) -> int | None:
    """The global rank of a member's number."""
    return group.ranks[peer] if peer is not None and peer < len(group.ranks) else None


def _p2p_rows(
    dumps: Mapping[int, FlightDump], numbers: Mapping[int, Mapping[int, int]], groups: tuple[Group, ...]
) -> dict[tuple[int, int, int, str], list[tuple[int, int, int]]]:
    found: dict[tuple[int, int, int, str], list[tuple[int, int, int]]] = {}
    for rank, dump in dumps.items():
        for row in np.flatnonzero(dump.p2p).tolist():
            kind, group = dump.kinds[dump.kind[row]], groups[numbers[rank][int(dump.group[row])]]
            peer = _global(group, kind.peer)
            if peer is not None:
                pair = (rank, peer) if kind.operator == "send" else (peer, rank)
                entry = (int(dump.sequence[row]), int(dump.state[row]), row)
                found.setdefault((group.index, *pair, kind.operator), []).append(entry)
    return found


def job_groups(dump: FlightDump, numbers: Mapping[int, int]) -> Int64:
    """The job's group of each row of a dump; ``numbers``: index of a group in the dump -> in the job."""
    of: Int64 = np.array([numbers[index] for index in range(len(dump.groups))], dtype=np.int64)
    return of[dump.group]


def _clock_offsets(dumps: Mapping[int, FlightDump], numbers: Mapping[int, Mapping[int, int]]) -> Mapping[int, int]:
    """Rank -> ns to add to its clock. Collectives end on all ranks together; without ends the clocks stay."""
    groups, sequences, ranks, ends = [], [], [], []
    for rank, dump in dumps.items():
        rows = np.flatnonzero(~dump.p2p & (dump.state == DONE) & (dump.completed_ns > 0))[-_CLOCK_ROWS:]
        groups.append(job_groups(dump, numbers[rank])[rows])
        sequences.append(dump.sequence[rows])
        ranks.append(np.full(len(rows), rank, dtype=np.int64))
        ends.append(dump.completed_ns[rows])
    if not sum(map(len, ranks)):
        return {}
    instance = label_rows(np.concatenate(groups), np.concatenate(sequences))
    everyone: Int64 = np.array(sorted(dumps), dtype=np.int64)
    clocks = align(everyone, instance, np.concatenate(ranks), np.concatenate(ends))
    return dict(zip(everyone.tolist(), clocks.offset_ns.tolist(), strict=True))
