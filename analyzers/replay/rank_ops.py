"""Each rank's part in the collectives of the job, as the engine needs it."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.job.collectives.matched import EXCHANGE, MatchedCollectives
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.frozen import dataclass
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NEVER, NONE, Int64

_TWO: Final = 2
"""Ends of a message: what has more participants is a chain of several."""

_PROMPT_NS: Final = 20_000
"""What waits for an event of another stream starts within this time of it."""


@dataclass(frozen=True, eq=False)
class ReplayRankOps:
    """One rank's parts in collectives, in order: parallel arrays, columns as in ``Schedules``.

    ``number`` numbers rank ops across the job, ``row`` is the row of the rank's ``Collectives``; ``ready_ns`` is on the
    rank's own clock.
    """

    number: Int64
    row: Int64
    instance: Int64
    previous: Int64
    gap_ns: Int64
    transfer_ns: Int64
    ready_ns: Int64
    after: Int64
    after_gap_ns: Int64

    def number_of_row(self, partial: RankPartial) -> Int64:
        """The number of each row of the rank's ``Collectives``; NONE where it is not in the schedule."""
        number = np.full(len(partial.collectives), NONE, dtype=np.int64)
        number[self.row] = self.number
        return number


class RankOpNumbers:
    """Numbers the rank ops, rank by rank; a collective that matched nothing is its rank's alone."""

    def __init__(self, matched: MatchedCollectives) -> None:
        self._matched = matched
        self._lines = {int(rank): np.flatnonzero(matched.rank == rank) for rank in distinct(matched.rank)}
        self._numbered = 0
        self._alone = 0

    def of(self, rank: int, partial: RankPartial, first_ns: int, last_ns: int) -> ReplayRankOps:
        """The rank ops of one rank in ``[first_ns, last_ns)`` of its own clock, those that reach into it included."""
        own, matched = partial.collectives, self._matched
        row = np.flatnonzero((own.end_ns > first_ns) & (own.start_ns < last_ns))
        line = np.full(len(own), NONE, dtype=np.int64)
        lines = self._lines.get(rank, np.empty(0, dtype=np.int64))
        line[matched.index[lines]] = lines
        line = line[row]
        clocks = self._matched.clocks
        start, end = clocks.to_common(rank, own.start_ns[row]), clocks.to_common(rank, own.end_ns[row])
        ready_own = np.minimum(partial.progress.ready_ns[row], own.start_ns[row])
        known = line != NONE
        instance = np.empty(len(row), dtype=np.int64)
        instance[known] = matched.instance[line[known]]
        alone = int((~known).sum())
        instance[~known] = len(matched.instances) + self._alone + np.arange(alone)
        arrival, done = start.copy(), end.copy()
        arrival[known] = matched.last_arrival_ns[line[known]]
        done[known] = matched.done_ns[line[known]]
        ready = clocks.to_common(rank, ready_own)
        previous, able = _follow(own.stream[row], ready, start, end)
        after = _awaited(able, start - partial.progress.copy_ns[row], end)
        number = self._numbered + np.arange(len(row))
        self._numbered += len(row)
        self._alone += alone
        return ReplayRankOps(
            number=number,
            row=row,
            instance=instance,
            previous=np.where(previous == NONE, NONE, number[previous]) if len(row) else previous,
            after=np.where(after == NONE, NONE, number[after]) if len(row) else after,
            after_gap_ns=start - end[after] if len(row) else after,
            gap_ns=start - able,
            transfer_ns=done - arrival,
            ready_ns=ready_own,
        )

    def floor_ns(self) -> Int64:
        """For each instance, its last arrival where that may have been a rank which is not in the recording.

        Where most ranks of a collective are recorded, the others are taken to come no later than these: of what only
        the recorded ranks show, a rank that comes long after its peers is the likelier reason to wait.
        """
        instances = self._matched.instances
        sizes = np.array([len(group.ranks) or group.size or 0 for group in instances.groups] or [0], dtype=np.int64)
        most = (instances.participants > 1) & (2 * instances.participants > sizes[instances.group])
        most &= (sizes[instances.group] > 0) & ~instances.is_kind((EXCHANGE,))
        known = np.where(instances.complete | most, NEVER, instances.last_arrival_ns)
        return np.concatenate((known, np.full(self._alone, NEVER)))

    def chained(self) -> dict[int, dict[int, set[int]]]:
        """As in ``Schedules``. A message that lay in a buffer before its recv began makes nobody wait."""
        matched, messages = self._matched, self._matched.messages
        found: dict[int, dict[int, set[int]]] = {}
        of_chain = matched.instances.participants[messages.instance] > _TWO
        if not of_chain.any():
            return found
        own = zip(matched.instance.tolist(), matched.rank.tolist(), strict=True)
        line = {which: place for place, which in enumerate(own)}
        columns = (messages.instance[of_chain], messages.source[of_chain], messages.destination[of_chain])
        for instance, source, destination in zip(*(column.tolist() for column in columns), strict=True):
            ranks = found.setdefault(instance, {})
            sender, receiver = line.get((instance, source)), line.get((instance, destination))
            if sender is not None and receiver is not None and matched.end_ns[sender] > matched.start_ns[receiver]:
                ranks.setdefault(source, set()).add(destination)
                ranks.setdefault(destination, set()).add(source)
        return found


def _follow(stream: Int64, ready_ns: Int64, start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64]:
    """For each collective, the one before it on its stream (NONE: none), and when it could have started.

    Two on one stream that overlap (several lanes that a trace shows as one) do not follow one another.
    """
    previous = np.full(len(stream), NONE, dtype=np.int64)
    order = np.argsort(stream, kind="stable")
    following = stream[order][1:] == stream[order][:-1]
    previous[order[1:][following]] = order[:-1][following]
    before = np.where(previous == NONE, ready_ns, end_ns[previous]) if len(stream) else ready_ns
    previous[before > start_ns] = NONE
    return previous, np.where(previous == NONE, ready_ns, np.maximum(ready_ns, before))


def _awaited(able_ns: Int64, start_ns: Int64, end_ns: Int64) -> Int64:
    """For each collective that could have started earlier but did so only as one of another stream ended, that one: in
    hybrid sharding the reduction across replicas waits for the reduce-scatter. NONE for the others. One whose buffer is
    filled by copies that waited starts with these.
    """
    if len(start_ns) == 0:
        return np.empty(0, dtype=np.int64)
    order = np.argsort(end_ns, kind="stable")
    last = order[np.maximum(np.searchsorted(end_ns[order], start_ns, side="right") - 1, 0)]
    until = end_ns[last]
    waited = (until > able_ns) & (until <= start_ns) & (start_ns - until <= _PROMPT_NS) & (start_ns[last] < start_ns)
    return np.asarray(np.where(waited, last, NONE), dtype=np.int64)
