"""The critical path: the chain of dependent work that fixes the job's step time.

Walked back from the end of the step on the rank that ends it last: along that rank's own timeline, and through every
wait to the rank that was waited for, at the moment of its arrival. Its segments add up to the step exactly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NONE

_CATEGORIES: Final = tuple(TimeCategory)

Segments = dict[tuple[int, TimeCategory], int]
"""(rank, category) -> ns on the path."""


class PathSegment(NamedTuple):
    """One part of the path, on one rank in one category; aligned ns."""

    rank: int
    row: TimeCategory
    start_ns: int
    end_ns: int


def critical_path(result: AlignedJob, start_ns: int, end_ns: int, last_rank: int) -> Segments:
    """The path through the aligned window ``[start_ns, end_ns)``, from ``last_rank``'s end back to its start.

    The segments add up to ``end_ns - start_ns``. Ranks do not begin a recording together: what a rank did before it is
    not known, so ``last_rank`` goes on waiting there, and nobody is charged with it.
    """
    segments: Segments = {}
    for rank, row, begin, end in walk(result, start_ns, end_ns, last_rank):
        segments[rank, row] = segments.get((rank, row), 0) + end - begin
    return segments


def walk(result: AlignedJob, start_ns: int, end_ns: int, last_rank: int) -> Iterator[PathSegment]:
    """The segments of ``critical_path``, the last one first; each begins where the next one yielded ends."""
    sides = _Sides(result)
    rank, now = last_rank, end_ns
    while now > start_ns:
        side = sides[rank]
        own = side.clock.to_own(now)
        index = side.stretch_before(own)
        if index < 0 and rank != last_rank:
            rank = last_rank
            continue
        if index < 0:
            begin, row = start_ns, TimeCategory.HOST
        elif own > side.end_ns:
            begin, row = side.clock.to_common(side.end_ns), TimeCategory.HOST
        else:
            begin, row = side.clock.to_common(side.start_ns[index]), _CATEGORIES[side.category[index]]
        # On a fast clock two moments may have one timestamp: the path goes back by 1 ns at least.
        begin = max(min(begin, now - 1), start_ns)
        if row is TimeCategory.COMM_WAIT:
            last = side.waits.last_arriver_at(now)
            if last != NONE and last != rank and sides[last].clock.to_own(now) > sides[last].start_ns[0]:
                # This rank waited here: the path goes on at what the other one did until now.
                rank = last
                if sides[rank].is_waiting_before(now):
                    # Both wait (for a third, or by the clocks' residual): no progress to follow, so it stays here.
                    yield PathSegment(rank, row, begin, now)
                    now = begin
                continue
        yield PathSegment(rank, row, begin, now)
        now = begin


class _Side:
    """What one rank did, to be looked up moment by moment; views of arrays give Python's numbers at once."""

    def __init__(self, rank: int, result: AlignedJob) -> None:
        timeline = result.timelines[rank]
        self.clock = result.clocks.of_rank(rank)
        self.start_ns = timeline.start_ns.data
        self.category = timeline.category.data
        self.end_ns = int(timeline.end_ns)
        self.waits = _Waits(rank, result.matched)

    def stretch_before(self, own_ns: int) -> int:
        """The stretch that holds the moment before one on the rank's own clock; -1 before the first."""
        return bisect_left(self.start_ns, own_ns) - 1

    def is_waiting_before(self, now: int) -> bool:
        """Was the rank waiting just before this aligned moment?"""
        index = self.stretch_before(self.clock.to_own(now))
        return index >= 0 and self.category[index] == TimeCategory.COMM_WAIT


class _Sides(dict[int, _Side]):
    """Rank to its side, made when the path first comes to it."""

    def __init__(self, result: AlignedJob) -> None:
        super().__init__()
        self._result = result

    def __missing__(self, rank: int) -> _Side:
        side = self[rank] = _Side(rank, self._result)
        return side


class _Waits:
    """The waits of one rank, to be looked up by time (aligned ns)."""

    def __init__(self, rank: int, matched: MatchedCollectives) -> None:
        lines = np.flatnonzero((matched.rank == rank) & (matched.wait_ns > 0))
        order = np.argsort(matched.last_arrival_ns[lines], kind="stable")
        lines = lines[order]
        self._start = matched.start_ns[lines].data
        self._until = matched.last_arrival_ns[lines].data
        self._last = matched.instances.last_rank[matched.instance[lines]].data

    def last_arriver_at(self, now: int) -> int:
        """The rank waited for in the wait that holds the moment before ``now``; NONE when not known."""
        index = bisect_left(self._until, now)
        if index < len(self._until) and self._start[index] < now:
            return self._last[index]
        return NONE
