"""Waits for exchanges of activations that the recording does not show, because these came in time.

Ring attention sends keys and values on while it computes with those it has; experts and sequence parallelism exchange
tokens beside other work. What needs the result waits for it on its stream; a trace shows that only where the device
had nothing else to do. But the host's call that makes a stream wait for an event is recorded::

    host     issue 1 | launch a | wait 1 | issue 2 | launch b | wait 2 | launch c
    device             | a                  | b              | c
    NCCL               | exchange 1 |       | exchange 2 |

The call does not say what for. Where the calls of every rank are as many as its collectives of some kinds, and each
comes behind the issue of the collective with its number, they are for these, one after another: a stage that posts its
receives ahead, and lets its sends go on. Else a call is for the exchange that was issued before and that neither a call
nor work has waited for yet, where that is only one, or where as many calls follow one another as there are such
exchanges. Where work that was launched behind such a call ran before the exchange had ended, calls of that kind mean
something else. Gradients and parameters are left out: reductions are waited for at the end, and streams that copy for
them wait for compute in between.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations
from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives.collectives import POINT_TO_POINT
from perfscope.analyzers.rank.host_lane import LATER, HostLane
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.replay.lanes import ProgramOps, ran_before
from perfscope.analyzers.replay.rank_ops import ReplayRankOps
from perfscope.frozen import dataclass
from perfscope.trace.trace import NONE, Bool, Int64

EXCHANGES: Final = (*POINT_TO_POINT, "all_to_all")
"""Collectives that move activations."""

_MOST_KINDS: Final = 8
"""Jobs have fewer kinds of collectives."""

Sort = tuple[str, int | None]
"""Kind and size of the group."""


@dataclass(frozen=True)
class StreamWaits:
    """What the calls that make streams wait say of a job's ranks: kinds of collectives that they are for, one after
    another (None: that is not known), and sorts of exchanges that they are not for, because work passed some.
    """

    in_order: frozenset[str] | None
    passed: frozenset[Sort]

    @classmethod
    def of(cls, partials: Collection[RankPartial]) -> StreamWaits:
        """Those of all ranks of a job."""
        in_order = _in_order(partials)
        found: set[Sort] = set()
        for partial in partials:
            lane = partial.progress.host
            if lane is not None:
                rows, moments = _awaited(partial, lane, in_order)
                passed = ran_before(partial.progress.own, lane, moments, partial.collectives.end_ns[rows])
                found.update(_sort(partial, row) for row in rows[passed].tolist())
        return cls(in_order, frozenset(found))


def _in_order(partials: Collection[RankPartial]) -> frozenset[str] | None:
    """As in ``StreamWaits``; None where no kinds fit, or several sets of them do."""
    issued = [_issued(partial, lane) for partial in partials if (lane := partial.progress.host) is not None]
    kinds = sorted({kind for of_rank in issued for kind in of_rank.issued_ns})
    if not issued or len(kinds) > _MOST_KINDS or not set(kinds) & set(EXCHANGES):
        return None
    sets = (frozenset(chosen) for count in range(1, len(kinds) + 1) for chosen in combinations(kinds, count))
    fitting = [chosen for chosen in sets if all(of_rank.fits(chosen) for of_rank in issued)]
    return fitting[0] if len(fitting) == 1 else None


@dataclass(frozen=True, eq=False)
class _IssuedByKind:
    """One rank's calls, and when it had issued its collectives of each kind."""

    called_ns: Int64
    issued_ns: Mapping[str, Int64]

    def fits(self, kinds: Collection[str]) -> bool:
        """May the calls be for these, one after another?"""
        nothing = np.empty(0, dtype=np.int64)
        issued = np.sort(np.concatenate([nothing, *(self.issued_ns[kind] for kind in kinds if kind in self.issued_ns)]))
        return len(issued) == len(self.called_ns) and bool((issued <= self.called_ns).all())


def _issued(partial: RankPartial, lane: HostLane) -> _IssuedByKind:
    own = partial.collectives
    known = lane.called_ns != NONE
    times = {kind: lane.called_ns[known & (own.kind == place)] for place, kind in enumerate(own.kinds)}
    return _IssuedByKind(lane.stream_waits_ns, {kind: each for kind, each in times.items() if len(each)})


def unseen_exchanges(
    partial: RankPartial, lane: HostLane, mine: ReplayRankOps, window: tuple[int, int], calls: StreamWaits
) -> ProgramOps:
    """Waits of one rank in the schedule's ``window`` that are not seen, by the job's ``calls``."""
    base, end = lane.begins_at(window[0]), int(lane.moment_of(np.array(window))[1])
    number = mine.number_of_row(partial)
    rows, moments = _awaited(partial, lane, calls.in_order)
    used = (number[rows] != NONE) & (moments > base) & (moments < end) & ~np.isin(rows, partial.progress.blocker)
    used &= np.array([_sort(partial, row) not in calls.passed for row in rows.tolist()], dtype=np.bool_)
    ended = partial.collectives.end_ns[rows[used]]
    return ProgramOps.of(OpKind.WAIT, ended, moments[used], number[rows[used]], end_ns=ended)


def _sort(partial: RankPartial, row: int) -> Sort:
    own = partial.collectives
    return own.kinds[own.kind[row]], own.groups[own.group[row]].size


def _awaited(partial: RankPartial, lane: HostLane, in_order: frozenset[str] | None) -> tuple[Int64, Int64]:
    """(rows of exchanges, the moments behind the calls that wait for them); ``in_order`` as in ``StreamWaits``."""
    own = partial.collectives
    names = np.array(own.kinds or ("",))[own.kind]
    exchanged = np.isin(names, EXCHANGES)
    if in_order is None:
        return _awaited_alone(partial, lane, exchanged)
    rows = np.flatnonzero(np.isin(names, list(in_order)) & (lane.called_ns != NONE))
    rows = rows[np.argsort(lane.called_ns[rows], kind="stable")]
    return rows[exchanged[rows]], lane.stream_waits_ns[exchanged[rows]] + 1


def _awaited_alone(partial: RankPartial, lane: HostLane, exchanged: Bool) -> tuple[Int64, Int64]:
    """The same where calls are for exchanges that are under way alone."""
    own = partial.collectives
    issued = np.flatnonzero(exchanged & (lane.called_ns != NONE))
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
