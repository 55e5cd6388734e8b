"""What the file of each rank has to hold, from the analysis of the whole job, without reading traces again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from perfscope.analyzers.export.communicators import COLLECTIVES, SIMULATED, Communicators, Message, MessageEnd, tagged
from perfscope.analyzers.export.et_def import NodeType, Value
from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.rank.collectives.collectives import Group
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.timeline import Timeline
from perfscope.analyzers.replay.rank_ops import RankOpNumbers, ReplayRankOps
from perfscope.frozen import dataclass
from perfscope.recording.captures import TraceSource
from perfscope.text import plural
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NONE, Int64

_ON_DEVICE: Final[Mapping[str, Value]] = {"is_cpu_op": False}
_LEFT_OUT: Final[tuple[tuple[NodeType, Mapping[str, Value]], ...]] = ()
"""For what no simulator could carry out: a rank that waited for it is idle there as long as it was recorded to be."""
_INPUT_IS_SHARD: Final = ("all_gather",)
"""Kinds whose recorded bytes are those of all ranks, where simulators take those of one."""


@dataclass(frozen=True, eq=False)
class Part:
    """A rank's part in a collective or in an exchange of messages; own clock, ns.

    ``follows`` are the parts of this rank that it starts after; ``nodes`` what stands for it in the file: type and
    attributes, none where it is left out. ``duration_ns`` is the transfer, from the last arrival on: simulated ranks
    wait for each other by themselves.
    """

    name: str
    start_ns: int
    end_ns: int
    duration_ns: int
    stream: int
    follows: tuple[int, ...]
    nodes: tuple[tuple[NodeType, Mapping[str, Value]], ...]


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank: everything that the worker needs besides the rank's trace. Own clock, ns.

    ``blocker`` has, for each stretch of ``blocked``, the index in ``parts`` of what the rank waits for, or NONE.
    ``lead_ns`` is how much later than the first rank it begins, ``zero_ns`` the first rank's begin.
    """

    rank: int
    source: TraceSource
    steps: Steps
    chosen: tuple[int, ...]
    first_ns: int
    last_ns: int
    zero_ns: int
    lead_ns: int
    own: Timeline
    blocked: Intervals
    blocker: Int64
    parts: tuple[Part, ...]
    path: Path
    """Where its file is written."""


@dataclass
class _Unwritten:
    """Counts of what the files do not hold as it was recorded."""

    cut: int = 0
    unknown: int = 0
    sizeless: int = 0
    refused: int = 0

    def sentences(self) -> list[str]:
        said = []
        if self.cut:
            said.append(
                f"{plural(self.cut, 'part')} in communication whose other ends are outside the exported steps: left "
                "out, with recorded waits for it as idle time."
            )
        if self.unknown:
            said.append(
                f"{plural(self.unknown, 'part')} in communication of a kind, group or peer that is not recorded: left "
                "out, with recorded waits for it as idle time."
            )
        if self.sizeless:
            said.append(
                f"The size of {plural(self.sizeless, 'collective')} is not recorded: their nodes have no comm_size, "
                "which simulators ask for. Record with torch 2.2 or newer."
            )
        if self.refused:
            said.append(
                f"{plural(self.refused, 'collective')} of a kind that ASTRA-sim does not simulate (reduce, gather, "
                "scatter): it stops there."
            )
        return said


def rank_plans(
    result: AlignedJob, sources: Mapping[int, TraceSource], steps: Sequence[int], world: int, folder: Path, name: str
) -> tuple[list[RankPlan], Communicators, list[str]]:
    """The plans of all ranks, the groups that they name, and sentences about what cannot be written as recorded.

    ``steps`` are consecutive numbers of recorded steps, ``world`` the number of the job's ranks.
    """
    return _Planner(result, sources, steps, world).plans(folder, name)


class _Planner:
    def __init__(
        self, result: AlignedJob, sources: Mapping[int, TraceSource], steps: Sequence[int], world: int
    ) -> None:
        self._result = result
        self._sources = sources
        self._steps = tuple(steps)
        self._matched = result.matched_before
        self._communicators = Communicators(range(world))
        self._unwritten = _Unwritten()
        self._windows = {rank: self._window(partial) for rank, partial in sorted(result.partials.items())}
        numbers = RankOpNumbers(self._matched)
        self._ops = {
            rank: numbers.of(rank, result.partials[rank], first, last) for rank, (first, last) in self._windows.items()
        }
        instances = [ops.instance for ops in self._ops.values()]
        self._exported = np.bincount(np.concatenate(instances), minlength=len(self._matched.instances))
        self._several = self._labels_of_several()
        self._messages = tagged(list(self._ends()), frozenset(self._ops))

    def _window(self, partial: RankPartial) -> tuple[int, int]:
        first, last = partial.steps.indices_of(np.array([self._steps[0], self._steps[-1]])).tolist()
        return int(partial.steps.start_ns[first]), int(partial.steps.end_ns[last])

    def plans(self, folder: Path, name: str) -> tuple[list[RankPlan], Communicators, list[str]]:
        clocks = self._result.clocks
        begins = {rank: clocks.to_common(rank, first) for rank, (first, _) in self._windows.items()}
        zero = min(begins.values())
        plans = []
        for rank, (first, last) in self._windows.items():
            partial, ops = self._result.partials[rank], self._ops[rank]
            place = np.full(len(partial.collectives), NONE, dtype=np.int64)
            place[ops.row] = np.arange(len(ops.row))
            blocked = partial.progress.blocked
            plans.append(
                RankPlan(
                    rank=rank,
                    source=self._sources[rank],
                    steps=partial.steps,
                    chosen=self._steps,
                    first_ns=first,
                    last_ns=last,
                    zero_ns=clocks.to_own(rank, zero),
                    lead_ns=begins[rank] - zero,
                    own=partial.progress.own,
                    blocked=blocked,
                    blocker=place[partial.progress.blocker] if len(blocked) else partial.progress.blocker,
                    parts=tuple(self._parts(rank, partial, ops)),
                    path=folder / f"{name}.{rank}.et",
                )
            )
        return plans, self._communicators, self._unwritten.sentences()

    def _parts(self, rank: int, partial: RankPartial, ops: ReplayRankOps) -> Iterator[Part]:
        own, first = partial.collectives, self._windows[rank][0]
        messages: dict[int, list[Message]] = {}
        for each in self._messages.get(rank, ()):
            messages.setdefault(each.part, []).append(each)
        base = int(ops.number[0]) if len(ops.number) else 0
        for index, row in enumerate(ops.row.tolist()):
            nodes = self._nodes(rank, partial, ops, index, messages.get(index, []))
            start, end = int(own.start_ns[row]), int(own.end_ns[row])
            follows = {int(number) - base for number in (ops.previous[index], ops.after[index]) if number != NONE}
            yield Part(
                name=own.kinds[own.kind[row]],
                start_ns=start,
                end_ns=end,
                duration_ns=min(int(ops.transfer_ns[index]), end - max(start, first)),
                stream=int(own.stream[row]),
                follows=tuple(sorted(follows)),
                nodes=nodes,
            )

    def _nodes(
        self, rank: int, partial: RankPartial, ops: ReplayRankOps, index: int, messages: Sequence[Message]
    ) -> tuple[tuple[NodeType, Mapping[str, Value]], ...]:
        """What stands for one part; nothing where no simulator could find its other ends."""
        own, row, instance = partial.collectives, int(ops.row[index]), int(ops.instance[index])
        if messages:
            if any(each.tag is None for each in messages):
                self._unwritten.cut += 1
                return _LEFT_OUT
            # Sends first: a simulator that has room for one at a time must not wait for a message yet to be sent.
            ordered = sorted(messages, key=lambda each: each.destination == rank)
            return tuple(self._message(rank, each) for each in ordered)
        kind = COLLECTIVES.get(own.kinds[own.kind[row]])
        members = self._members(rank, partial, row, instance)
        if kind is None or len(members) < 2:
            self._unwritten.unknown += 1
            return _LEFT_OUT
        if int(self._exported[instance]) < len(self._ops.keys() & set(members)):
            self._unwritten.cut += 1
            return _LEFT_OUT
        attributes: dict[str, Value] = {**_ON_DEVICE, "comm_type": int(kind)}
        size = int(own.bytes[row])
        if size == NONE:
            self._unwritten.sizeless += 1
        else:
            shard = own.kinds[own.kind[row]] in _INPUT_IS_SHARD
            attributes["comm_size"] = max(size // len(members) if shard else size, 1)
        if group := self._communicators.name_of(members, self._label(partial, row, instance)):
            attributes["pg_name"] = group
        self._unwritten.refused += kind not in SIMULATED
        return ((NodeType.COLLECTIVE, attributes),)

    def _message(self, rank: int, each: Message) -> tuple[NodeType, Mapping[str, Value]]:
        assert each.tag is not None
        attributes: dict[str, Value] = {
            **_ON_DEVICE, "comm_src": each.source, "comm_dst": each.destination, "comm_tag": each.tag
        }  # fmt: skip
        if each.bytes is None:
            self._unwritten.sizeless += 1
        else:
            attributes["comm_size"] = max(each.bytes, 1)
        return NodeType.SEND if each.source == rank else NodeType.RECV, attributes

    def _members(self, rank: int, partial: RankPartial, row: int, instance: int) -> tuple[int, ...]:
        """The ranks of a collective's group; those that took part where the recording does not list them."""
        own = partial.collectives
        group: Group = own.groups[own.group[row]]
        if group.ranks:
            return group.ranks
        lines = np.flatnonzero(self._matched.instance == instance)
        there = tuple(int(each) for each in self._matched.rank[lines])
        return there if group.size is None or group.size == len(there) else ()

    def _label(self, partial: RankPartial, row: int, instance: int) -> str:
        """What all ranks call a collective's group; with the kind where the recording does not say which it is."""
        own, instances = partial.collectives, self._matched.instances
        group = own.groups[own.group[row]]
        if instance < len(instances):
            group = instances.groups[int(instances.group[instance])]
        label = f"{group.name} {group.description}"
        return f"{label} {own.kinds[own.kind[row]]}" if label in self._several else label

    def _labels_of_several(self) -> frozenset[str]:
        """Labels that must stand for several groups, which the recording does not tell apart: a group's collectives
        begin in one order on all its ranks, and theirs do not.
        """
        orders: dict[str, set[tuple[int, ...]]] = {}
        whole = set(np.flatnonzero(self._exported == self._matched.instances.participants).tolist())
        for group in distinct(self._matched.instances.group).tolist():
            named = self._matched.instances.groups[group]
            mine = {each for each in whole if self._matched.instances.group[each] == group}
            for ops in self._ops.values():
                order = tuple(each for each in ops.instance.tolist() if each in mine)
                orders.setdefault(f"{named.name} {named.description}", set()).add(order)
        return frozenset(label for label, found in orders.items() if len({each for each in found if each}) > 1)

    def _ends(self) -> Iterator[MessageEnd]:
        """The messages of all ranks in the exported steps."""
        for rank, ops in self._ops.items():
            partial = self._result.partials[rank]
            said = partial.collectives.messages
            place = {row: index for index, row in enumerate(ops.row.tolist())}
            for line, row in enumerate(said.collective.tolist()):
                peer, size = int(said.peer[line]), int(said.bytes[line])
                if row in place and peer != NONE:
                    source, destination = (rank, peer) if said.sends[line] else (peer, rank)
                    part = place[row]
                    instance = int(ops.instance[part])
                    yield MessageEnd(rank, part, instance, source, destination, None if size == NONE else size)
