"""The critical path: the chain of dependent work that fixes the job's step time.

Walked back from the end of the step on the rank that ends it last: along that rank's own account, and through every
wait to the rank that was waited for, at the moment it arrived. Its segments add up to the step exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from perfscope.analyzers.collectives.matching import Matched
from perfscope.analyzers.rank import RankPartial
from perfscope.analyzers.timeline import Row, Timeline
from perfscope.clock import Clocks
from perfscope.trace import NONE

Segments = dict[tuple[int, Row], int]
"""(rank, row) -> ns on the path."""


def critical_path(
    partials: Mapping[int, RankPartial],
    timelines: Mapping[int, Timeline],
    matched: Matched,
    clocks: Clocks,
    start_ns: int,
    end_ns: int,
    last_rank: int,
) -> Segments:
    """The path through the aligned window ``[start_ns, end_ns)``, from ``last_rank``'s end back to its start.

    The segments add up to ``end_ns - start_ns``. Where the path leaves a rank's own windows (ranks start a step at
    slightly different moments), that stretch is the rank's host time.
    """
    waits = {rank: _Waits(rank, matched) for rank in partials}
    segments: Segments = {}
    rank, now = last_rank, end_ns
    while now > start_ns:
        timeline, offset = timelines[rank], clocks.offset_of(rank)
        own = now - offset
        index = int(np.searchsorted(timeline.start_ns, own, side="left")) - 1
        if index < 0 or own > timeline.end_ns:
            begin, row = (start_ns if index < 0 else max(timeline.end_ns + offset, start_ns)), Row.HOST
        else:
            begin, row = max(int(timeline.start_ns[index]) + offset, start_ns), Row(int(timeline.row[index]))
        if row is Row.COMM_WAIT:
            last = waits[rank].last_arriver_at(now)
            if last != NONE and last != rank:
                # This rank waited here: what it waited for is what the other one did until now.
                rank = last
                if waits[rank].is_waiting_at(now, timelines[rank], clocks.offset_of(rank)):
                    # Both wait (for a third, or by the clocks' residual): no progress to follow, so it stays here.
                    segments[rank, row] = segments.get((rank, row), 0) + now - begin
                    now = begin
                continue
        segments[rank, row] = segments.get((rank, row), 0) + now - begin
        now = begin
    return segments


class _Waits:
    """The waits of one rank, to be looked up by time (aligned ns)."""

    def __init__(self, rank: int, matched: Matched) -> None:
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

    def is_waiting_at(self, now: int, timeline: Timeline, offset: int) -> bool:
        """Was this rank's account in a wait just before ``now``?"""
        index = int(np.searchsorted(timeline.start_ns, now - offset, side="left")) - 1
        return index >= 0 and timeline.row[index] == Row.COMM_WAIT
