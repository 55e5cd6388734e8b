"""Sends and receipts of which nothing says between which ranks they pass: paired up by when they end.

The two kernels of a message end together. Within a group each is paired with the one on another rank that ends nearest
to it, where that one's nearest is it as well, both ran at one time and neither direction nor size speaks against it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.blocks import Blocks
from perfscope.analyzers.collectives.participations import Participations
from perfscope.analyzers.collectives.point_to_point import Pairs
from perfscope.clock import Clocks
from perfscope.trace import NONE, Int64

_NEIGHBOURS: Final = 8
"""Kernels of a group that end next after one, among which its partner is sought."""

_APART_NS: Final = 50_000
_APART_SHARE: Final = 0.2
"""Ends of one message lie less than this apart, or less than this share of the shorter of the two."""


def silent_rows(parts: Participations) -> Int64:
    """Participations that are point to point, and do not say with whom, in groups of more than two ranks.

    Kernels for sends and receipts that say nothing at all may be all-to-alls: where all ranks of a group have equally
    many in every step, that is what they are taken for.
    """
    ends = parts.messages
    open_ = np.zeros(len(parts), dtype=np.bool_)
    open_[ends.part[(ends.source == NONE) | (ends.destination == NONE)]] = True
    mute = parts.one_way.copy()
    mute[ends.part] = False
    rows = np.flatnonzero(mute)
    runs = Blocks.of(parts.group[rows], parts.step[rows], parts.rank[rows])
    first = rows[runs.order[runs.first]]
    steps = Blocks.of(parts.group[first], parts.step[first])
    sizes = runs.size[steps.order]
    even = (
        np.minimum.reduceat(sizes, steps.first) == np.maximum.reduceat(sizes, steps.first) if len(rows) else sizes > 0
    )
    uneven_groups = np.unique(parts.group[first[steps.order[steps.first]]][~even])
    open_[rows] = np.isin(parts.group[rows], uneven_groups)
    return np.flatnonzero(open_ & (parts.expected[parts.group] > 2))


def infer_pairs(parts: Participations, rows: Int64, clocks: Clocks) -> Pairs:
    """Pair up ``rows`` by their ends."""
    way = np.zeros(len(parts), dtype=np.int64)
    way[parts.messages.part] = np.where(parts.messages.sent, 1, -1)
    start = clocks.to_common(parts.rank[rows], parts.start_ns[rows])
    end = clocks.to_common(parts.rank[rows], parts.end_ns[rows])
    order = np.lexsort((end, parts.group[rows]))
    rows, start, end = rows[order], start[order], end[order]
    pairs = [
        _candidates(parts, rows, start, end, way[rows], distance) for distance in range(1, min(_NEIGHBOURS, len(rows)))
    ]
    one, other = (np.concatenate([pair[side] for pair in pairs] or [np.empty(0, np.int64)]) for side in (0, 1))
    taken = _nearest(one, other, np.abs(end[one] - end[other]), len(rows))
    one, other = one[taken], other[taken]
    # Without a direction the earlier one is as good a sender as the other.
    forward = way[rows[one]] >= way[rows[other]]
    sender, receiver = np.where(forward, one, other), np.where(forward, other, one)
    size = np.maximum(parts.bytes[rows[sender]], parts.bytes[rows[receiver]])
    return Pairs(rows[sender], rows[receiver], size)


def _candidates(
    parts: Participations, rows: Int64, start: Int64, end: Int64, way: Int64, distance: int
) -> tuple[Int64, Int64]:
    """Places of kernels ``distance`` apart in the order of their ends that may be the two ends of one message."""
    one = np.arange(len(rows) - distance)
    other = one + distance
    left, right = rows[one], rows[other]
    size = parts.bytes[left], parts.bytes[right]
    shorter = np.minimum(end[one] - start[one], end[other] - start[other])
    fits = (
        (parts.group[left] == parts.group[right])
        & (parts.rank[left] != parts.rank[right])
        & (way[one] * way[other] <= 0)
        & ((size[0] == size[1]) | (size[0] == NONE) | (size[1] == NONE))
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
