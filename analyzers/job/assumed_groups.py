"""The groups of collectives where no trace says which ranks take part.

Ranks 0 to N - 1 whose traces issue the same collectives in every step, which end on all of them at the same time, are
taken for all of the job, where none says how many ranks it has; so are most of them, where the traces of the others are
missing or cannot be used. Ranks that reduce with different ones, as in tensor
beside data parallelism, are told apart by the same: a communicator has a stream of its own on each device, and its
collectives end together on its ranks alone::

    stream 20   rank 0  ....10.0....20.0      stream 24   rank 0  ...........25.0
                rank 1  ....10.0....20.0                  rank 1  ...............26.5
                rank 2  ......11.3......21.9              rank 2  ...........25.0
                rank 3  ......11.3......21.9              rank 3  ...............26.5

Ranks 0 and 1, and 2 and 3, are groups on the first stream, 0 and 2, and 1 and 3, on the second. Clocks may be apart:
ends count relative to their median difference.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from typing import Final

import numpy as np

from perfscope.analyzers.job.hosts import find_hosts
from perfscope.analyzers.rank.collectives.collectives import POINT_TO_POINT, UNKNOWN_GROUP, WORLD, Collectives, Group
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.frozen import dataclass
from perfscope.trace.trace import Int64

_MOST: Final = 0.9
"""Share of a rank's collectives that must end when they do on another rank of the group."""
_ALL_NS: Final = 500_000
"""Ends of a collective of all ranks lie closer together."""
_CLOSE_NS: Final = (5_000, 10_000, 20_000, 50_000, 200_000)
"""The same of groups that are to be told from one another: the least that makes them equally large."""
_ALIKE: Final = 0.5
"""Share of the common steps in which the ranks must issue the same: the first and the last one may be cut."""

_Slot = tuple[tuple[tuple[str, int], ...], int]
"""What a stream carries in a usual step, kind by kind, and which one it is of those that carry the same."""


def with_assumed_groups(
    partials: Mapping[int, RankPartial], left_out: Collection[int] = ()
) -> tuple[dict[int, RankPartial], int] | None:
    """(the same with groups for the collectives of unknown ones, how many groups); None where nothing is unknown, or
    nothing can be assumed. Ranks that are missing among these, or were ``left_out``, are taken for ranks of one group
    with them, where they are fewer.
    """
    ranks = sorted(partials)
    groups = [group for partial in partials.values() for group in _groups(partial)]
    sizes = {partial.world_size for partial in partials.values()} - {None}
    size = max((*ranks, *left_out), default=0) + 1
    if len(ranks) < 2 or not groups or 2 * len(ranks) <= size or sizes - {len(ranks)} or (sizes and len(ranks) < size):
        return None
    if not all(_is_assumed(group) for group in groups) or not _names_agree(partials):
        return None  # of a part of the ranks, perhaps
    streams = {rank: _streams(partials[rank]) for rank in ranks}
    found = _apart(streams, _Clocks.of(partials, size)) if len(ranks) == size else None
    if found is None:
        if sizes or not _is_one(streams):
            return None
        return {rank: _of_all(partial, size) for rank, partial in partials.items()}, 1
    assigned = {rank: _assigned(rank, streams[rank], found) for rank in ranks}
    count = len({members for of_slot in found.values() for members in of_slot})
    messages = _across(found.values(), ranks)
    return {rank: _of_groups(partials[rank], assigned[rank], messages[rank], len(ranks)) for rank in ranks}, count


def _groups(partial: RankPartial) -> list[Group]:
    own = partial.collectives
    return [own.groups[index] for index in np.unique(own.group).tolist()]


def _is_assumed(group: Group) -> bool:
    return group.name == WORLD or (not group.ranks and group.size is None)


def _names_agree(partials: Mapping[int, RankPartial]) -> bool:
    """Does every rank name the same groups?"""
    return len({frozenset(group.name for group in _groups(partial)) for partial in partials.values()}) == 1


@dataclass(frozen=True, eq=False)
class _Stream:
    """One rank's collectives on one stream, or its messages: kinds, starts and ends by the number of the step."""

    number: int
    kinds: dict[int, tuple[str, ...]]
    start_ns: dict[int, Int64]
    end_ns: dict[int, Int64]

    @property
    def is_empty(self) -> bool:
        """Nothing was issued in any step."""
        return not any(map(len, self.kinds.values()))


@dataclass(frozen=True, eq=False)
class _Clocks:
    """What shows how far ranks' clocks are apart: the ``hosts`` of ranks, each of which has one clock, and the
    ``messages`` of each rank.
    """

    hosts: Mapping[int, str]
    messages: Mapping[int, _Stream]

    @classmethod
    def of(cls, partials: Mapping[int, RankPartial], size: int) -> _Clocks:
        """Those of a job of so many ranks."""
        messages = {rank: _messages(partial) for rank, partial in partials.items()}
        return cls(find_hosts(partials, {}, size).names, messages)

    def show_apart(self, clusters: Sequence[tuple[int, ...]], owners: Mapping[int, _Stream]) -> bool:
        """Do the clusters' collectives, ``owners``, end at different times by one clock?"""
        # Of thousands not each with each: what shows it shows between most.
        pairs = (*pairwise(clusters), *((clusters[0], other) for other in clusters[2:]))
        return any(self._by_host(*pair, owners) or self._by_messages(*pair, owners) for pair in pairs)

    def _by_host(self, one: tuple[int, ...], other: tuple[int, ...], owners: Mapping[int, _Stream]) -> bool:
        of_one = {self.hosts[rank]: rank for rank in one if rank in self.hosts}
        of_other = {self.hosts[rank]: rank for rank in other if rank in self.hosts}
        return any(
            abs(_later_ns(owners[of_one[host]], owners[of_other[host]])) > _ALL_NS
            for host in of_one.keys() & of_other.keys()
        )

    def _by_messages(self, one: tuple[int, ...], other: tuple[int, ...], owners: Mapping[int, _Stream]) -> bool:
        return any(
            not self.messages[first].is_empty
            and _together(self.messages[first], self.messages[second], _CLOSE_NS[-1])
            and abs(_later_ns(self.messages[first], self.messages[second]) - _later_ns(owners[first], owners[second]))
            > _ALL_NS
            for first, second in zip(one, other, strict=True)
        )


def _streams(partial: RankPartial) -> list[_Stream]:
    """All but messages, in the order of the streams' first use."""
    own = partial.collectives
    rows = _rows(own, of_messages=False)
    stream = own.stream[rows] if not own.on_host else np.zeros(len(rows), dtype=np.int64)  # threads take turns
    return [_stream(own, partial, number, rows[stream == number]) for number in dict.fromkeys(stream.tolist())]


def _messages(partial: RankPartial) -> _Stream:
    """The messages, of whatever stream."""
    return _stream(partial.collectives, partial, 0, _rows(partial.collectives, of_messages=True))


def _rows(own: Collectives, *, of_messages: bool) -> Int64:
    is_message = np.array([kind in POINT_TO_POINT for kind in own.kinds] or [False], dtype=np.bool_)
    return np.flatnonzero((own.step >= 0) & (is_message[own.kind] == of_messages))


def _stream(own: Collectives, partial: RankPartial, number: int, rows: Int64) -> _Stream:
    kinds, starts, ends = {}, {}, {}
    for step, label in enumerate(partial.steps.number.tolist()):
        inside = rows[own.step[rows] == step]
        kinds[label] = tuple(sorted(own.kinds[kind] for kind in own.kind[inside].tolist()))
        starts[label], ends[label] = np.sort(own.start_ns[inside]), np.sort(own.end_ns[inside])
    return _Stream(number, kinds, starts, ends)


def _is_one(streams: Mapping[int, Sequence[_Stream]]) -> bool:
    """Do all collectives end together on all ranks? Messages alone show nothing else."""
    if not any(streams.values()):
        return True
    whole = [_merged(of_rank) for of_rank in streams.values()]
    return all(_together(whole[0], each, _ALL_NS) for each in whole[1:])


def _merged(streams: Sequence[_Stream]) -> _Stream:
    steps = dict.fromkeys(step for stream in streams for step in stream.kinds)
    return _Stream(
        0,
        {step: tuple(sorted(kind for stream in streams for kind in stream.kinds[step])) for step in steps},
        {step: np.sort(np.concatenate([stream.start_ns[step] for stream in streams])) for step in steps},
        {step: np.sort(np.concatenate([stream.end_ns[step] for stream in streams])) for step in steps},
    )


def _apart(streams: Mapping[int, Sequence[_Stream]], clocks: _Clocks) -> dict[_Slot, list[tuple[int, ...]]] | None:
    """The groups of ranks that share the communicator of each slot; None where they are not of one size, or nothing
    shows that they are apart: ranks of one host end together more closely than those of several, too. Two slots that
    make a mesh show it, or that a rank of one group has ended before one of another began, or that some ranks carry
    what others do not, as the stages of a pipeline, or clocks: groups of ranks of one host end at different times, or
    the messages between ranks of two groups end together where their collectives do not.
    """
    slots: dict[_Slot, dict[int, _Stream]] = defaultdict(dict)
    for rank, of_rank in streams.items():
        for slot, stream in _slots(of_rank).items():
            slots[slot][rank] = stream
    found = {slot: _clusters(owners) for slot, owners in slots.items()}
    apart = {slot: clusters for slot, clusters in found.items() if clusters is not None}
    if len(apart) < len(found):
        return None
    unlike = any(len(owners) < len(streams) for owners in slots.values())
    mesh = any(_cross(*pair) for pair in combinations(apart.values(), 2))
    each = [(clusters, slots[slot]) for slot, clusters in apart.items()]
    shown = unlike or mesh or any(_missed(*one) or clocks.show_apart(*one) for one in each)
    return apart if shown or not _is_one(streams) else None


def _clusters(owners: Mapping[int, _Stream]) -> list[tuple[int, ...]] | None:
    """Ranks whose collectives end most closely together, in groups of one size; None where there are none such."""
    for apart_ns in _CLOSE_NS:
        clusters: list[list[int]] = []
        for rank, stream in owners.items():
            mine = next((each for each in clusters if _together(owners[each[0]], stream, apart_ns)), None)
            if mine is None:
                clusters.append([rank])
            else:
                mine.append(rank)
        if len({len(each) for each in clusters}) == 1 and len(clusters[0]) > 1:
            return [tuple(each) for each in clusters]
    return None


def _cross(first: Sequence[tuple[int, ...]], second: Sequence[tuple[int, ...]]) -> bool:
    """Has no group of one more than one rank of any of the other, as rows and columns of a mesh?"""
    return all(len({*row} & {*column}) <= 1 for row in first for column in second)


def _missed(clusters: Sequence[tuple[int, ...]], owners: Mapping[int, _Stream]) -> bool:
    """Has a rank of one of these groups ended, now and then, before one of another began?"""
    return any(_ended_before(owners[one[0]], owners[other[0]]) for one, other in permutations(clusters, 2))


def _later_ns(first: _Stream, other: _Stream) -> float:
    """How much later the other one's collectives end, median; 0 where the two issue nothing alike."""
    later = _later_each_ns(first, other, _alike(first, other))
    return float(np.median(later)) if len(later) else 0.0


def _later_each_ns(first: _Stream, other: _Stream, steps: Sequence[int]) -> Int64:
    """The same of each collective of these steps, in which the two issue the same."""
    later = [other.end_ns[step] - first.end_ns[step] for step in steps]
    return np.concatenate([np.empty(0, dtype=np.int64), *later])


def _alike(first: _Stream, other: _Stream) -> list[int]:
    """The steps in which the two issue the same."""
    return [step for step in first.kinds if first.kinds[step] == other.kinds.get(step)]


def _ended_before(first: _Stream, other: _Stream) -> bool:
    steps = _alike(first, other)
    if not any(len(first.kinds[step]) for step in steps):
        return False
    end, theirs = (np.concatenate([each.end_ns[step] for step in steps]) for each in (first, other))
    start = np.concatenate([other.start_ns[step] for step in steps]) - np.median(theirs - end)
    return bool(np.mean(start > end + _CLOSE_NS[0]) > 1 - _MOST)


def _slots(streams: Sequence[_Stream]) -> dict[_Slot, _Stream]:
    found: dict[_Slot, _Stream] = {}
    seen: Counter[tuple[tuple[str, int], ...]] = Counter()
    for stream in streams:
        ((kinds, _),) = Counter(stream.kinds.values()).most_common(1)
        carried = tuple(sorted(Counter(kinds).items()))
        found[carried, seen[carried]] = stream
        seen[carried] += 1
    return found


def _together(first: _Stream, other: _Stream, apart_ns: int) -> bool:
    """Do the two issue the same in most steps, and does it end at the same time?"""
    alike = _alike(first, other)
    if not alike or len(alike) < _ALIKE * len(first.kinds.keys() & other.kinds.keys()):
        return False
    apart = _later_each_ns(first, other, alike)
    if len(apart) == 0:
        return True  # messages only
    return bool(np.mean(np.abs(apart - np.median(apart)) <= apart_ns) >= _MOST)


def _assigned(
    rank: int, streams: Sequence[_Stream], found: Mapping[_Slot, Sequence[tuple[int, ...]]]
) -> dict[int, tuple[int, ...]]:
    """Stream -> the ranks of its group."""
    return {
        stream.number: next(members for members in found[slot] if rank in members)
        for slot, stream in _slots(streams).items()
    }


def _of_all(partial: RankPartial, size: int) -> RankPartial:
    world = Group(name=WORLD, ranks=tuple(range(size)), size=size)
    groups = tuple(
        world if group == UNKNOWN_GROUP else replace(world, name=group.name, description=group.description)
        for group in partial.collectives.groups
    )
    return replace(partial, world_size=size, collectives=replace(partial.collectives, groups=groups))


def _across(found: Collection[Sequence[tuple[int, ...]]], ranks: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Rank -> those that it exchanges messages with: the ranks with the same place in their groups, which are as many
    for all, as the stages of one pipeline have the same place among the ranks that share a stage; else all.

    Example: 0 and 1, 2 and 3, 4 and 5 reduce gradients together; 0, 2 and 4 are one pipeline, 1, 3 and 5 another.
    """
    places: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    for members in {group for of_slot in found for group in of_slot}:
        for place, rank in enumerate(members):
            places[rank].add((members[1] - members[0], place))  # groups of one kind hold every n-th rank
    alike: defaultdict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for rank in ranks:
        alike[tuple(sorted(places[rank]))].append(rank)
    sizes = {len(each) for each in alike.values()}
    whole = [tuple(ranks)] if len(sizes) > 1 or sizes == {1} else [tuple(each) for each in alike.values()]
    return {rank: members for members in whole for rank in members}


def _of_groups(
    partial: RankPartial, assigned: Mapping[int, tuple[int, ...]], messages: tuple[int, ...], size: int
) -> RankPartial:
    """Each stream's collectives in the group of its own; messages in that of the ranks ``messages``."""
    own, world = partial.collectives, tuple(range(size))
    members = [assigned.get(stream, messages) for stream in own.stream.tolist()]
    every = list(dict.fromkeys(members))
    groups = tuple(Group(name=WORLD if each == world else "ranks", ranks=each, size=len(each)) for each in every)
    group = np.array([every.index(each) for each in members], dtype=np.int32)
    return replace(partial, world_size=size, collectives=replace(own, groups=groups, group=group))
