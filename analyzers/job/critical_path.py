"""The critical path: the chain of dependent work that fixes the job's step time.

Walked back from the end of the step on the rank that ends it last: along that rank's own timeline, and through every
wait to the rank that was waited for, at the moment of its arrival. Its segments add up to the step exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.analyzers.rank.timeline import Timeline
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NONE

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
    timelines, clocks = result.timelines, result.clocks
    waits = {rank: _Waits(rank, result.matched) for rank in result.partials}
    rank, now = last_rank, end_ns
    while now > start_ns:
        timeline = timelines[rank]
        own = clocks.to_own(rank, now)
        index = int(np.searchsorted(timeline.start_ns, own, side="left")) - 1
        if index < 0 and rank != last_rank:
            rank = last_rank
            continue
        if index < 0:
            begin, row = start_ns, TimeCategory.HOST
        elif own > timeline.end_ns:
            begin, row = clocks.to_common(rank, timeline.end_ns), TimeCategory.HOST
        else:
            begin, row = (
                clocks.to_common(rank, int(timeline.start_ns[index])),
                TimeCategory(int(timeline.category[index])),
            )
        # On a fast clock two moments may have one timestamp: the path goes back by 1 ns at least.
        begin = max(min(begin, now - 1), start_ns)
        if row is TimeCategory.COMM_WAIT:
            last = waits[rank].last_arriver_at(now)
            if last != NONE and last != rank and clocks.to_own(last, now) > timelines[last].start_ns[0]:
                # This rank waited here: the path goes on at what the other one did until now.
                rank = last
                if _is_waiting_before(clocks.to_own(rank, now), timelines[rank]):
                    # Both wait (for a third, or by the clocks' residual): no progress to follow, so it stays here.
                    yield PathSegment(rank, row, begin, now)
                    now = begin
                continue
        yield PathSegment(rank, row, begin, now)
        now = begin


class _Waits:
    """The waits of one rank, to be looked up by time (aligned ns)."""

    def __init__(self, rank: int, matched: MatchedCollectives) -> None:
        lines = np.flatnonzero((matched.rank == rank) & (matched.wait_ns > 0))
        order = np.argsort(matched.last_arrival_ns[lines], kind="stable")
        lines = lines[order]
        self._start = matched.start_ns[lines]
        self._until = matched.last_arrival_ns[lines]
        self._last = matched.instances.last_rank[matched.instance[lines]]

    def last_arriver_at(self, now: int) -> int:
        """The rank waited for in the wait that holds the moment before ``now``; NONE when not known."""
        index = int(np.searchsorted(self._until, now, side="left"))
        if index < len(self._until) and self._start[index] < now:
            return int(self._last[index])
        return NONE


def _is_waiting_before(own_ns: int, timeline: Timeline) -> bool:
    """Was a rank waiting just before this moment of its own clock?"""
    index = int(np.searchsorted(timeline.start_ns, own_ns, side="left")) - 1
    return index >= 0 and timeline.category[index] == TimeCategory.COMM_WAIT
