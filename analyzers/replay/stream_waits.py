"""Waits for exchanges of activations that the recording does not show, because these came in time.

Ring attention sends keys and values on while it computes with those it has; experts and sequence parallelism exchange
tokens beside other work. What needs the result waits for it on its stream; a trace shows that only where the device
had nothing else to do. But the host's call that makes a stream wait for an event is recorded::

    host     issue 1 | launch a | wait 1 | issue 2 | launch b | wait 2 | launch c
    device             | a                  | b              | c
    NCCL               | exchange 1 |       | exchange 2 |

The call does not say what for. It is for the exchange that was issued before and that neither a call nor work has
waited for yet, where that is only one, or where as many calls follow one another as there are such exchanges. Where
work that was launched behind such a call ran before the exchange had ended, calls of that kind mean something else.
Gradients and parameters are left out: reductions are waited for at the end, and streams that copy for them wait for
compute in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives.collectives import POINT_TO_POINT
from perfscope.analyzers.rank.host_lane import LATER, HostLane
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.replay.lanes import ProgramOps, ran_before
from perfscope.analyzers.replay.rank_ops import ReplayRankOps
from perfscope.trace.trace import NONE, Int64

EXCHANGES: Final = (*POINT_TO_POINT, "all_to_all")
"""Collectives that move activations."""

Sort = tuple[str, int | None]
"""Kind and size of the group."""


def passed_by(partials: Iterable[RankPartial]) -> frozenset[Sort]:
    """Sorts of exchanges of which some, on any rank, let work pass that was launched behind their call."""
    found: set[Sort] = set()
    for partial in partials:
        lane = partial.progress.host
        if lane is not None:
            rows, moments = _awaited(partial, lane)
            passed = ran_before(partial.progress.own, lane, moments, partial.collectives.end_ns[rows])
            found.update(_sort(partial, row) for row in rows[passed].tolist())
    return frozenset(found)


def unseen_exchanges(
    partial: RankPartial, lane: HostLane, mine: ReplayRankOps, window: tuple[int, int], without: frozenset[Sort]
) -> ProgramOps:
    """Waits of one rank in the schedule's ``window`` that are not seen; ``without`` these sorts."""
    base, end = lane.begins_at(window[0]), int(lane.moment_of(np.array(window))[1])
    number = mine.number_of_row(partial)
    rows, moments = _awaited(partial, lane)
    used = (number[rows] != NONE) & (moments > base) & (moments < end) & ~np.isin(rows, partial.progress.blocker)
    used &= np.array([_sort(partial, row) not in without for row in rows.tolist()], dtype=np.bool_)
    ended = partial.collectives.end_ns[rows[used]]
    return ProgramOps.of(OpKind.WAIT, ended, moments[used], number[rows[used]], end_ns=ended)


def _sort(partial: RankPartial, row: int) -> Sort:
    own = partial.collectives
    return own.kinds[own.kind[row]], own.groups[own.group[row]].size


def _awaited(partial: RankPartial, lane: HostLane) -> tuple[Int64, Int64]:
    """(rows of exchanges, the moments behind the calls that wait for them)."""
    own = partial.collectives
    exchanged = np.isin(np.array(own.kinds or ("",))[own.kind], EXCHANGES) & (lane.called_ns != NONE)
    issued = np.flatnonzero(exchanged)
    issued = issued[np.argsort(lane.called_ns[issued], kind="stable")]
    # What work is seen to have waited for needs no call any more; on the stream of compute it never had one.
    seen = np.full(len(own), LATER, dtype=np.int64)
    np.minimum.at(seen, partial.progress.blocker, lane.blocked_ns)
    # The calls between one issue and the next belong together.
    behind = np.searchsorted(lane.called_ns[issued], lane.stream_waits_ns, side="right")
    rows: list[int] = []
    moments: list[int] = []
    first = 0
    for last, begin, count in zip(*np.unique(behind, return_index=True, return_counts=True), strict=True):
        under_way = issued[first:last]
        waiting = under_way[seen[under_way] > lane.stream_waits_ns[begin]].tolist()
        if len(waiting) in (1, count):
            rows += waiting
            moments += (lane.stream_waits_ns[begin : begin + len(waiting)] + 1).tolist()
        first = last
    return np.array(rows, dtype=np.int64), np.array(moments, dtype=np.int64)
