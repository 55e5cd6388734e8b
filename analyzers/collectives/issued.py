"""Which operator issued each of a backend's host ranges, and what it says of it.

A backend carries collectives out on threads of its own, a queue for each group; nothing ties a range there to the
operator. Sends and receipts begin inside theirs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.collectives.communication import Group
from perfscope.analyzers.collectives.found import assumed_group, group_of, listed_groups
from perfscope.analyzers.nesting import Nested
from perfscope.trace import NONE, Category, Int64, Trace
from perfscope.vocabulary import COLLECTIVE_PREFIX

_FIELDS: Final = 7
"""Kind, group, size, sequence, peer, type and bytes (``COLLECTIVE_PREFIX``)."""

_PEER_INPUT: Final = {"c10d::send": 2, "c10d::recv_": 2}
"""Operators with the place of the peer, by its number in the group, among their inputs: torch's c10d/Ops.cpp."""

_CARRIED_OUT_AS: Final = {"reduce_scatter": ("all_reduce",)}
"""Kinds that gloo makes of others: c10d's ProcessGroupGloo.cpp."""


@dataclass(frozen=True)
class Event:
    """What a backend's range shows of itself."""

    start_ns: int
    thread: int
    kind: str
    bytes: int
    """Of its tensors; NONE where not recorded."""


@dataclass(frozen=True)
class Issued:
    """What the operator that issued a collective says of it; NONE and None where it does not."""

    start_ns: int
    group: Group
    kind: str
    dtype: str | None
    bytes: int
    sequence: int
    peer: int


def issued_collectives(trace: Trace, rows: Int64, events: Sequence[Event]) -> list[Issued | None]:
    """For each of a backend's ranges (``rows`` of the trace, in order of start) the operator that issued it."""
    issuers = _described(trace) or _operators(trace)
    found: list[Issued | None] = [None] * len(events)
    one_way = np.flatnonzero([event.kind in ("send", "recv") for event in events])
    nested = Nested.of(trace, np.array(sorted(issuers), dtype=np.int64))
    around = nested.innermost(trace.thread[rows[one_way]], trace.start_ns[rows[one_way]])
    for place, inside in zip(one_way.tolist(), around.tolist(), strict=True):
        if inside != NONE:
            found[place] = issuers[int(nested.row[inside])]
    queues = _Queues(list(issuers.values()))
    for place, event in enumerate(events):
        if event.kind not in ("send", "recv"):
            found[place] = queues.take(event)
    return found


class _Queues:
    """Collectives issued and not yet carried out, a queue for each group."""

    def __init__(self, issued: Sequence[Issued]) -> None:
        self._waiting: dict[Group, list[Issued]] = defaultdict(list)
        for each in sorted(issued, key=lambda each: each.start_ns):
            if each.kind not in ("send", "recv"):
                self._waiting[each.group].append(each)
        self._group_of: dict[int, Group] = {}
        """Threads whose group is known: a thread serves one group."""

    def take(self, event: Event) -> Issued | None:
        """The first that was issued before the event and can be it; no more than one group's where that is told."""
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
    def _first(waiting: Sequence[Issued], event: Event) -> int | None:
        for place, each in enumerate(waiting):
            if each.start_ns > event.start_ns:
                return None
            if event.kind in (each.kind, *_CARRIED_OUT_AS.get(each.kind, ())) and _same_size(each, event):
                return place
        return None


def _same_size(issued: Issued, event: Event) -> bool:
    if NONE in (issued.bytes, event.bytes):
        return True
    # A range shows its input, of which an all-gather makes as many as there are ranks.
    return issued.bytes in (event.bytes, event.bytes * (issued.group.size or 1))


def _described(trace: Trace) -> dict[int, Issued]:
    """The collector's ranges around operators, by row."""
    listed = listed_groups(trace)
    named = {}
    for index, text in enumerate(trace.strings):
        if text.startswith(COLLECTIVE_PREFIX):
            fields = text.removeprefix(COLLECTIVE_PREFIX).split("|")
            if len(fields) >= _FIELDS:  # later versions may say more
                named[index] = fields
    if not named:
        return {}
    rows = np.flatnonzero(np.isin(trace.name, list(named)) & (trace.category == Category.ANNOTATION))
    return {row: _read(named[int(trace.name[row])], int(trace.start_ns[row]), listed) for row in rows.tolist()}


def _read(fields: Sequence[str], start_ns: int, listed: dict[str, Group]) -> Issued:
    kind, name, size, sequence, peer, dtype, length = fields[:_FIELDS]

    def number(text: str) -> int:
        return int(text) if text.isdigit() else NONE

    group = listed.get(name) or group_of(name, (), number(size) if size.isdigit() else None)
    return Issued(start_ns, group, kind, dtype or None, number(length), number(sequence), number(peer))


def _operators(trace: Trace) -> dict[int, Issued]:
    """Operators of torch itself for sends and receipts, by row: they tell the peer where there is but one group."""
    group = assumed_group(trace)
    wanted = trace.names_where(lambda name: name in _PEER_INPUT)
    found = {}
    for row in np.flatnonzero(wanted & (trace.category == Category.CPU_OP)).tolist():
        name = trace.name_of(row)
        number = _peer_input(trace, row, _PEER_INPUT[name])
        peer = group.ranks[number] if 0 <= number < len(group.ranks) else NONE
        kind = "send" if name == "c10d::send" else "recv"
        found[row] = Issued(int(trace.start_ns[row]), group, kind, None, NONE, NONE, peer)
    return found


def _peer_input(trace: Trace, row: int, place: int) -> int:
    """An integer among an operator's concrete inputs; NONE where they were not recorded."""
    if trace.inputs[row] == NONE:
        return NONE
    values = json.loads(trace.strings[trace.inputs[row]])
    text = values[place] if isinstance(values, list) and len(values) > place else ""
    return int(text) if isinstance(text, str) and text.isdigit() else NONE
