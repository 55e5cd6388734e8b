"""Why ranks are slow: the category in which they exceed their peers, and what may be behind it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import median
from typing import Final

import numpy as np

from perfscope.analyzers.rank.host_lane import HostTime
from perfscope.analyzers.replay.pace import late_by
from perfscope.analyzers.replay.stragglers.paced import PacedReplays
from perfscope.analyzers.replay.stragglers.straggler import CAUSES, LOADING, OWN
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Bool, Float64

_SLOW_HOST: Final = 1.25
"""From this ratio of the time for operators to their peers' on, hosts are slow."""

_OF_OPERATORS: Final = 0.25
"""Part of what a host does for longer, at least, that is operators where it launches slowly."""

_MORE_OFTEN: Final = 2.0
"""From this ratio of synchronizations to their peers' on, ranks synchronize where those do not."""

_BY_CHANCE: Final = (0.0, 0.0, 14.0, 3.2, 1.8)
"""Of so many and one more draws of a normal distribution the largest is farther above the others than this many times
what those are apart in 5 % of cases; of more than four in less, if it is once that."""


class Causes:
    """The causes of one job's slow ranks."""

    def __init__(self, paced: PacedReplays) -> None:
        self._paced = paced

    def of(self, ranks: Sequence[int]) -> str:
        """The category in which these ranks exceed their peers most, over the used steps in which they are slower: in
        other steps a peer may stand out.

        Where all synchronize, and the host of these ranks is busy for longer, it launches more slowly, or pauses: the
        same synchronizations then leave its device idle for longer.
        """
        total = np.zeros(len(TimeCategory), dtype=np.float64)
        busier_ns = later_ns = 0.0
        for rank in ranks:
            peers = self._paced.peers[rank]
            slower = self._slower_in(rank)
            total += peers.excess_ns(rank, ranks)[slower].sum(axis=0)
            loaded_ns = self._loaded_before_window_ns(rank, ranks)
            total[TimeCategory.DATALOADER] += loaded_ns
            later_ns += self._later_ns(rank, ranks) - loaded_ns
            over = self._paced.host_bound.busier_ns(rank, [peers.ranks[line] for line in peers.others(rank, ranks)])
            busier_ns += float(over[self._paced.excess[rank] > 0].sum())
        if self._paced.on_devices:
            # Devices of ranks that wait for others do not wait for launches, however slow their hosts are.
            total[TimeCategory.LAUNCH] = min(total[TimeCategory.LAUNCH], busier_ns - max(total[TimeCategory.HOST], 0.0))
        most = TimeCategory(int(OWN[np.argmax(total[OWN])]))
        if total[most] < later_ns / 2:  # their steps take no longer: their hosts came late
            busier = self.busier_at(ranks)
            return CAUSES[TimeCategory.HOST if busier is None else _by_host(busier)]
        if most is TimeCategory.SYNC and busier_ns >= total[most] / 2 and not self._synchronizes_more(ranks):
            busier = self.busier_at(ranks)
            most = TimeCategory.LAUNCH if busier is None else _by_host(busier)
        elif most is TimeCategory.LAUNCH and self._pause(ranks):
            most = TimeCategory.HOST
        return CAUSES[most]

    def _synchronizes_more(self, ranks: Sequence[int]) -> bool:
        """Do the hosts of these ranks wait for their devices much more often than their peers'?"""

        def often(rank: int) -> float:
            partial = self._paced.result.partials[rank]
            used = partial.steps.indices_of(self._paced.result.steps)
            return float(partial.tables.syncs.count[:, used].sum(axis=0).mean())

        for rank in ranks:
            peers = self._paced.peers[rank]
            others = [often(peers.ranks[line]) for line in peers.others(rank, ranks)] or [often(rank)]
            if often(rank) <= _MORE_OFTEN * max(median(others), 1.0):
                return False
        return True

    def _slower_in(self, rank: int) -> Bool:
        """The recorded steps that are used and in which a rank is slower than its peers; all that are used where it is
        so in none, and only one part of its work takes longer.
        """
        slower: Bool = self._paced.recorded.used.copy()
        longer = self._paced.excess[rank] > 0
        if longer.any():
            slower[slower] = longer
        return slower

    def _pause(self, ranks: Sequence[int]) -> bool:
        """Do the hosts of these ranks take longer than their peers', and hardly for operators? After a pause a host is
        no longer ahead of its device, which then waits for launches that are as quick as the others'.
        """
        over = self.busier_at(ranks)
        return over is not None and max(over[HostTime.OPERATORS], 0.0) < _OF_OPERATORS * over.sum()

    def by_one_batch(self, ranks: Collection[int]) -> bool:
        """Is there a single step, and are these ranks no farther above the others in it than one of as many may be by
        chance? What one batch takes to load varies.
        """
        others = [waited for rank, waited in self._paced.in_loader_ns.items() if waited and rank not in ranks]
        if self._paced.recorded.used.sum() > 1 or len(others) < 2:
            return False
        farther = _BY_CHANCE[len(others)] if len(others) < len(_BY_CHANCE) else 1.0
        return min(self._paced.in_loader_ns[rank] for rank in ranks) - max(others) < farther * (
            max(others) - min(others)
        )

    def as_slow_in_operators(self, ranks: Sequence[int]) -> bool:
        """Do the hosts of these ranks take as many times as long as their peers' for operators as in the loader?"""
        for rank in ranks:
            peers = self._paced.peers[rank]
            of, line, others = peers.on_host, peers.line_of(rank), peers.others(rank, ranks)
            if of is None:
                return False
            operators = of.own_ns[:, :, HostTime.OPERATORS].sum(axis=1)
            slower = operators[line] / max(float(np.median(operators[others])), 1.0)
            waited = float(np.median([self._paced.in_loader_ns[peers.ranks[other]] for other in others]))
            if slower < _SLOW_HOST or self._paced.in_loader_ns[rank] > _SLOW_HOST * slower * waited:
                return False
        return True

    def on_host(self, ranks: Sequence[int], lost_ns: float) -> str | None:
        """What the hosts of these ranks do for longer than their peers', so that their devices wait for a loader no
        slower than the others'; None where they do nothing for so much longer.
        """
        over = self.busier_at(ranks)
        if over is None or over.sum() < lost_ns / 2 * len(self._paced.recorded.steps):
            return None
        return CAUSES[_by_host(over)]

    def by_draining(self, ranks: Sequence[int]) -> str | None:
        """Synchronization, where these ranks are idle behind it and their peers are not: a drained device then waits
        for batches, too, which come as soon as those of the others; None where they are not.
        """
        each = [
            self._paced.peers[rank].excess_ns(rank, ranks)[self._paced.recorded.used, TimeCategory.SYNC]
            for rank in ranks
        ]
        return CAUSES[TimeCategory.SYNC] if float(np.mean(each)) >= self._paced.noise else None

    def behind(self, ranks: Sequence[int]) -> str:
        """Loading, or what else their hosts do for as many times as long as their peers'."""
        over = self.busier_at(ranks) if self.as_slow_in_operators(ranks) else None
        return LOADING if over is None else CAUSES[_by_host(over)]

    def busier_at(self, ranks: Sequence[int]) -> Float64 | None:
        """For how much longer than their peers the hosts of these ranks do each thing (``HostTime``) but loading; None
        where they are not known. Ranks that take turns are slower only in their own steps.
        """
        over = np.zeros(len(HostTime))
        for rank in ranks:
            peers = self._paced.peers[rank]
            of, lines = peers.on_host, peers.others(rank, ranks)
            if of is None:
                return None
            in_turn = len(lines) == len(peers.ranks)
            own = of.own_ns[:, self._slower_in(rank)[of.step]] if in_turn else of.own_ns
            over += own[peers.line_of(rank)].sum(axis=0) - np.median(own[lines].sum(axis=1), axis=0)
        over[HostTime.LOADER] = 0
        return over

    def load_longer_in_turn(self, ranks: Collection[int], lost_ns: float) -> bool:
        """Is in each step one of these ranks in the loader for so much longer than usual in that step? Of ranks that
        take turns each is so in few steps, and over all steps none much longer than the others.
        """
        per_step = self._paced.in_loader_per_step_ns
        every = np.stack(list(per_step.values()))
        usual = every.min(axis=0) if len(every) == 2 else np.median(every, axis=0)
        longest = np.stack([per_step[rank] for rank in ranks]).max(axis=0)
        return float((longest - usual).mean()) >= lost_ns / 2

    def _later_ns(self, rank: int, without: Collection[int]) -> float:
        """By how much later than its peers a rank came to its first window."""
        recorded, (mine, others) = self._paced.recorded, self._lines(rank, without)
        return float(late_by(recorded, mine, others)) if others and recorded.used[0] else 0.0

    def _loaded_before_window_ns(self, rank: int, without: Collection[int]) -> float:
        """For how much longer than its peers a rank loaded before its first window begins, and its device waited."""
        recorded, (mine, others) = self._paced.recorded, self._lines(rank, without)
        if not others or not recorded.late[mine] or not recorded.used[0]:
            return 0.0
        longer = [each[mine] - np.median(each[others]) for each in (recorded.lead_ns, self._paced.loaded_first_ns)]
        return max(float(min(longer)), 0.0)

    def _lines(self, rank: int, without: Collection[int]) -> tuple[int, list[int]]:
        """A rank's line in the schedules, and those of its peers but for these ranks."""
        line_of, peers = self._paced.recorded.schedules.line_of, self._paced.peers[rank].ranks
        return line_of(rank), [line_of(peer) for peer in peers if peer != rank and peer not in without]


def _by_host(over: Float64) -> TimeCategory:
    """What hosts cause by what they do for longer (``HostTime``): operators, or anything else."""
    return TimeCategory.LAUNCH if over.argmax() == HostTime.OPERATORS else TimeCategory.HOST
