"""Traces of one folder that are of several jobs: told apart by what is in them, where no name says it.

Ranks of one job agree on its size, and their collectives run at the same times. Two traces of one rank that were
recorded at the same time, by different processes, are of two jobs; which ranks belong to which of them shows in whose
collectives overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.grouping import grouped
from perfscope.recording.job import TraceSource

Read = tuple[TraceSource, RankPartial]
"""A trace that was read, and its analysis."""

_SAME: Final = 0.2
"""Ranks are of one job if their collectives share this part of the shorter one's time."""


def jobs_apart(read: Sequence[Read]) -> list[list[Read]]:
    """The traces by job, the job with most ranks first; one where nothing shows that there are several.

    Only traces that were recorded at the same time count as further jobs: what was recorded at another time may be
    another capture of the same job.
    """
    by_size = grouped((partial.world_size, (source, partial)) for source, partial in read)
    unknown = by_size.pop(None, [])
    jobs = [job for mine in by_size.values() for job in _by_collectives(mine)]
    jobs.sort(key=lambda job: (-len(job), -(job[0][1].world_size or 0)))
    if not jobs:
        return [list(read)]
    jobs[0] += unknown
    first, others = jobs[0], jobs[1:]
    beside = [job for job in others if _overlap(job, first)]
    return [[each for job in jobs if job not in beside for each in job], *beside]


def _by_collectives(read: Sequence[Read]) -> list[list[Read]]:
    """Traces of one size: as many jobs as one rank has traces of the same time."""
    by_rank = grouped((_rank(each), each) for each in read)
    jobs: list[list[Read]] = []
    for rank in sorted(by_rank, key=lambda rank: (-len(by_rank[rank]), -1 if rank is None else rank)):
        mine = by_rank[rank]
        at_once = rank is not None and len(mine) > 1 and _at_once(mine)
        if not jobs:
            jobs = [[each] for each in mine] if at_once else [list(mine)]
            continue
        for each in mine:
            free = [job for job in jobs if not at_once or all(_rank(other) != rank for other in job)] or jobs
            max(free, key=lambda job: _shared(job[0], each)).append(each)
    return jobs


def _rank(read: Read) -> int | None:
    source, partial = read
    return partial.rank if partial.rank is not None else source.named_rank


def _at_once(read: Sequence[Read]) -> bool:
    """Were these traces recorded at the same time, by different processes?"""
    processes = [partial.processes for _, partial in read]
    if any(not mine for mine in processes) or len(set(processes)) < len(processes):
        return False
    starts, ends = zip(*(_span(each) for each in read), strict=True)
    return bool(max(starts) < min(ends))


def _span(read: Read) -> tuple[int, int]:
    timeline = read[1].timeline
    return (int(timeline.start_ns[0]), int(timeline.end_ns)) if len(timeline) else (0, 0)


def _overlap(job: Sequence[Read], other: Sequence[Read]) -> bool:
    one, two = ([_span(each) for each in side] for side in (job, other))
    return max(min(each)[0] for each in (one, two)) < min(max(end for _, end in each) for each in (one, two))


def share_time(one: Read, other: Read) -> bool:
    """Do the collectives of the two run at the same times?"""
    return _shared(one, other) >= _SAME


def _shared(one: Read, other: Read) -> float:
    """The part of the shorter one's collectives' time in which the other one's run."""
    first, second = (Intervals.of(each[1].collectives.start_ns, each[1].collectives.end_ns) for each in (one, other))
    shorter = min(first.measure(), second.measure())
    share = first.intersect(second).measure() / shorter if shorter else 0.0
    return share if share >= _SAME else np.finfo(float).eps * share
