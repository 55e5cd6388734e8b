"""Ranks that left their own habit: they issued operations of several groups in another order than their peers.

A rank that skips a collective does not stand still. It goes on, by one number behind its peers in that group, until it
waits in another group for ranks that wait for it. Peers issue 64 of their tensor-parallel group before 4 of the world:
a rank that issued 4 after 63 skipped one, if it was in step with them before. Where no peer runs the same program, as
with messages, a rank's own program shows it: each step it issued ``send`` after ``recv``, and now it did not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from perfscope.analyzers.hang.progress import Group, Progress
from perfscope.analyzers.readers.flight import label_rows
from perfscope.trace.trace import Int64

_AGREED: Final = 3
"""Operations in step with the peers, from which that is a habit."""
_PEERS: Final = 2
"""Other ranks that must agree with each other."""


_MOST: Final = 2
"""More that left theirs at once are on their way."""


class _Orders(NamedTuple):
    """Operations of all ranks, each once, in the order of ranks and issue: what came before them.

    An operation is known by what is the same on ranks that run one program: not its group, but what that is for.
    """

    first: dict[int, slice]
    """Rank -> its rows."""
    operation: Int64
    before: Int64
    """The last operation before it of another group, or of the other kind."""


def departed(progress: Progress) -> frozenset[int]:
    """Ranks that alone, of all in a group, issued operations after others than before, where they did not earlier."""
    orders = _orders(progress)
    stages = {frozenset((sender, receiver)) for _, sender, receiver, _ in progress.p2p_rows}
    # Ranks that send to each other are of different stages of a pipeline, and run different programs.
    alike = [group for group in progress.groups if not _any_within(stages, group)]
    found = {rank for group in alike if len(group.ranks) > _PEERS for rank in _departed_of(group, orders)}
    return frozenset(found) if len(found) <= _MOST else frozenset()


def _any_within(pairs: Collection[frozenset[int]], group: Group) -> bool:
    members = frozenset(group.ranks)
    return any(pair <= members for pair in pairs)


def _orders(progress: Progress) -> _Orders:
    roles: dict[tuple[str, str, int, int], int] = {}
    ranks = [rank for rank, dump in progress.dumps.items() if len(dump.group)]
    if not ranks:
        nothing = np.zeros(0, dtype=np.int64)
        return _Orders({}, nothing, nothing)
    streams = []
    for rank in ranks:
        dump = progress.dumps[rank]
        numbers = [roles.setdefault(role, len(roles)) for role in _roles(progress, rank)]
        streams.append(2 * np.array(numbers, dtype=np.int64)[dump.group] + dump.p2p)
    lengths = np.array([len(each) for each in streams])
    owner, stream = np.repeat(np.arange(len(ranks)), lengths), np.concatenate(streams)
    operation = label_rows(stream, np.concatenate([progress.dumps[rank].sequence for rank in ranks]))
    row = np.arange(len(owner))
    begins = np.append(True, (np.diff(stream) != 0) | (np.diff(owner) != 0))
    start = np.maximum.accumulate(np.where(begins, row, 0))
    known = start > np.repeat(np.cumsum(lengths) - lengths, lengths)
    _, once = np.unique(owner * (int(operation.max()) + 1) + operation, return_index=True)
    kept = np.zeros(len(owner), dtype=np.bool_)
    kept[once] = True
    kept &= known
    ends = np.cumsum(np.bincount(owner[kept], minlength=len(ranks))).tolist()
    first = {rank: slice(begin, end) for rank, begin, end in zip(ranks, [0, *ends], ends, strict=False)}
    return _Orders(first, operation[kept], operation[start[kept] - 1])


def _roles(progress: Progress, rank: int) -> Iterator[tuple[str, str, int, int]]:
    """What each group in a rank's dump is for; of several for the same the place among them."""
    seen: Counter[tuple[str, str, int]] = Counter()
    for _, number in sorted(progress.numbers[rank].items()):
        group = progress.groups[number]
        role = (group.backend, group.description, len(group.ranks))
        yield (*role, seen[role])
        seen[role] += 1


def _departed_of(group: Group, orders: _Orders) -> set[int]:
    """The members that were in step with the others, and then were not."""
    members = [rank for rank in group.ranks if rank in orders.first]
    if len(members) <= _PEERS:
        return set()
    rows = np.concatenate([np.arange(len(orders.operation))[orders.first[rank]] for rank in members])
    operation, before = orders.operation[rows], orders.before[rows]
    # Of each operation: how many issued it, and how many of them after the same as most.
    pair = label_rows(before, operation)
    sizes = np.bincount(pair)
    of_pair = np.zeros(len(sizes), dtype=np.int64)
    of_pair[pair] = operation
    most = np.zeros(int(operation.max(initial=0)) + 1, dtype=np.int64)
    np.maximum.at(most, of_pair, sizes)
    agreed = most[operation] >= np.maximum(_PEERS, np.bincount(operation)[operation] - 1)
    alone = agreed & (sizes[pair] < most[operation])
    in_step = agreed & ~alone
    found = set()
    ends = np.cumsum([orders.first[rank].stop - orders.first[rank].start for rank in members]).tolist()
    for rank, begin, end in zip(members, [0, *ends], ends, strict=False):
        departures = np.flatnonzero(alone[begin:end])
        if len(departures) and int(in_step[begin : begin + departures[-1]].sum()) >= _AGREED:
            found.add(rank)
    return found


def left_own_order(progress: Progress, ranks: Collection[int]) -> frozenset[int]:
    """Of ranks that wait for each other those which alone issued, at last, an operation after another than ever before.

    With sizes it shows which of several calls was left out; where these change from step to step, without them.
    """
    for sized in (True, False):
        found = {rank for rank in ranks if rank in progress.dumps and _is_out_of_order(_program(progress, rank, sized))}
        if found and len(found) <= min(_MOST, len(ranks) - 1):
            return frozenset(found)
    return frozenset()


def _program(progress: Progress, rank: int, sized: bool) -> list[Hashable]:
    dump = progress.dumps[rank]
    kinds: list[Hashable] = [kind if sized else (kind.operator, kind.peer) for kind in dump.kinds]
    return [(group, kinds[kind]) for group, kind in zip(dump.group.tolist(), dump.kind.tolist(), strict=True)]


def _is_out_of_order(steps: Sequence[Hashable]) -> bool:
    """Has the last round of a program two steps after each other that never were, though each came often?"""
    together, counts = Counter(pairwise(steps)), Counter(steps)
    for place in range(len(steps) - 1, 0, -1):
        before, step = steps[place - 1], steps[place]
        if together[before, step] > 1 or min(counts[before], counts[step]) <= _AGREED:
            continue
        earlier = [at for at in range(place - 1) if steps[at] == before]
        often = min(len(earlier), sum(each == step for each in steps[:place])) >= _AGREED
        if often and len(steps) - place <= place - 1 - earlier[-1]:
            return True
    return False
