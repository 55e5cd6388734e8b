"""The critical path: the chain of dependent work that fixes the job's step time.

Walked back from the end of the step on the rank that ends it last: along that rank's own account, and through every
wait to the rank that was waited for, at the moment it arrived. Its segments add up to the step exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from perfscope.analyzers.collectives.matching import Matched
from perfscope.analyzers.rank import RankPartial
from perfscope.analyzers.timeline import Row, Timeline
from perfscope.clock import Clocks
from perfscope.trace import NONE

Segments = dict[tuple[int, Row], int]
"""(rank, row) -> ns on the path."""


class Stretch(NamedTuple):
    """A stretch of the path; aligned ns."""

    rank: int
    row: Row
    start_ns: int
    end_ns: int


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
    segments: Segments = {}
    for rank, row, begin, end in walk(partials, timelines, matched, clocks, start_ns, end_ns, last_rank):
        segments[rank, row] = segments.get((rank, row), 0) + end - begin
    return segments


def walk(
    partials: Mapping[int, RankPartial],
    timelines: Mapping[int, Timeline],
    matched: Matched,
    clocks: Clocks,
    start_ns: int,
    end_ns: int,
    last_rank: int,
) -> Iterator[Stretch]:
    """The stretches of ``critical_path``, the last one first; each begins where the one after it ends."""
    waits = {rank: _Waits(rank, matched) for rank in partials}
    rank, now = last_rank, end_ns
    while now > start_ns:
        timeline = timelines[rank]
        own = clocks.to_own(rank, now)
        index = int(np.searchsorted(timeline.start_ns, own, side="left")) - 1
        if index < 0:
            begin, row = start_ns, Row.HOST
        elif own > timeline.end_ns:
            begin, row = clocks.to_common(rank, timeline.end_ns), Row.HOST
        else:
            begin, row = clocks.to_common(rank, int(timeline.start_ns[index])), Row(int(timeline.row[index]))
        # A clock that runs fast may show two moments as one: the path goes back all the same.
        begin = max(min(begin, now - 1), start_ns)
        if row is Row.COMM_WAIT:
            last = waits[rank].last_arriver_at(now)
            if last != NONE and last != rank:
                # This rank waited here: what it waited for is what the other one did until now.
                rank = last
                if _is_waiting_before(clocks.to_own(rank, now), timelines[rank]):
                    # Both wait (for a third, or by the clocks' residual): no progress to follow, so it stays here.
                    yield Stretch(rank, row, begin, now)
                    now = begin
                continue
        yield Stretch(rank, row, begin, now)
        now = begin


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


def _is_waiting_before(own_ns: int, timeline: Timeline) -> bool:
    """Was a rank's account in a wait just before this moment of its own clock?"""
    index = int(np.searchsorted(timeline.start_ns, own_ns, side="left")) - 1
    return index >= 0 and timeline.row[index] == Row.COMM_WAIT
