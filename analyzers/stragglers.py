"""Who made the others wait, why, and how much step time it cost.

For every collective, the last arriver is compared with its peers since their last common moment (the group's previous
collective to end before anybody arrived): the category in which it spent more than the peers' median is the cause.
Where that is an earlier wait, or its stream was still held by an earlier collective, the blame passes on to whoever
that wait was for.

Lost time of a rank in a step is the exposed wait charged to it, on the participant that waited least for it: were the
rank as fast as the next slowest, that is what the step would save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.intervals import Intervals
from perfscope.analyzers.matching import Matched
from perfscope.analyzers.rank import RankPartial
from perfscope.analyzers.timeline import Row, Timeline
from perfscope.clock import Clocks
from perfscope.trace import NONE, Int64

CAUSES: Final = {
    Row.COMPUTE: "compute",
    Row.COMM_WAIT: "communication",
    Row.COMM_TRANSFER: "communication",
    Row.COPY: "copy",
    Row.DATALOADER: "dataloader",
    Row.SYNC: "sync",
    Row.LAUNCH: "launch",
    Row.HOST: "host",
    Row.DEPENDENCY: "launch",
    Row.UNKNOWN: "host",
}
"""Row of the account -> cause as the summary names it."""

_HELD_NS: Final = 20_000
"""A collective that starts within this of the end of another on its stream was held by it: NCCL kernels follow one
another within a few µs, a backend thread picks up its next job within tens."""


@dataclass(frozen=True)
class Lateness:
    """What one rank cost the job: ``lost_ns`` per used step (in the order of the steps) for each cause."""

    rank: int
    lost_ns: Int64
    """ns in each used step."""
    cause: str
    """The cause of most of it."""


def find_lateness(
    partials: Mapping[int, RankPartial],
    timelines: Mapping[int, Timeline],
    matched: Matched,
    clocks: Clocks,
    steps: Int64,
) -> tuple[Lateness, ...]:
    """Charge every exposed wait to a rank and a cause; ranks that cost nothing are left out, the costliest first.

    ``timelines`` are the ranks' accounts with the waits split out, on their own clocks.
    """
    blame = _Blame(partials, timelines, matched, clocks)
    charges = [charge for number in range(len(matched.instances)) for charge in blame.settle(number)]
    found = []
    for rank in sorted({charge.culprit for charge in charges}):
        mine = [charge for charge in charges if charge.culprit == rank]
        lost = np.array([_lost_in_step([c for c in mine if c.step == step]) for step in steps], dtype=np.int64)
        if lost.any():
            weight: dict[str, int] = {}
            for charge in mine:
                weight[charge.cause] = weight.get(charge.cause, 0) + charge.waited.measure()
            found.append(Lateness(rank, lost, max(weight, key=lambda cause: weight[cause])))
    return tuple(sorted(found, key=lambda lateness: -int(lateness.lost_ns.sum())))


@dataclass(frozen=True)
class _Charge:
    """One victim's exposed wait in one collective, charged to a culprit."""

    culprit: int
    cause: str
    victim: int
    group: int
    step: int
    waited: Intervals


def _lost_in_step(charges: list[_Charge]) -> int:
    """The least that any participant of a group waited for the culprit; the costliest group's."""
    lost = 0
    for group in {charge.group for charge in charges}:
        waits: dict[int, Intervals] = {}
        for charge in charges:
            if charge.group == group:
                waits[charge.victim] = waits.get(charge.victim, Intervals.empty()).union(charge.waited)
        lost = max(lost, min(waited.measure() for waited in waits.values()))
    return lost


class _Blame:
    """Settles matched collectives one after another, in order of their last arrival."""

    def __init__(
        self,
        partials: Mapping[int, RankPartial],
        timelines: Mapping[int, Timeline],
        matched: Matched,
        clocks: Clocks,
    ) -> None:
        self._matched = matched
        self._offset = {rank: clocks.offset_of(rank) for rank in partials}
        self._exposed = {rank: timelines[rank].where(Row.COMM_WAIT) for rank in partials}
        self._rows = {rank: [timelines[rank].where(row) for row in Row] for rank in partials}
        self._window_start = {rank: int(partials[rank].steps.start_ns[0]) for rank in partials}
        self._stream = {rank: partials[rank].collectives.stream for rank in partials}
        self._bounds = np.searchsorted(matched.instance, np.arange(len(matched.instances) + 1))
        self._ended: dict[int, list[int]] = {}
        """Group -> ends (aligned ns) of its settled collectives."""
        self._held: dict[tuple[int, int], tuple[int, int, str, int]] = {}
        """(rank, stream) -> the last collective settled there: end (own clock), culprit, cause, its wait in ns."""
        self._waited_for: dict[int, list[tuple[int, int, int, str]]] = {rank: [] for rank in partials}
        """Rank -> its waits so far: start, end (own clock), culprit, cause."""

    def settle(self, number: int) -> list[_Charge]:
        """Charge the exposed waits of one collective."""
        matched, instances = self._matched, self._matched.instances
        lines = np.arange(self._bounds[number], self._bounds[number + 1])
        group, last = int(instances.group[number]), int(instances.last_rank[number])
        charges: list[_Charge] = []
        culprit, cause = last, ""
        if last != NONE and matched.wait_ns[lines].any():
            culprit, cause = self._culprit(lines, group, last)
            for line in lines:
                victim = int(matched.rank[line])
                start = int(matched.start_ns[line]) - self._offset[victim]
                until = int(matched.last_arrival_ns[line]) - self._offset[victim]
                waited = self._exposed[victim].intersect(Intervals.single(start, until))
                if victim not in (last, culprit):
                    charges.append(_Charge(culprit, cause, victim, group, int(instances.step[number]), waited))
                if victim != culprit:
                    self._waited_for[victim].append((start, until, culprit, cause))
        self._remember(lines, group, culprit, cause)
        return charges

    def _remember(self, lines: Int64, group: int, culprit: int, cause: str) -> None:
        matched = self._matched
        self._ended.setdefault(group, []).append(int(matched.end_ns[lines].max()))
        for line in lines:
            rank = int(matched.rank[line])
            stream = int(self._stream[rank][matched.index[line]])
            end = int(matched.end_ns[line]) - self._offset[rank]
            self._held[rank, stream] = (end, culprit, cause, int(matched.wait_ns[line]))

    def _culprit(self, lines: Int64, group: int, last: int) -> tuple[int, str]:
        """Who is behind the last arrival, and why."""
        matched = self._matched
        line = int(lines[matched.rank[lines] == last][0])
        arrival = int(matched.start_ns[line]) - self._offset[last]
        held = self._held.get((last, int(self._stream[last][matched.index[line]])))
        late_by = int(matched.wait_ns[lines].max())
        if held is not None and held[1] not in (NONE, last):
            end, culprit, cause, waited = held
            # Its stream was busy with a collective that itself waited: at least half of this lateness is that wait.
            if end <= arrival <= end + _HELD_NS and 2 * waited >= late_by:
                return culprit, cause
        spent = self._spent(lines, group)
        mine = spent[last]
        peers = np.median([spent[rank] for rank in spent if rank != last], axis=0)
        excess = mine - peers
        row = Row(int(np.argmax(excess)))
        if row in (Row.COMM_WAIT, Row.COMM_TRANSFER):
            earlier = self._earlier_wait(last, arrival, int(excess[row]))
            if earlier is not None:
                return earlier
        return last, CAUSES[row]

    def _spent(self, lines: Int64, group: int) -> dict[int, Int64]:
        """For each participant, ns of each row between their last common moment and its own arrival."""
        matched = self._matched
        first = int(matched.start_ns[lines].min())
        common = max((end for end in self._ended.get(group, [])[-8:] if end <= first), default=None)
        spent = {}
        for line in lines:
            rank = int(matched.rank[line])
            begin = self._window_start[rank] if common is None else common - self._offset[rank]
            arrival = int(matched.start_ns[line]) - self._offset[rank]
            window = np.array([begin], dtype=np.int64), np.array([max(arrival, begin)], dtype=np.int64)
            spent[rank] = np.array([int(row.within(*window)[0]) for row in self._rows[rank]], dtype=np.int64)
        return spent

    def _earlier_wait(self, rank: int, arrival: int, excess: int) -> tuple[int, str] | None:
        """Whom the rank itself waited for, in the longest of its waits among the last few before ``arrival``."""
        recent = [wait for wait in self._waited_for[rank][-16:] if wait[1] <= arrival and wait[1] - wait[0] > 0]
        if not recent:
            return None
        start, end, culprit, cause = max(recent, key=lambda wait: wait[1] - wait[0])
        return (culprit, cause) if culprit != rank and 2 * (end - start) >= excess else None
