"""Waits for messages between pipeline stages that the recording does not show, because the messages came in time.

What a stage computes needs the message before it. A trace shows that only where the device had nothing else to do: not
where its own host launches so slowly that each message is there long before. With a quicker host it would wait::

    host     receive 1 |        launch 1 ...        | receive 2 |        launch 2 ...
    device       |msg 1|              |  work 1  |      |msg 2|               |  work 2  |

Whether work waits for what is issued right before it (a program may receive ahead, and let sends go on) is known of
the messages of all stages that were waited for, and of those that ended behind the begin of work that was launched
after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.rank.collectives.collectives import POINT_TO_POINT
from perfscope.analyzers.rank.host_lane import HostLane
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.replay.lanes import ProgramOps, idle_before, ran_before
from perfscope.analyzers.replay.rank_ops import ReplayRankOps
from perfscope.trace.trace import NONE, Bool, Int64

_SENDS: Final = "send"


def awaited_at_once(partials: Iterable[RankPartial]) -> tuple[bool, bool]:
    """(are messages that are only sent, are those that are received waited for right behind their issue?) Where some
    are, on any rank, and none on any of them is seen to have let work pass.
    """
    found = [
        _evidence(partial, lane, rows)
        for partial in partials
        if (lane := partial.progress.host) is not None
        for rows in _messages(partial, lane)
    ]
    sent, received = found[::2], found[1::2]
    return _all_at_once(sent), _all_at_once(received)


def unseen_messages(
    partial: RankPartial, lane: HostLane, mine: ReplayRankOps, window: tuple[int, int], awaited: tuple[bool, bool]
) -> ProgramOps:
    """Waits of one rank in the schedule's ``window`` that are not seen because the host launched the next work later;
    ``awaited`` as ``awaited_at_once`` has it.
    """
    base, end = lane.begins_at(window[0]), int(lane.moment_of(np.array(window))[1])
    number = mine.number_of_row(partial)
    chosen = [rows for rows, known in zip(_messages(partial, lane), awaited, strict=True) if known]
    rows = _late_after(partial, lane, np.concatenate([np.empty(0, dtype=np.int64), *chosen]))
    moments = lane.called_ns[rows] + 1
    used = (number[rows] != NONE) & (moments > base) & (moments < end)
    ended = partial.collectives.end_ns[rows[used]]
    return ProgramOps.of(OpKind.WAIT, ended, moments[used], number[rows[used]], end_ns=ended)


def _messages(partial: RankPartial, lane: HostLane) -> tuple[Int64, Int64]:
    """(rows of what is only sent, of what is received) with a recorded launch: work may wait for either or not."""
    own = partial.collectives
    names = np.array(own.kinds or ("",))[own.kind]
    launched = np.isin(names, POINT_TO_POINT) & (lane.called_ns != NONE)
    sends = launched & (names == _SENDS)
    return np.flatnonzero(sends), np.flatnonzero(launched & ~sends)


def _all_at_once(found: Sequence[tuple[bool, bool]]) -> bool:
    return any(seen for seen, _ in found) and not any(passed for _, passed in found)


def _evidence(partial: RankPartial, lane: HostLane, rows: Int64) -> tuple[bool, bool]:
    """(is any of these messages waited for, has any let work pass that was launched behind it)."""
    blocker = partial.progress.blocker
    waited = dict(zip(blocker.tolist(), lane.blocked_ns.tolist(), strict=True))
    seen = np.isin(rows, blocker)
    if not seen.any():
        return False, bool(_let_pass(partial, lane, rows).any())
    until = np.array([waited[row] for row in rows[seen].tolist()], dtype=np.int64)
    launches = lane.at_ns[lane.latency_ns != NONE]
    before = np.searchsorted(launches, until, side="left")
    passed = before > np.searchsorted(launches, lane.called_ns[rows[seen]], side="right")
    return True, bool(passed.any() or _let_pass(partial, lane, rows[~seen]).any())


def _let_pass(partial: RankPartial, lane: HostLane, rows: Int64) -> Bool:
    """Did work that was launched behind each of these messages run before it had ended?"""
    return ran_before(partial.progress.own, lane, lane.called_ns[rows] + 1, partial.collectives.end_ns[rows])


def _late_after(partial: RankPartial, lane: HostLane, rows: Int64) -> Int64:
    """Those of these messages that were not waited for, and behind which the device waited for its host."""
    launches = np.flatnonzero(lane.latency_ns != NONE)
    following = np.searchsorted(lane.at_ns[launches], lane.called_ns[rows], side="right")
    known = ~np.isin(rows, partial.progress.blocker) & (following < len(launches))
    begun = lane.start_ns[launches[following[known]]]
    return rows[known][idle_before(partial.progress.own, begun)]
