"""When each role's jobs are busy: from the time breakdowns of their ranks, on the clocks as they were recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import reduce
from typing import Final

from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.frozen import dataclass
from perfscope.recording.roles import kind_of_role, role_in_name
from perfscope.results.categories import TimeCategory

_WORK: Final = (TimeCategory.COMPUTE, TimeCategory.COPY)
_COMMUNICATION: Final = (TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER)
_WAITING: Final = re.compile(r"wait|recv|receive|queue|poll|idle|barrier|fetch|\bget\b", re.IGNORECASE)
"""Names of ranges in which a role waits, though they may name another role: ``wait_for_rollout``."""


@dataclass(frozen=True, eq=False)
class JobActivity:
    """When one job does anything. ``phases`` are the user's own ranges, by name."""

    name: str
    role: str
    start_ns: int
    end_ns: int
    busy: Intervals
    phases: Mapping[str, Intervals]


def job_activity(name: str, role: str, partials: Mapping[int, RankPartial]) -> JobActivity:
    """The activity of one job's ranks together.

    While all its ranks are in communication they transfer: the job is busy. While some are, they wait for one of the
    others: the job is as busy as that one. A job of one rank communicates with others than its own ranks, and waits.
    """
    ranks = list(partials.values())
    communicating = [partial.timeline.where(*_COMMUNICATION) for partial in ranks]
    inside = len(ranks) > 1 or any((partial.world_size or 1) > 1 for partial in ranks)
    transfer = reduce(Intervals.intersect, communicating) if inside else Intervals.empty()
    phases: dict[str, Intervals] = {}
    for partial in ranks:
        for text, intervals in partial.ranges.items():
            phases[text] = phases.get(text, Intervals.empty()).union(intervals)
    working = [intervals for text, intervals in phases.items() if is_work(text)]
    return JobActivity(
        name=name,
        role=role,
        start_ns=min(int(partial.timeline.start_ns[0]) for partial in ranks if len(partial.timeline)),
        end_ns=max(int(partial.timeline.end_ns) for partial in ranks if len(partial.timeline)),
        busy=transfer.union(*(partial.timeline.where(*_WORK) for partial in ranks), *working),
        phases=phases,
    )


def is_work(text: str) -> bool:
    """Does a range's name state a role's work (``generate_sequences``), so that the role is busy inside?"""
    stated = role_in_name(text)
    return bool(stated) and kind_of_role(stated) != "other" and not _WAITING.search(text)


def without_pauses(intervals: Intervals, shorter_than_ns: int) -> Intervals:
    """The intervals with shorter pauses between them closed."""
    if len(intervals) < 2:
        return intervals
    ends = intervals.end_ns.copy()
    close = intervals.start_ns[1:] - ends[:-1] < shorter_than_ns
    ends[:-1][close] = intervals.start_ns[1:][close]
    return Intervals.of(intervals.start_ns, ends)
