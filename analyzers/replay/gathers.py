"""Waits for gathers of parameters that the recording does not show, because the gathers came in time.

What a unit computes needs its parameters, so it waits for their gather. A trace shows that only where the device had
nothing else to do. With a slower network, or a quicker device, it would show more often. Where the work comes that
waits follows from the program: the first that is launched behind the gather itself, or, where a gather is issued ahead
(the backward prefetches), behind the next reduction of gradients: then the unit before is done::

    host     gather 2 | launch 2 | gather 1 | ... | reduce 2 | launch 1 | gather 0 | ... | reduce 1 | launch 0
    needs              gather 2                               gather 1                               gather 0

In a forward that gathers ahead it comes behind the next gather instead (of the last one, as long behind its issue as
others were)::

    host     gather 0 | gather 1 | launch 0 | gather 2 | launch 1 | launch 2
    needs                         gather 0              gather 1   gather 2

Behind how many of these it comes is known of the gathers that were waited for. Of others, it cannot be where own work
ran before the gather had ended.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np

from perfscope.analyzers.rank.host_lane import HostLane
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.replay.lanes import ProgramOps, ran_before
from perfscope.analyzers.replay.rank_ops import ReplayRankOps
from perfscope.frozen import dataclass
from perfscope.trace.trace import NONE, Bool, Int64

_FARTHEST: Final = 2
"""Reductions, or gathers, behind which a gather is needed, at most: units that are gathered ahead."""

_LAUNCHING: Final = 0.9
"""Share of the time between two gathers in which the host launches what a unit computes. It issues one in the rest."""


@dataclass(frozen=True)
class _Gather:
    """One of a rank: its row in ``Collectives``, the moments (host) behind its issue and behind each of the reductions,
    or gathers, that follow, behind how many of them it is needed (``seen``: known; else at least).
    """

    row: int
    moments: list[int]
    behind: int
    seen: bool


def unseen_waits(partial: RankPartial, lane: HostLane, mine: ReplayRankOps, window: tuple[int, int]) -> ProgramOps:
    """Those of one rank in the schedule's ``window``, for work that is launched in it."""
    places: defaultdict[tuple[bool, int], list[_Gather]] = defaultdict(list)
    for place, gather in _gathers(partial, lane):
        places[place].append(gather)
    known = {place: max(one.behind for one in same) for place, same in places.items()}
    shown = {place for place, same in places.items() if known[place] or any(one.seen for one in same)}
    number = mine.number_of_row(partial)
    base, end = lane.begins_at(window[0]), int(lane.moment_of(np.array(window))[1])
    rows, moments = [], []
    for place, same in places.items():
        backward, index = place
        behind = known[place]
        if place not in shown and index:
            behind = max((known[other] for other in shown if other[0] is backward), default=int(backward))
        for one in same:
            if one.seen or behind >= len(one.moments) or number[one.row] == NONE:
                continue
            if base < one.moments[behind] < end:
                rows.append(one.row)
                moments.append(one.moments[behind])
    ended = partial.collectives.end_ns[np.array(rows, dtype=np.int64)]
    return ProgramOps.of(
        OpKind.WAIT, ended, np.array(moments, dtype=np.int64), number[np.array(rows, dtype=np.int64)], end_ns=ended
    )


def _gathers(partial: RankPartial, lane: HostLane) -> list[tuple[tuple[bool, int], _Gather]]:
    """((issued by autograd?, place among those of its step), gather) for all with a recorded launch, as issued."""
    own = partial.collectives
    launched = lane.called_ns != NONE
    blocker = partial.progress.blocker
    waited = dict(zip(blocker.tolist(), np.maximum(lane.blocked_ns, lane.issued_ns[blocker] + 1).tolist(), strict=True))
    found: list[tuple[tuple[bool, int], _Gather]] = []
    for group in range(len(own.groups)):
        rows = {kind: _of_kind(partial, kind, group, launched) for kind in ("all_gather", "reduce_scatter")}
        gathers, reductions = (each[np.argsort(lane.issued_ns[each], kind="stable")] for each in rows.values())
        if len(reductions) == 0:
            continue
        following = np.searchsorted(lane.issued_ns[reductions], lane.issued_ns[gathers])
        counts: defaultdict[tuple[int, bool], int] = defaultdict(int)
        ahead = _next_in_forward(partial, lane, gathers)
        for row, first in zip(gathers.tolist(), following.tolist(), strict=True):
            later = ahead.get(row) or lane.called_ns[reductions[first : first + _FARTHEST]].tolist()
            moments = [int(lane.called_ns[row]) + 1, *(moment + 1 for moment in later)]
            seen = row in waited
            behind = int(np.searchsorted(moments[1:], waited[row])) if seen else _least(partial, lane, row, moments)
            key = int(own.step[row]), bool(own.backward[row])
            found.append(((key[1], counts[key]), _Gather(row, moments, behind, seen)))
            counts[key] += 1
    return found


def _next_in_forward(partial: RankPartial, lane: HostLane, gathers: Int64) -> dict[int, list[int]]:
    """Row of each gather of a forward, in the order of issue -> when the next ones were issued; behind the last, right
    before further ones would have been, at the pace of the last two. Without those of forwards that gather once.
    """
    own = partial.collectives
    forwards: defaultdict[int, list[int]] = defaultdict(list)
    for row in gathers[~own.backward[gathers]].tolist():
        forwards[int(own.step[row])].append(row)
    found: dict[int, list[int]] = {}
    for rows in forwards.values():
        called = lane.called_ns[rows].tolist()
        if len(rows) > 1:
            last_ns = lane.passed_ns(lane.called_ns[rows[-2:]])
            more = (_LAUNCHING + np.arange(_FARTHEST)) * (last_ns[1] - last_ns[0])
            called += lane.moment_after(last_ns[1] + np.rint(more).astype(np.int64)).tolist()
        found.update((row, called[place + 1 : place + 1 + _FARTHEST]) for place, row in enumerate(rows))
    return found


def _of_kind(partial: RankPartial, kind: str, group: int, launched: Bool) -> Int64:
    own = partial.collectives
    if kind not in own.kinds:
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero((own.kind == own.kinds.index(kind)) & (own.group == group) & launched)


def _least(partial: RankPartial, lane: HostLane, row: int, moments: list[int]) -> int:
    """Behind how many reductions a gather is needed at least: own work that ran before its end did not need it."""
    able = np.flatnonzero(~ran_before(partial.progress.own, lane, np.array(moments), partial.collectives.end_ns[[row]]))
    return int(able[0]) if len(able) else len(moments)
