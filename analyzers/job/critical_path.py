"""The critical path: the chain of dependent work that fixes the job's step time.

Walked back from the end of the step on the rank that ends it last: along that rank's own timeline, and through every
wait to the rank that was waited for, at the moment of its arrival. Its segments add up to the step exactly.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NONE, Int8, Int64

_CATEGORIES: Final = tuple(TimeCategory)

Segments = dict[tuple[int, TimeCategory], int]
"""(rank, category) -> ns on the path."""


class PathSegment(NamedTuple):
    """One part of the path, on one rank in one category; aligned ns."""

    rank: int
    row: TimeCategory
    start_ns: int
    end_ns: int


class _PathRun(NamedTuple):
    """Parts of the path that follow each other on one rank, without a wait between them, the earliest first.

    Each ends where the next one begins, the last one at ``end_ns``; aligned ns, categories as their numbers.
    """

    rank: int
    category: Int8
    start_ns: Int64
    end_ns: int

    @property
    def ends_ns(self) -> Int64:
        """Where each part ends."""
        return np.append(self.start_ns[1:], self.end_ns)


def critical_path(result: AlignedJob, start_ns: int, end_ns: int, last_rank: int) -> Segments:
    """The path through the aligned window ``[start_ns, end_ns)``, from ``last_rank``'s end back to its start.

    The segments add up to ``end_ns - start_ns``. Ranks do not begin a recording together: what a rank did before it is
    not known, so ``last_rank`` goes on waiting there, and nobody is charged with it.
    """
    segments: Segments = {}
    for part in _parts(result, start_ns, end_ns, last_rank):
        if isinstance(part, PathSegment):
            rank, row, begin, end = part
            segments[rank, row] = segments.get((rank, row), 0) + end - begin
        else:
            lengths = np.bincount(part.category, part.ends_ns - part.start_ns).tolist()
            for category in dict.fromkeys(reversed(part.category.tolist())):  # in the order of the path
                key = part.rank, _CATEGORIES[category]
                segments[key] = segments.get(key, 0) + int(lengths[category])
    return segments


def walk(result: AlignedJob, start_ns: int, end_ns: int, last_rank: int) -> Iterator[PathSegment]:
    """The segments of ``critical_path``, the last one first; each begins where the next one yielded ends."""
    for part in _parts(result, start_ns, end_ns, last_rank):
        if isinstance(part, PathSegment):
            yield part
        else:
            columns = (part.category, part.start_ns, part.ends_ns)
            for category, begin, end in zip(*(column[::-1].tolist() for column in columns), strict=True):
                yield PathSegment(part.rank, _CATEGORIES[category], begin, end)


def _parts(result: AlignedJob, start_ns: int, end_ns: int, last_rank: int) -> Iterator[PathSegment | _PathRun]:
    """The path in segments, and in runs of segments where the clock tells every moment from the others."""
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
        elif (first := side.first_of_run(index, start_ns, now)) is not None:
            run = side.run(first, index, start_ns, now)
            yield run
            now = int(run.start_ns[0])
            continue
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
        self._rank = rank
        timeline = self._timeline = result.timelines[rank]
        self.clock = result.clocks.of_rank(rank)
        self.start_ns = timeline.start_ns.data
        self.category = timeline.category.data
        self.end_ns = int(timeline.end_ns)
        self.waits = _Waits(rank, result.matched)
        aligned_ns = self._aligned_ns = result.clocks.to_common(rank, timeline.start_ns)
        self._starts_ns = aligned_ns.data
        self._waits_at = np.flatnonzero(timeline.category == int(TimeCategory.COMM_WAIT)).data
        self._is_exact = bool(
            (np.diff(aligned_ns) > 0).all()
            and np.array_equal(result.clocks.to_own(rank, aligned_ns), timeline.start_ns)
        )
        """Does the walk, which goes to and fro between clocks, come from each stretch to the one before?"""

    def stretch_before(self, own_ns: int) -> int:
        """The stretch that holds the moment before one on the rank's own clock; -1 before the first."""
        return bisect_left(self.start_ns, own_ns) - 1

    def first_of_run(self, index: int, start_ns: int, now: int) -> int | None:
        """The first stretch of the run whose last one, at ``index``, holds the aligned moment before ``now``.

        A run begins after the rank's last wait, or where the path does; None for a wait, and where moments are not told
        from each other.
        """
        if not self._is_exact or self.category[index] == TimeCategory.COMM_WAIT or self._starts_ns[index] >= now:
            return None
        waits = bisect_left(self._waits_at, index)
        after_wait = self._waits_at[waits - 1] + 1 if waits else 0
        return max(after_wait, min(bisect_right(self._starts_ns, start_ns) - 1, index))

    def run(self, first: int, index: int, start_ns: int, now: int) -> _PathRun:
        """Those stretches, the first one from ``start_ns`` on, the last one until ``now``."""
        part = slice(first, index + 1)
        return _PathRun(self._rank, self._timeline.category[part], np.maximum(self._aligned_ns[part], start_ns), now)

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
