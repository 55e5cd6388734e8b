"""Sends and recvs of all ranks paired up: by the peers that they name, else by when they end.

The k-th message that a rank sent to another in a step is the k-th that the other received from it. A kernel may carry
several messages, to and from several ranks; kernels that share a message, directly or through others, cannot end
without each other, and are one exchange.

Where the recording does not name the peer, the times of the kernels do: the two kernels of a message end together.
Within a group each is paired with the one on another rank that ends nearest to it, where that one's nearest is it as
well, both ran at one time and neither direction nor size speaks against it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from perfscope.analyzers.job.blocks import Blocks
from perfscope.analyzers.job.collectives.unmatched import MessagePairs, Mismatch, UnmatchedOps
from perfscope.frozen import dataclass
from perfscope.trace.clock import Clocks
from perfscope.trace.distinct import distinct
from perfscope.trace.rhythm import OpenEnds
from perfscope.trace.trace import NONE, Bool, Int64

_NEIGHBOURS: Final = 12
"""Kernels of a group that end next after one, among which its partner is sought."""

_APART_NS: Final = 50_000
_APART_SHARE: Final = 0.2
"""Ends of one message lie less than this apart, or less than this share of the shorter of the two."""

_MOSTLY: Final = 0.5
"""From this share of a group's messages between neighbours on, all are."""

_APART: Final = 1 << 60
"""Further apart than any two ends."""


def pair_messages(ops: UnmatchedOps) -> tuple[MessagePairs, tuple[Mismatch, ...]]:
    """Pair up the ends of messages by group, sender, receiver, step and order; what does not pair is a mismatch."""
    ends = ops.messages
    named = (ends.source != NONE) & (ends.destination != NONE)
    step = ops.step[ends.op]
    group = ops.group[ends.op]
    runs = Blocks.of(~named, group, ends.source, ends.destination, step, ~ends.sent)
    position = runs.positions()
    ways = Blocks.of(~named, group, ends.source, ends.destination, step, position)
    both = np.flatnonzero((ways.size == 2) & named[ways.order[ways.first]])
    # Of two ends with one key the sent one comes first only if its rank is lower: look which it is.
    one, other = ways.order[ways.first[both]], ways.order[ways.first[both] + 1]
    sent, received = np.where(ends.sent[one], one, other), np.where(ends.sent[one], other, one)
    fits = (ends.bytes[sent] == ends.bytes[received]) | (ends.bytes[sent] == NONE) | (ends.bytes[received] == NONE)
    mismatches = (*_unequal(ops, runs, named), *_unlike(ops, sent[~fits], received[~fits]))
    sent, received = sent[fits], received[fits]
    size = np.maximum(ends.bytes[sent], ends.bytes[received])
    return MessagePairs(ends.op[sent], ends.op[received], size), mismatches


def _unequal(ops: UnmatchedOps, runs: Blocks, named: Bool) -> Iterator[Mismatch]:
    """More messages sent than received, or fewer, where both ranks are in the recording."""
    ends = ops.messages
    recorded = np.array(list(ops.recorded), dtype=np.int64)
    first = runs.order[runs.first]
    known = named[first] & np.isin(ends.source[first], recorded) & np.isin(ends.destination[first], recorded)
    first, count = first[known], runs.size[known]
    step, group = ops.step[ends.op[first]], ops.group[ends.op[first]]
    ways = Blocks.of(group, ends.source[first], ends.destination[first], step)
    sent = np.bincount(ways.labels(), weights=count * ends.sent[first], minlength=len(ways)).astype(np.int64)
    received = np.bincount(ways.labels(), weights=count * ~ends.sent[first], minlength=len(ways)).astype(np.int64)
    for way in np.flatnonzero(sent != received).tolist():
        end = first[ways.order[ways.first[way]]]
        source, destination = int(ends.source[end]), int(ends.destination[end])
        yield ops.mismatch(
            ends.op[end],
            f"rank {source} sent {sent[way]} messages to rank {destination}, which received {received[way]}",
            (source, destination),
        )


def _unlike(ops: UnmatchedOps, sent: Int64, received: Int64) -> Iterator[Mismatch]:
    """One sentence for each step and pair of ranks whose messages differ in size."""
    ends = ops.messages
    ways = Blocks.of(ends.source[sent], ends.destination[sent], ops.step[ends.op[sent]])
    for way in range(len(ways)):
        place = ways.order[ways.first[way]]
        out, back = sent[place], received[place]
        source, destination = int(ends.source[out]), int(ends.destination[out])
        more = f", and {ways.size[way] - 1} more" if ways.size[way] > 1 else ""
        yield ops.mismatch(
            ends.op[out],
            f"rank {source} sent {ends.bytes[out]} bytes to rank {destination}, which received "
            f"{ends.bytes[back]}{more}",
            (source, destination),
        )


def exchanges(ops: UnmatchedOps, rows: Int64, pairs: MessagePairs) -> tuple[Int64, Bool]:
    """The exchanges that ``rows`` (rank ops that are point to point) and the ``pairs`` between them make up.

    Returns the number of each row's exchange, from 0, and which pairs lie within one.

    A rank takes part in an exchange once: its kernels run one after another, so that none waits for a later one. Where
    a chain of messages comes back to a rank, some message in it lay in a buffer meanwhile: not the largest ones.
    """
    place = np.full(len(ops), NONE, dtype=np.int64)
    place[rows] = np.arange(len(rows))
    sender, receiver = place[pairs.sender], place[pairs.receiver]
    label = _components(len(rows), sender, receiver)
    owners = Blocks.of(label, ops.rank[rows])
    twice = distinct(label[owners.order[owners.first[owners.size > 1]]])
    bound = np.ones(len(pairs), dtype=np.bool_)
    if len(twice):
        doubtful = np.flatnonzero(np.isin(label[sender], twice))
        doubtful = doubtful[np.argsort(-pairs.bytes[doubtful], kind="stable")]
        bound[doubtful] = _without_return(ops.rank[rows], sender[doubtful], receiver[doubtful])
        label = _components(len(rows), sender[bound], receiver[bound])
    return np.unique(label, return_inverse=True)[1].astype(np.int64), bound


def _components(size: int, one: Int64, other: Int64) -> Int64:
    """The lowest of the places that each of ``size`` places is connected with."""
    label = np.arange(size)
    while True:
        before = label.copy()
        low = np.minimum(label[one], label[other])
        np.minimum.at(label, one, low)
        np.minimum.at(label, other, low)
        label = label[label]
        if np.array_equal(label, before):
            return label


def _without_return(rank: Int64, one: Int64, other: Int64) -> Bool:
    """Which connections can stay, taken in their order, so that no rank is connected with itself."""
    chain_of: dict[int, set[int]] = {}
    stays = np.zeros(len(one), dtype=np.bool_)
    for index, (left, right) in enumerate(zip(one.tolist(), other.tolist(), strict=True)):
        chains = chain_of.setdefault(left, {left}), chain_of.setdefault(right, {right})
        if chains[0] is chains[1]:
            stays[index] = True
        elif {int(rank[place]) for place in chains[0]}.isdisjoint(int(rank[place]) for place in chains[1]):
            stays[index] = True
            chains[0].update(chains[1])
            for place in chains[1]:
                chain_of[place] = chains[0]
    return stays


def silent_rows(ops: UnmatchedOps) -> Int64:
    """Rank ops that are point to point and do not name their peer, in groups of more than two ranks.

    Kernels for sends and recvs without any metadata may be all-to-alls: where all ranks of a group have equally many
    in every step, they are taken for that.
    """
    ends = ops.messages
    open_ = np.zeros(len(ops), dtype=np.bool_)
    open_[ends.op[(ends.source == NONE) | (ends.destination == NONE)]] = True
    mute = ops.one_way.copy()
    mute[ends.op] = False
    rows = np.flatnonzero(mute)
    runs = Blocks.of(ops.group[rows], ops.step[rows], ops.rank[rows])
    first = rows[runs.order[runs.first]]
    steps = Blocks.of(ops.group[first], ops.step[first])
    sizes = runs.size[steps.order]
    even = (
        np.minimum.reduceat(sizes, steps.first) == np.maximum.reduceat(sizes, steps.first) if len(rows) else sizes > 0
    )
    uneven_groups = distinct(ops.group[first[steps.order[steps.first]]][~even])
    open_[rows] = np.isin(ops.group[rows], uneven_groups)
    return np.flatnonzero(open_ & (ops.expected[ops.group] > 2))


def open_ends(ops: UnmatchedOps, rows: Int64) -> OpenEnds:
    """Those of ``rows`` on devices, whose kernels end together, in groups whose ranks are known."""
    known = np.array([len(group.ranks) > 0 for group in ops.groups] or [False], dtype=np.bool_)
    rows = rows[known[ops.group[rows]] & ~ops.on_host[rows]]
    return OpenEnds(
        rank=ops.rank[rows],
        group=ops.group[rows],
        place=_places(ops, rows),
        step=ops.step[rows],
        way=_ways(ops)[rows],
        bytes=ops.bytes[rows],
        end_ns=ops.end_ns[rows],
    )


def unpaired_rows(ops: UnmatchedOps, rows: Int64, pairs: MessagePairs) -> Int64:
    """Those of ``rows`` that carry more messages than were paired up."""
    met = np.bincount(pairs.sender, minlength=len(ops)) + np.bincount(pairs.receiver, minlength=len(ops))
    ends = np.maximum(np.bincount(ops.messages.op, minlength=len(ops)), 1)
    return rows[(met < ends)[rows]]


def _ways(ops: UnmatchedOps) -> Int64:
    """Of each rank op: 1 for a send, -1 for a recv, 0 for both, or where that is not known."""
    way = np.zeros(len(ops), dtype=np.int64)
    np.add.at(way, ops.messages.op, np.where(ops.messages.sent, 1, -1))
    return np.sign(way)


def infer_pairs(ops: UnmatchedOps, rows: Int64, clocks: Clocks) -> MessagePairs:
    """Pair up the messages of ``rows``, or kernels without any, by the kernels' ends."""
    ends = ops.messages
    named = (ends.source != NONE) & (ends.destination != NONE)
    told = np.flatnonzero(np.isin(ends.op, rows) & ~named)
    mute = np.setdiff1d(rows, ends.op)
    row = np.append(ends.op[told], mute)
    way = np.append(np.where(ends.sent[told], 1, -1), np.zeros(len(mute), dtype=np.int64))
    size = np.append(ends.bytes[told], ops.bytes[mute])
    start = clocks.to_common(ops.rank[row], ops.start_ns[row])
    end = clocks.to_common(ops.rank[row], ops.end_ns[row])
    order = np.lexsort((end, ops.group[row]))
    found = _Kernels(
        row=row[order],
        rank=ops.rank[row[order]],
        group=ops.group[row[order]],
        start_ns=start[order],
        end_ns=end[order],
        way=way[order],
        bytes=size[order],
        place=_places(ops, row[order]),
        cluster=clocks.cluster[np.searchsorted(clocks.ranks, ops.rank[row[order]])],
    )
    pairs = [_candidates(found, distance) for distance in range(1, min(_NEIGHBOURS, len(row)))]
    one, other = (np.concatenate([pair[side] for pair in pairs] or [np.empty(0, np.int64)]) for side in (0, 1))
    apart = np.abs(found.end_ns[one] - found.end_ns[other])
    near = _next_to_each_other(ops, found, one, other)
    taken = _nearest(one, other, np.where(near, apart, apart + _APART), len(row))
    taken = taken[near[taken] | ~np.isin(found.group[one[taken]], _of_neighbours(found.group[one[taken]], near[taken]))]
    one, other = one[taken], other[taken]
    # Without a direction the earlier one is as good a sender as the other.
    forward = found.way[one] >= found.way[other]
    sender, receiver = np.where(forward, one, other), np.where(forward, other, one)
    return MessagePairs(found.row[sender], found.row[receiver], np.maximum(found.bytes[sender], found.bytes[receiver]))


@dataclass(frozen=True, eq=False)
class _Kernels:
    """Messages whose peers are sought, as their kernels recorded them, by group and end: parallel arrays.

    ``way`` is 1 for a send, -1 for a recv, 0 where not known; ``place`` that of the rank in its group (NONE: not
    known); ``cluster`` that of its clock.
    """

    row: Int64
    rank: Int64
    group: Int64
    start_ns: Int64
    end_ns: Int64
    way: Int64
    bytes: Int64
    place: Int64
    cluster: Int64


def _places(ops: UnmatchedOps, rows: Int64) -> Int64:
    """Of each rank op the place of its rank in its group; NONE where the group's ranks are not known."""
    places = [{rank: place for place, rank in enumerate(group.ranks)} for group in ops.groups]
    of = zip(ops.group[rows].tolist(), ops.rank[rows].tolist(), strict=True)
    return np.array([places[group].get(rank, NONE) for group, rank in of], dtype=np.int64)


def _next_to_each_other(ops: UnmatchedOps, found: _Kernels, one: Int64, other: Int64) -> Bool:
    """Which two are of ranks that are neighbours in their group, whose last one is the first one's as well."""
    apart = np.abs(found.place[one] - found.place[other])
    known = (found.place[one] != NONE) & (found.place[other] != NONE)
    return np.asarray(~known | (apart == 1) | (apart == ops.expected[found.group[one]] - 1))


def _of_neighbours(group: Int64, near: Bool) -> Int64:
    """Groups most of whose messages are between neighbours, as a pipeline's: others end together by chance."""
    share = np.bincount(group, weights=near) / np.maximum(np.bincount(group), 1)
    return np.flatnonzero(share > _MOSTLY)


def _candidates(found: _Kernels, distance: int) -> tuple[Int64, Int64]:
    """Places of messages ``distance`` apart in the order of their ends that may be the two ends of one."""
    one = np.arange(len(found.row) - distance)
    other = one + distance
    start, end, size = found.start_ns, found.end_ns, found.bytes
    shorter = np.minimum(end[one] - start[one], end[other] - start[other])
    fits = (
        (found.group[one] == found.group[other])
        & (found.rank[one] != found.rank[other])
        & (found.cluster[one] == found.cluster[other])
        & (found.way[one] * found.way[other] <= 0)
        & ((size[one] == size[other]) | (size[one] == NONE) | (size[other] == NONE))
        & (np.maximum(start[one], start[other]) < end[one])
        & (end[other] - end[one] <= np.maximum(_APART_NS, _APART_SHARE * shorter))
    )
    return one[fits], other[fits]


def _nearest(one: Int64, other: Int64, apart: Int64, size: int) -> Int64:
    """Pairs of which each is the nearest of the other, then the same among what is left, until nothing is."""
    free = np.ones(size, dtype=np.bool_)
    taken: list[Int64] = []
    left = np.argsort(apart, kind="stable")
    while len(left):
        first = np.full(size, len(left), dtype=np.int64)
        for side in (one, other):
            np.minimum.at(first, side[left], np.arange(len(left)))
        place = np.arange(len(left))
        best = left[(first[one[left]] == place) & (first[other[left]] == place)]
        taken.append(best)
        free[one[best]] = free[other[best]] = False
        left = left[free[one[left]] & free[other[left]]]
    return np.concatenate(taken or [np.empty(0, dtype=np.int64)])
