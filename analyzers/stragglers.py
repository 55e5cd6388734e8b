"""Who made the others wait, why, and how much step time it cost.

The members of a group start over together at every collective for which all of them stood still: none had work left to
do beside it. Between two such moments every member does the same work and then waits for the slowest. So the member
with the most time of its own (all but exposed communication) held the others up, by as much as it exceeds the next
slowest, and the category in which it exceeds its peers' median is the cause.

Example, two ranks between two such moments, all on their own clocks::

    rank 0   compute 30, exposed all-reduce 15 (of which it waits 10)
    rank 1   host pause 10, compute 30, exposed all-reduce 5

Rank 1 took 40 of its own, rank 0 took 30: rank 1 cost the job 10, by its host. That also holds where the wait was
spread over several overlapping collectives, or hid some of their transfers.

A rank that was itself held up in another of its groups does not show up: waiting is no time of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.matching import Matched
from perfscope.analyzers.timeline import Row, Timeline
from perfscope.trace import Bool, Int64

CAUSES: Final = {
    Row.COMPUTE: "compute",
    Row.COPY: "copy",
    Row.DATALOADER: "dataloader",
    Row.SYNC: "sync",
    Row.LAUNCH: "launch",
    Row.HOST: "host",
    Row.DEPENDENCY: "launch",
    Row.UNKNOWN: "host",
}
"""Row of the account that is a rank's own time -> cause as the summary names it."""

_OWN: Final = np.array([int(row) for row in CAUSES])
_EXPOSED: Final = np.array([int(Row.COMM_WAIT), int(Row.COMM_TRANSFER)])

POINT_TO_POINT: Final = ("send", "recv", "send_recv")
"""Kinds whose participants do different work (stages of a pipeline): nothing to compare."""


@dataclass(frozen=True)
class Lateness:
    """What one rank cost the job: ``lost_ns`` in each used step (in the order of the steps), and the main cause.

    ``from_window``: the first step is seen only from its window's start, since no collective before it was recorded.
    """

    rank: int
    lost_ns: Int64
    cause: str
    from_window: bool

    @property
    def mean_ns(self) -> float:
        """Lost per step.

        Ranks do not begin a recording together, and that skew is nobody's fault: what the first step shows from its
        window's start only is incomplete. So a loss in it alone is no evidence, and one that goes on in the later steps
        is taken to be no smaller there than their median.
        """
        if not self.from_window:
            return float(self.lost_ns.mean())
        first, later = float(self.lost_ns[0]), self.lost_ns[1:]
        if len(later) == 0:
            return first
        if not later.any():
            return 0.0
        if first > 0:
            first = max(first, float(np.median(later)))
        return (first + float(later.sum())) / len(self.lost_ns)


@dataclass(frozen=True, eq=False)
class _Segments:
    """The stretches of one group between the moments at which its members started over together.

    ``spent_ns`` is [segment, member, row]: ns of each row of the account; ``step`` is the step of the collective that
    closes each segment.
    """

    members: Int64
    step: Int64
    spent_ns: Int64


def find_lateness(
    timelines: Mapping[int, Timeline], start_ns: Mapping[int, int], matched: Matched, steps: Int64
) -> tuple[Lateness, ...]:
    """Every rank that cost the job anything, the costliest first.

    ``timelines`` are the ranks' accounts on their own clocks, ``start_ns`` where each begins to be compared (its first
    recorded window); ``matched`` may begin with collectives of steps before the first used one. A rank in
    several groups is charged what it cost the one that lost most in that step: it held them all up at once.
    """
    lost: dict[int, Int64] = {}
    causes: dict[int, Int64] = {}
    from_window = not (matched.instances.step < steps[0]).any()
    for segments in _groups(timelines, start_ns, matched):
        for rank, in_step, excess in _charges(segments, steps):
            lost[rank] = np.maximum(lost.get(rank, np.zeros_like(in_step)), in_step)
            causes[rank] = causes.get(rank, np.zeros_like(excess)) + excess
    found = [
        Lateness(rank, in_step, CAUSES[Row(int(_OWN[np.argmax(causes[rank])]))], from_window)
        for rank, in_step in lost.items()
        if in_step.any()
    ]
    return tuple(sorted(found, key=lambda lateness: (-int(lateness.lost_ns.sum()), lateness.rank)))


def _groups(timelines: Mapping[int, Timeline], start_ns: Mapping[int, int], matched: Matched) -> Iterator[_Segments]:
    instances = matched.instances
    excluded = [index for index, kind in enumerate(instances.kinds) if kind in POINT_TO_POINT]
    usable = instances.complete & (instances.participants > 1) & ~np.isin(instances.kind, excluded)
    for group in np.unique(instances.group[usable]):
        numbers = np.flatnonzero(usable & (instances.group == group))
        lines = np.flatnonzero(np.isin(matched.instance, numbers))
        members = np.unique(matched.rank[lines])
        # Lines are ordered by instance, then rank, and every instance is complete: a rectangle.
        own_ends = np.stack(
            [_own_ends(timelines, matched, lines[matched.rank[lines] == rank]) for rank in members], axis=1
        )
        yield _cut(timelines, start_ns, members, instances.step[numbers], own_ends)


def _own_ends(timelines: Mapping[int, Timeline], matched: Matched, lines: Int64) -> Int64:
    """Ends of one rank's collectives on its own clock, inside its timeline."""
    rank = int(matched.rank[lines[0]])
    timeline = timelines[rank]
    offset = matched.offset_of(rank)
    return np.clip(matched.end_ns[lines] - offset, timeline.start_ns[0], timeline.end_ns)


def _cut(
    timelines: Mapping[int, Timeline], start_ns: Mapping[int, int], members: Int64, step: Int64, own_ends: Int64
) -> _Segments:
    """Cut at the collectives at whose end every member stood still; the last of each step counts as one in any case."""
    together = np.ones(len(own_ends), dtype=np.bool_)
    for index, rank in enumerate(members):
        together &= _stands_still(timelines[int(rank)], own_ends[:, index])
    closes_step = np.append(step[1:] != step[:-1], True)
    chosen = np.flatnonzero(together | closes_step)
    first = np.array([[start_ns[int(rank)] for rank in members]], dtype=np.int64)
    edges = np.maximum.accumulate(np.concatenate((first, own_ends[chosen])), axis=0)
    spent = np.stack(
        [timelines[int(rank)].totals(edges[:-1, index], edges[1:, index]) for index, rank in enumerate(members)], axis=1
    )
    return _Segments(members, step[chosen], spent)


def _stands_still(timeline: Timeline, time_ns: Int64) -> Bool:
    """Was the rank in exposed communication just before each time?"""
    index = np.searchsorted(timeline.start_ns, time_ns, side="left") - 1
    return np.isin(timeline.row[np.maximum(index, 0)], _EXPOSED) & (index >= 0)


def _charges(segments: _Segments, steps: Int64) -> Iterator[tuple[int, Int64, Int64]]:
    """For each member: ns lost to it in each step, and ns by which it exceeded its peers in each row of its own."""
    own = segments.spent_ns[:, :, _OWN]
    total = own.sum(axis=2)
    ranked = np.sort(total, axis=1)
    over_next = ranked[:, -1] - ranked[:, -2]
    slowest = total.argmax(axis=1)
    for index, rank in enumerate(segments.members):
        mine = np.flatnonzero((slowest == index) & (over_next > 0) & np.isin(segments.step, steps))
        if len(mine) == 0:
            continue
        in_step = np.zeros(len(steps), dtype=np.int64)
        np.add.at(in_step, np.searchsorted(steps, segments.step[mine]), over_next[mine])
        peers = np.median(np.delete(own[mine], index, axis=1), axis=1)
        yield int(rank), in_step, (own[mine, index] - peers).sum(axis=0).astype(np.int64)
