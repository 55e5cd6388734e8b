"""What one rank does, in the order of its program: the ops of its schedule, not yet tied to the time between them.

The host's order is the program's: what it launches first comes first, however late the device gets there. A rank whose
host is not known has the order in which things happened.
"""

from __future__ import annotations

import numpy as np

from perfscope.analyzers.rank.host_lane import LATER, HostLane
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.replay.lanes import PASSES, ProgramOps
from perfscope.analyzers.replay.rank_ops import ReplayRankOps
from perfscope.trace.trace import NEVER, NONE, Int64


def issues(partial: RankPartial, mine: ReplayRankOps, sorts: dict[tuple[str, int | None], int]) -> ProgramOps:
    """The rank's collectives. ``sorts``: numbers of kinds in groups of a size: those of sorts over ``PASSES``."""
    lane, begun = partial.progress.host, partial.collectives.start_ns[mine.row]
    if lane is None:
        return ProgramOps.of(OpKind.ISSUE, mine.ready_ns, mine.ready_ns, mine.number, begun_ns=begun)
    return ProgramOps.of(
        OpKind.ISSUE, mine.ready_ns, _issued(partial, lane)[mine.row], mine.number,
        end_ns=lane.called_ns[mine.row], begun_ns=begun, sort=_sorts(partial, lane, sorts)[mine.row],
    )  # fmt: skip


def _sorts(partial: RankPartial, lane: HostLane, numbers: dict[tuple[str, int | None], int]) -> Int64:
    """As in ``ProgramOps``, for each collective; ``numbers`` has those of other ranks, and takes new ones."""
    own = partial.collectives
    names = list(zip(own.kind.tolist(), own.group.tolist(), strict=True))
    known = {(kind, group): (own.kinds[kind], own.groups[group].size) for kind, group in set(names)}
    sort = np.array([numbers.setdefault(known[name], len(numbers)) for name in names], dtype=np.int64)
    order = np.argsort(_issued(partial, lane), kind="stable")
    forward = np.cumsum(np.diff(own.backward[order].astype(np.int64), prepend=0) < 0)
    _, first = np.unique(np.stack((sort[order], own.step[order], forward)), axis=1, return_index=True)
    of_pass: Int64 = PASSES * sort + own.backward
    of_pass[order[first]] = NONE
    return of_pass


def _issued(partial: RankPartial, lane: HostLane) -> Int64:
    """The moment of each collective: of its launch, or right behind the work that it waited for, where that was
    launched long before; without a recorded launch, right before the work that starts after it.
    """
    launched = np.where(lane.issued_ns == NONE, lane.moment_of(partial.progress.ready_ns) - 1, lane.issued_ns)
    return np.where(lane.behind_ns == NONE, launched, lane.behind_ns)


def waits(partial: RankPartial, mine: ReplayRankOps, first_ns: int, last_ns: int) -> ProgramOps:
    """Where the rank waited for collectives of its schedule."""
    progress = partial.progress
    number = mine.number_of_row(partial)
    used = (progress.blocked.end_ns > first_ns) & (progress.blocked.end_ns <= last_ns)
    used &= number[progress.blocker] != NONE
    until, blocker = progress.blocked.end_ns[used], progress.blocker[used]
    ended = partial.collectives.end_ns[blocker]
    lane = progress.host
    if lane is None:
        return ProgramOps.of(OpKind.WAIT, until, until, number[blocker], lag_ns=until - ended, end_ns=ended)
    # What had been launched before cannot wait for it; another thread's launches may look as if it did.
    moment = np.maximum(lane.blocked_ns[used], _issued(partial, lane)[blocker] + 1)
    return ProgramOps.of(
        OpKind.WAIT, until, moment, number[blocker], lag_ns=until - ended, end_ns=ended, waits=~lane.joined[used],
        idle_ns=lane.resumed_ns[used] - until,
    )  # fmt: skip


def marks(partial: RankPartial, time_ns: Int64, number: Int64) -> ProgramOps:
    """The ends of step windows: where the work that begins there was launched, or the host's own time before that."""
    lane = partial.progress.host
    moment = time_ns if lane is None else lane.moment_of(time_ns)
    if lane is not None:
        idle = (lane.done_ns(moment) < time_ns) & (moment < LATER)
        moment = np.where(idle, np.minimum(moment, time_ns), moment)
    return ProgramOps.of(OpKind.MARK, time_ns, moment, number)


def stalls(partial: RankPartial, until_ns: Int64, lag_ns: Int64, number: Int64) -> tuple[ProgramOps, Int64]:
    """Stalls of the loader that end whatever the training does, as the device saw them, and when the hosts had their
    batches (NEVER where no loading is recorded before).
    """
    lane = partial.progress.host
    if lane is None:
        return ProgramOps.of(OpKind.HOLD, until_ns, until_ns, number, lag_ns=lag_ns), np.full(len(until_ns), NEVER)
    launched = lane.moment_of(until_ns)
    place = np.searchsorted(lane.loading.end_ns, launched, side="right") - 1
    known = place >= 0
    moment, took = launched.copy(), np.zeros(len(launched), dtype=np.int64)
    moment[known] = lane.loading.end_ns[place[known]]
    took[known] = (lane.loading.end_ns - lane.loading.start_ns)[place[known]]
    held = ProgramOps.of(OpKind.HOLD, until_ns, moment, number, lag_ns=lag_ns, end_ns=took)
    return held, np.where(known, moment, NEVER)


def other_draws(lane: HostLane, held: ProgramOps, window: tuple[int, int], numbered: int) -> ProgramOps:
    """Batches in the schedule's ``window`` that the host had whenever it asked: nothing holds it up there. Their holds
    are numbered from ``numbered``.
    """
    base, end = lane.begins_at(window[0]), int(lane.moment_of(np.array(window))[1])
    taken = lane.loading.end_ns
    taken = taken[(taken > base) & (taken < end) & ~np.isin(taken, held.moment_ns)]
    return ProgramOps.of(OpKind.HOLD, taken, taken, numbered + np.arange(len(taken)))


def host_waits(
    partial: RankPartial, lane: HostLane, mine: ReplayRankOps, window: tuple[int, int], notes: int
) -> tuple[ProgramOps, ...]:
    """Calls in the schedule's ``window`` in which the host waits; ``notes`` is how many notes other ranks have."""
    called = lane.waits
    base, end = lane.begins_at(window[0]), int(lane.moment_of(np.array(window))[1])
    used = (called.entered_ns > base) & (called.entered_ns < end)
    number = mine.number_of_row(partial)
    joins = used & (called.collective != NONE)
    joins[joins] = number[called.collective[joins]] != NONE
    syncs = used & called.device
    waited = called.device_end_ns >= called.entered_ns
    noted = syncs & (called.noted_ns != NEVER)
    slot = np.full(len(used), NONE, dtype=np.int64)
    slot[noted] = notes + np.arange(noted.sum())
    collective = called.collective[joins]
    return (
        *(
            ProgramOps.of(
                kind, called.returned_ns[chosen], called.entered_ns[chosen], slot[chosen],
                waits=(waited & (called.collective == NONE))[chosen],
            )
            for kind, chosen in (
                (OpKind.SYNC, syncs & ~called.queue & ~called.limit),
                (OpKind.QUEUE, syncs & called.queue),
                (OpKind.LIMIT, syncs & called.limit),
            )
        ),
        ProgramOps.of(
            OpKind.JOIN, called.returned_ns[joins], called.entered_ns[joins], number[collective],
            end_ns=partial.collectives.end_ns[collective],
        ),
        ProgramOps.of(OpKind.NOTE, np.full(noted.sum(), NEVER), called.noted_ns[noted], slot[noted]),
    )  # fmt: skip
