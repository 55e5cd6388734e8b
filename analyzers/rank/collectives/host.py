"""A backend's host ranges (gloo, MPI, Horovod) as collectives.

A backend carries out collectives on its own threads, with one queue per group. The trace does not link a range there to
the operator that issued it, so this module matches the two by order. Sends and recvs begin inside their operators.

PerfScope's collector describes each collective in a range around its operator. Recordings without these ranges have
kind, type and size, and for a send or recv the peer; the group is known only where there is just one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives import raw
from perfscope.analyzers.rank.collectives.autograd import after_backward, in_backward, in_norms, in_parameters
from perfscope.analyzers.rank.collectives.collectives import Group, Messages
from perfscope.analyzers.rank.collectives.communication import host_communication_rows, kind_of
from perfscope.analyzers.rank.collectives.tensors import input_tensors
from perfscope.analyzers.rank.nesting import Nested
from perfscope.frozen import dataclass
from perfscope.recording.vocabulary import COLLECTIVE_PREFIX
from perfscope.trace.trace import NONE, Category, Int64, Trace

_FIELDS: Final = 7
"""Kind, group, size, sequence, peer, type and bytes (``COLLECTIVE_PREFIX``)."""

_PEER_INPUT: Final = {"c10d::send": 2, "c10d::recv_": 2}
"""Operator -> which of its inputs is the peer (its number in the group): torch's c10d/Ops.cpp."""

_CARRIED_OUT_AS: Final = {"reduce_scatter": ("all_reduce",)}
"""Kinds that gloo carries out as others: c10d's ProcessGroupGloo.cpp."""


@dataclass(frozen=True)
class BackendRange:
    """One range of a backend's thread."""

    start_ns: int
    thread: int
    kind: str
    bytes: int
    """Of its tensors; NONE where not recorded."""


@dataclass(frozen=True)
class IssuedCollective:
    """A collective as the operator that issued it describes it; NONE and None where not recorded."""

    start_ns: int
    group: Group
    kind: str
    dtype: str | None
    bytes: int
    sequence: int
    peer: int


def on_host(trace: Trace) -> raw.RawCollectives:
    """The collectives that a rank's backend carries out on the host."""
    rows = host_communication_rows(trace)
    tensors = [input_tensors(trace, row) for row in rows.tolist()]
    events = [
        BackendRange(int(trace.start_ns[row]), int(trace.thread[row]), kind_of(trace.name_of(row)), size)
        for row, (_, size) in zip(rows.tolist(), tensors, strict=True)
    ]
    group = raw.assumed_group(trace)
    issued = [
        source or _alone(event, group)
        for event, source in zip(events, _issued_collectives(trace, rows, events), strict=True)
    ]
    size = _column(
        [event.bytes if each.bytes == NONE else each.bytes for each, event in zip(issued, events, strict=True)]
    )
    every = [
        raw.CollectiveKey(each.group, each.kind, each.dtype or dtype)
        for each, (dtype, _) in zip(issued, tensors, strict=True)
    ]
    keys = list(dict.fromkeys(every))
    place = {key: index for index, key in enumerate(keys)}
    is_one_way = np.array([each.kind in ("send", "recv") for each in issued], dtype=np.bool_)
    one_way = np.flatnonzero(is_one_way)
    issued_ns = _column([each.start_ns for each in issued])
    return raw.RawCollectives(
        # gloo's range around a message begins only when its operator returns, which may already wait for the network.
        start_ns=np.where(is_one_way, issued_ns, trace.start_ns[rows]),
        end_ns=trace.ends_ns(rows),
        stream=trace.thread[rows].astype(np.int64),
        issued_ns=issued_ns,
        key=_column([place[key] for key in every]),
        bytes=size,
        mean_bytes=size,  # what is received is not recorded
        sequence=_column([each.sequence for each in issued]),
        keys=keys,
        backward=in_backward(trace, issued_ns),
        after_backward=after_backward(trace, issued_ns),
        in_parameters=in_parameters(trace, issued_ns),
        in_norms=in_norms(trace, issued_ns),
        messages=Messages(
            collective=one_way,
            peer=_column([each.peer for each in issued])[one_way],
            sends=np.array([each.kind == "send" for each in issued], dtype=np.bool_)[one_way],
            bytes=size[one_way],
        ),
        on_host=True,
    )


def _alone(event: BackendRange, group: Group) -> IssuedCollective:
    """A range whose operator is not known."""
    gathered = event.kind == "all_gather" and group.size is not None and event.bytes != NONE
    size = event.bytes * (group.size or 1) if gathered else event.bytes
    return IssuedCollective(event.start_ns, group, event.kind, None, size, NONE, NONE)


def _column(values: Sequence[int]) -> Int64:
    return np.array(values, dtype=np.int64)


def _issued_collectives(trace: Trace, rows: Int64, events: Sequence[BackendRange]) -> list[IssuedCollective | None]:
    """For each of a backend's ranges (``rows`` of the trace, in order of start), the operator that issued it."""
    issuers = _described(trace) or _operators(trace)
    matched: list[IssuedCollective | None] = [None] * len(events)
    one_way = np.flatnonzero([event.kind in ("send", "recv") for event in events])
    nested = Nested.of(trace, np.array(sorted(issuers), dtype=np.int64))
    around = nested.around(trace, rows[one_way])
    for place, inside in zip(one_way.tolist(), around.tolist(), strict=True):
        if inside != NONE:
            matched[place] = issuers[int(nested.row[inside])]
    queues = _Queues(list(issuers.values()))
    for place, event in enumerate(events):
        if event.kind not in ("send", "recv"):
            matched[place] = queues.take(event)
    return matched


class _Queues:
    """Collectives that were issued and not yet carried out: one queue per group."""

    def __init__(self, issued: Sequence[IssuedCollective]) -> None:
        self._waiting: dict[Group, list[IssuedCollective]] = defaultdict(list)
        for each in sorted(issued, key=lambda each: each.start_ns):
            if each.kind not in ("send", "recv"):
                self._waiting[each.group].append(each)
        self._group_of: dict[int, Group] = {}
        """Group of each thread, where known: a thread serves one group."""

    def take(self, event: BackendRange) -> IssuedCollective | None:
        """The first matching collective issued before the range; of the thread's group only, where that is known."""
        own = self._group_of.get(event.thread)
        first = {
            group: place
            for group, waiting in self._waiting.items()
            if own in (None, group) and (place := self._first(waiting, event)) is not None
        }
        if not first:
            return None
        group = min(first, key=lambda group: self._waiting[group][first[group]].start_ns)
        if len(first) == 1:
            self._group_of[event.thread] = group
        return self._waiting[group].pop(first[group])

    @staticmethod
    def _first(waiting: Sequence[IssuedCollective], event: BackendRange) -> int | None:
        for place, each in enumerate(waiting):
            if each.start_ns > event.start_ns:
                return None
            if event.kind in (each.kind, *_CARRIED_OUT_AS.get(each.kind, ())) and _same_size(each, event):
                return place
        return None


def _same_size(issued: IssuedCollective, event: BackendRange) -> bool:
    if NONE in (issued.bytes, event.bytes):
        return True
    # A range has the size of its input; an all-gather's output has that of all ranks.
    return issued.bytes in (event.bytes, event.bytes * (issued.group.size or 1))


def _described(trace: Trace) -> dict[int, IssuedCollective]:
    """PerfScope's ranges around operators, by row."""
    listed = raw.listed_groups(trace)
    named = {}
    for index, text in enumerate(trace.strings):
        if text.startswith(COLLECTIVE_PREFIX):
            fields = text.removeprefix(COLLECTIVE_PREFIX).split("|")
            if len(fields) >= _FIELDS:  # later versions may add fields
                named[index] = fields
    if not named:
        return {}
    rows = np.flatnonzero(np.isin(trace.name, list(named)) & (trace.category == Category.ANNOTATION))
    return {row: _read(named[int(trace.name[row])], int(trace.start_ns[row]), listed) for row in rows.tolist()}


def _read(fields: Sequence[str], start_ns: int, listed: dict[str, Group]) -> IssuedCollective:
    kind, name, size, sequence, peer, dtype, length = fields[:_FIELDS]

    def number(text: str) -> int:
        return int(text) if text.isdigit() else NONE

    group = listed.get(name) or raw.group_of(name, (), number(size) if size.isdigit() else None)
    return IssuedCollective(start_ns, group, kind, dtype or None, number(length), number(sequence), number(peer))


def _operators(trace: Trace) -> dict[int, IssuedCollective]:
    """``torch``'s operators for sends and recvs, by row: they have the peer where there is only one group."""
    group = raw.assumed_group(trace)
    issued = {}
    for row in trace.rows(Category.CPU_OP, named=_PEER_INPUT.__contains__).tolist():
        name = trace.name_of(row)
        number = _peer_input(trace, row, _PEER_INPUT[name])
        peer = group.ranks[number] if 0 <= number < len(group.ranks) else NONE
        kind = "send" if name == "c10d::send" else "recv"
        issued[row] = IssuedCollective(int(trace.start_ns[row]), group, kind, None, NONE, NONE, peer)
    return issued


def _peer_input(trace: Trace, row: int, place: int) -> int:
    """An integer among an operator's concrete inputs; NONE where they were not recorded."""
    if trace.inputs[row] == NONE:
        return NONE
    values = json.loads(trace.strings[trace.inputs[row]])
    text = values[place] if isinstance(values, list) and len(values) > place else ""
    return int(text) if isinstance(text, str) and text.isdigit() else NONE
