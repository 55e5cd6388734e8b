"""Work that varies between ranks and from step to step: whose delay is their own, and what the rest costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.replay.pace import shortened
from perfscope.analyzers.replay.peers import Peers
from perfscope.analyzers.replay.stragglers.chance import are_few
from perfscope.analyzers.replay.stragglers.own_time import (
    compute_varies,
    flops_differ,
    flops_per_step,
    over_others,
    steadiness,
)
from perfscope.analyzers.replay.stragglers.paced import PacedReplays
from perfscope.analyzers.replay.stragglers.slow_for_work import longer_ns, slow_for_their_work, spread_evenly_ns
from perfscope.analyzers.replay.stragglers.straggler import ALIKE, CAUSES, OWN, Straggler
from perfscope.analyzers.replay.stragglers.within_steps import (
    ComputeBetween,
    all_recorded,
    same_by_flops,
)
from perfscope.grouping import grouped
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Int64

_MOST_STEPS: Final = 0.5
"""Share of the steps in which one rank is the slowest, above which it is so in most."""

_VARIES: Final = 0.05
"""Share of the step by which the slowest rank of each must be above the mean for work to vary: kernels' durations do by
some percent."""

_STEADY: Final = 4.0
"""From this ratio of the variance between ranks to that from step to step one rank is slower than others: from three
ranks and four steps on it is as large by chance in less than 8 % of cases (F distribution)."""
_SURELY_STEADY: Final = 16.0
"""The same in less than 0.4 %."""

_OF_ONE: Final = 0.05
"""Share of what a slow rank is above the mean in its slowest step: below that no rank is slow in a step."""
_OF_FEW: Final = 0.25
"""The same where a few ranks may be slow in turn: what the others vary by is below it."""
_QUIET: Final = 2
"""Such steps, at least: in one, work that varies may happen to be even."""


class UnevenWork:
    """The ranks of one job whose work varies."""

    def __init__(self, paced: PacedReplays) -> None:
        self._paced = paced

    def ranks(self) -> tuple[int, ...]:
        """Ranks whose compute varies from step to step, so that none is the slow one; empty without any. Several may be
        slow at once, as where the work of batches varies.
        """
        varying: list[int] = []
        for peers, own in self._paced.own:
            ahead = own.max(axis=0) - own.mean(axis=0)
            often = np.bincount(own.argmax(axis=0))
            flops = flops_per_step(self._paced.result, peers.ranks)
            compute = peers.rows_ns[:, self._paced.recorded.used, TimeCategory.COMPUTE]
            by_flops = compute_varies(flops, compute) or flops_differ(flops, compute)
            # Of several that are slow together, as those of a host, none is the slowest of most steps. What hosts do in
            # one long step, as in a first one, says nothing of the work.
            ratio, alone = max(steadiness(own), steadiness(compute)), often.max() > _MOST_STEPS * own.shape[1]
            if not by_flops and (ratio >= _SURELY_STEADY or (ratio >= _STEADY and alone) or of_one_rank(own)):
                continue
            if not by_flops and of_few_ranks(own):
                continue
            if ahead.mean() >= _VARIES * self._paced.steps_ns.mean() and self._varies_by_compute(peers):
                varying += peers.ranks
        return tuple(varying)

    def separated(self, together: Straggler, stragglers: list[Straggler]) -> list[Straggler]:
        """``stragglers``, and what ``together`` consists of, which is what all cost at the mean of their time: ranks
        that are slow for their work, ranks that pause, and uneven work.
        """
        # At its peers' pace a rank would also have less to compute than it has on the mean.
        uneven = together.ranks
        others = [one for one in stragglers if one.cause != together.cause or not set(uneven).issuperset(one.ranks)]
        slow, rest = self._slow_for_their_work(together)
        named = {rank for one in others for rank in one.ranks}
        pauses = [one for rank in uneven if rank not in named and (one := self._pauses(rank)) is not None]
        if rest is not None and self._paced.beside_hosts is None:
            rest = _without_pauses(rest, pauses)
        return [*others, *slow, *pauses, *([rest] if rest is not None and rest.lost_ns >= self._paced.noise else ())]

    def within_steps(self) -> dict[int, Peers]:
        """Ranks whose compute differs from one collective to the next, so that another is the slowest each time, with
        their peers; empty without any.
        """
        return {
            rank: peers for peers, _ in self._paced.own if self._differs_within_steps(peers) for rank in peers.ranks
        }

    def marked(self, stragglers: list[Straggler]) -> list[Straggler]:
        """With ranks of uneven work marked whose work differs within the steps, too."""
        within = self.within_steps()
        return [replace(one, within_steps=one.scope == "job" and within.keys() >= set(one.ranks)) for one in stragglers]

    def separated_within(
        self, within: Mapping[int, Peers], together: Straggler | None, stragglers: list[Straggler]
    ) -> list[Straggler]:
        """``stragglers``, and what it costs that the ranks ``within`` differ from one collective to the next.
        ``together`` is what they cost at the mean of all their own time; None where something else than compute differs
        more. Of single ranks those that are slow between most collectives stay, and those that are late by their hosts.
        """
        compute = CAUSES[TimeCategory.COMPUTE]
        groups = {peers.ranks: (peers, self._compute_between(peers)) for peers in within.values()}
        slow = {peers.ranks[line] for peers, between in groups.values() for line in between.slow()}
        kept = [one for one in stragglers if one.cause != compute or not slow.isdisjoint(one.ranks)]
        others = [one for one in stragglers if one in kept or not set(one.ranks).issubset(within)]
        if together is not None and not any(set(one.ranks).intersection(within) for one in others):
            return [*others, replace(together, within_steps=True)]
        found = [one for peers, between in groups.values() if (one := self._evened(peers, between)) is not None]
        return [*others, *found] if found else stragglers

    def _evened(self, peers: Peers, between: ComputeBetween) -> Straggler | None:
        """What it costs beside all else that these ranks do not compute as much as one another between collectives."""
        slower = slow_for_their_work(self._paced.result, peers, self._paced.recorded.used)
        evened = self._paced.moving_as_much(between.evened(self._paced.recorded, peers, slower), peers.ranks)
        saved = self._paced.saved(evened, peers.ranks, loading=False)
        if saved is None:
            return None
        worst = max(peers.ranks, key=lambda rank: (float(self._paced.excess[rank].sum()), -rank))
        cause = CAUSES[TimeCategory.COMPUTE]
        return Straggler(worst, peers.ranks, "job", cause, float(saved.mean()), saved, within_steps=True)

    def _differs_within_steps(self, peers: Peers) -> bool:
        """Does the work of these ranks differ from one collective to the next? What the scheduler of a host's cores
        makes of it does not count, nor is it known of ranks some of whose group are missing.
        """
        if not self._paced.on_devices or not all_recorded(self._paced.result, peers.ranks):
            return False
        between, used = self._compute_between(peers), self._paced.recorded.used
        longer = between.longer_ns(peers.step, used, float(self._paced.steps_ns.sum()))
        return longer > 0 and not same_by_flops(self._paced.result, peers, used, longer)

    def _compute_between(self, peers: Peers) -> ComputeBetween:
        return ComputeBetween.of(self._paced.result, self._paced.recorded, peers)

    def _varies_by_compute(self, peers: Peers) -> bool:
        """Is compute the category that varies most between these ranks?"""
        rows = peers.rows_ns[:, self._paced.recorded.used]
        spread = (rows.max(axis=0) - rows.mean(axis=0)).mean(axis=0)
        return CAUSES[TimeCategory(int(OWN[np.argmax(spread[OWN])]))] == CAUSES[TimeCategory.COMPUTE]

    def _slow_for_their_work(self, together: Straggler) -> tuple[list[Straggler], Straggler | None]:
        """Of ranks with uneven work: (those that are slow for it, what it costs beside them). ``together`` is what all
        of them cost at the mean of their time.
        """
        groups = [peers for peers, _ in self._paced.own if set(together.ranks).issuperset(peers.ranks)]
        slower: dict[int, float] = {}
        for peers in groups:
            slower |= slow_for_their_work(self._paced.result, peers, self._paced.recorded.used)
        slow = [one for ranks in self._whole_hosts(slower) if (one := self._slow_devices(ranks, slower)) is not None]
        if not slow:
            return [], together
        slower = {rank: slower[rank] for one in slow for rank in one.ranks}
        evenly: dict[int, Int64] = {}
        for peers in groups:
            evenly |= zip(peers.ranks, spread_evenly_ns(peers, slower), strict=True)
        evened = shortened(self._paced.recorded, self._paced.peers, evenly)
        per_step = self._paced.saved(self._paced.moving_as_much(evened, together.ranks), together.ranks)
        if per_step is None:
            return slow, None
        return slow, replace(together, lost_ns=float(per_step.mean()), per_step_ns=per_step)

    def _slow_devices(self, ranks: Sequence[int], slower: Mapping[int, float]) -> Straggler | None:
        """What it costs that these ranks take so many times as long for their work."""
        over = {rank: longer_ns(self._paced.peers[rank], rank, slower[rank]) for rank in ranks}
        saved = self._paced.saved(shortened(self._paced.recorded, self._paced.peers, over), ranks)
        if saved is None:
            return None
        worst, cause = max(ranks, key=lambda rank: (slower[rank], -rank)), CAUSES[TimeCategory.COMPUTE]
        scope = "rank" if len(ranks) == 1 else "host"
        return Straggler(worst, tuple(ranks), scope, cause, float(saved.mean()), saved)

    def _whole_hosts(self, ranks: Collection[int]) -> list[tuple[int, ...]]:
        """These ranks, those of a host together where they are nearly all of its ranks and there are other hosts."""
        members = grouped((self._paced.hosts.get(rank, ""), rank) for rank in self._paced.peers)
        members.pop("", None)
        units = []
        for everyone in members.values() if len(members) > 1 else ():
            mine = tuple(sorted(set(everyone).intersection(ranks)))
            if len(mine) >= max(2, ALIKE * len(everyone)):
                units.append(mine)
        on_hosts = {rank for unit in units for rank in unit}
        return [*units, *((rank,) for rank in sorted(ranks) if rank not in on_hosts)]

    def _pauses(self, rank: int) -> Straggler | None:
        """What the pauses of a rank's host cost where its work varies: that it has more to compute than its peers now
        and then is not its own.
        """
        peers, used = self._paced.peers[rank], self._paced.recorded.used
        over = np.maximum(peers.excess_ns(rank)[:, TimeCategory.HOST], 0)
        if over[used].mean() < self._paced.noise:
            return None
        saved = self._paced.saved(shortened(self._paced.recorded, self._paced.peers, {rank: over}), (rank,))
        cause = CAUSES[TimeCategory.HOST]
        return None if saved is None else Straggler(rank, (rank,), "rank", cause, float(saved.mean()), saved)


def _without_pauses(together: Straggler, pauses: Sequence[Straggler]) -> Straggler:
    """What uneven work costs beside these pauses: at the mean of n ranks, as replayed without hosts, which keep theirs,
    an n-th of each is left.
    """
    part = 1 - 1 / len(together.ranks)
    per_step = together.per_step_ns - np.rint(part * sum(one.per_step_ns for one in pauses)).astype(np.int64)
    return replace(together, lost_ns=float(per_step.mean()), per_step_ns=per_step) if pauses else together


def of_one_rank(own_ns: Int64) -> bool:
    """Is one rank (line) slower in some steps (columns), as a device whose clock drops, and nobody in the others? Work
    that varies does so in all steps, and on all ranks.
    """
    ahead = own_ns.max(axis=0) - own_ns.mean(axis=0)
    slow = ahead >= _OF_ONE * ahead.max()
    of_one = len(set(own_ns.argmax(axis=0)[slow].tolist())) == 1
    return of_one and int((~slow).sum()) >= _QUIET


def of_few_ranks(own_ns: Int64) -> bool:
    """Are some ranks (lines) slower, now one and now another, and the others never? Where work varies, each is slow in
    some step (column): that so few are in so many steps would be chance.
    """
    over = over_others(own_ns)
    slow = over >= _OF_FEW * over.max()
    ranks, steps = int(slow.any(axis=1).sum()), int(slow.any(axis=0).sum())
    return are_few(ranks, len(own_ns), steps)
