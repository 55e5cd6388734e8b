"""Ranks that are slow in turn, or one now and then: each in its own steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.replay.peers import Peers
from perfscope.analyzers.replay.stragglers.chance import MANY_STEPS
from perfscope.analyzers.replay.stragglers.lone_ranks import (
    LateSteps,
    LoneRank,
    View,
    at_usual_pace,
    late_now_and_then,
    lone_ranks,
    slow_now_and_then,
    views,
)
from perfscope.analyzers.replay.stragglers.own_time import LARGE
from perfscope.analyzers.replay.stragglers.paced import PacedReplays
from perfscope.analyzers.replay.stragglers.straggler import CAUSES, OWN, TOGETHER, Straggler
from perfscope.grouping import grouped
from perfscope.results.categories import TimeCategory
from perfscope.trace.above_peers import above_peers, noise_of
from perfscope.trace.trace import Bool, Int64

_AT_ONCE: Final = 0.5
"""Share of slow steps with a single slow rank from which ranks are slow in turn, and of all steps, at most, in which
each is."""

_NOW_AND_THEN: Final = 0.5
"""Part of what a stage costs that is slower than the others, from which its slow steps alone explain that."""

_IN_TURN_RANKS: Final = 3
"""Two ranks that are slow in some steps each may have two causes; from three on it is one cause that rotates."""

_TURNS: Final = 2
"""The same of ranks that are plainly late in turn, in most steps."""
_LATE: Final = 0.05
"""Share of the step from which a rank is plainly late."""
_CLEAR: Final = 2.5
"""Standard deviations of the ranks' noise from which it is; by chance a rank is so in few steps, not in most."""
_AGAIN: Final = 3
"""Steps in which each must be late."""
_AGAIN_OF_MANY: Final = 4
"""The same of many steps, for what costs little of all of them together."""
_MOST: Final = 0.6
"""Share of the steps in which each may be: of two that take turns each is late in half of them, and in a few more by
chance."""
_LARGEST_PART: Final = 2 / 3
"""Of what all are late by, at most, one rank's."""
_OFTEN: Final = 0.5
"""Share of the steps in which one of them must be late."""

_LONE_TURNS: Final = 2
"""The same of ranks without peers, which are found in turn where one of them is slow in most steps, as in histories."""


class Turns:
    """The ranks of one job that are slow in some steps."""

    def __init__(self, paced: PacedReplays) -> None:
        self._paced = paced

    def taking_turns(self) -> tuple[int, ...]:
        """Ranks that are slow in turn, seldom two at once; empty without any. Those that are slow most of the time are
        not among them.
        """
        hit = {rank: self._paced.excess[rank] >= self._paced.noise for rank in sorted(self._paced.slow_once)}
        ranks = [rank for rank, steps in hit.items() if steps.mean() <= _AT_ONCE]
        found = tuple(ranks) if ranks and _in_turn(np.stack([hit[rank] for rank in ranks])) else ()
        plain = [rank for peers, own in self._paced.own for rank in self._plainly_in_turn(peers, own)]
        return found if len(found) >= len(plain) else tuple(sorted(plain))

    def _plainly_in_turn(self, peers: Peers, own: Int64) -> list[int]:
        """Those of one group of peers that are late in turn, each plainly beside their noise, as step histories tell
        it: by their own time, by what of it they did not wait for a core, which comes to one rank here and to another
        there, or by a part of it.
        """
        core = [self._paced.core_ns.get(rank, np.zeros(own.shape[1], np.int64)) for rank in peers.ranks]
        views = (own, np.maximum(own - np.stack(core), 0), *self._paced.parts_of(peers))
        return max(([peers.ranks[line] for line in self._late_in_turn(view)] for view in views), key=len)

    def _late_in_turn(self, own: Int64) -> list[int]:
        """The same as lines of ``own`` [rank, step]."""
        mine = own.T.astype(np.float32)
        excess = above_peers(mine)
        late = excess >= max(_LATE * self._paced.result.step_ns, _CLEAR * noise_of(mine, excess))
        lines = np.flatnonzero((late.sum(axis=0) >= _AGAIN) & (late.mean(axis=0) <= _MOST))
        late_ns = np.where(late, excess, 0).sum(axis=0)[lines]
        if len(lines) < _TURNS or late_ns.max() > _LARGEST_PART * late_ns.sum():
            return []
        turns = late[:, lines].T
        return lines.tolist() if turns.any(axis=0).mean() >= _OFTEN and _in_turn(turns, _TURNS) else []

    def with_lone_ranks(self, stragglers: list[Straggler]) -> list[Straggler]:
        """With ranks that have no peers and are slow in turn as one straggler, where together they cost so much more
        than each alone; and each of the others that is slow now and then, unless it costs more than that throughout.
        """
        ranks = lone_ranks(self._paced.result, self._paced.recorded, self._paced.peers)
        seen = views(ranks)
        in_turn = [one for view in seen if (one := self._lone_turns(ranks, view)) is not None]
        together = max(in_turn, key=lambda one: one.lost_ns, default=None)
        if together is not None:
            alone = [other.lost_ns for other in stragglers if other.rank in together.ranks]
            if together.lost_ns >= TOGETHER * max(alone, default=0.0):
                return [*(other for other in stragglers if other.rank not in together.ranks), together]
        found = [one for view in seen for one in self._late_now_and_then(ranks, view)]
        for mine in grouped((one.rank, one) for one in found).values():
            worst = max(mine, key=lambda one: one.lost_ns)
            throughout = [other for other in stragglers if other.ranks == worst.ranks]
            if worst.lost_ns >= _NOW_AND_THEN * max((other.lost_ns for other in throughout), default=0.0):
                stragglers = [*(other for other in stragglers if other not in throughout), worst]
        return stragglers

    def _lone_turns(self, ranks: Sequence[LoneRank], view: View) -> Straggler | None:
        """Those of these ranks that are slow in turn, by their whole own time or by a part of it."""
        used = self._paced.recorded.used
        slow = slow_now_and_then(ranks, used, self._paced.result.step_ns, view)
        if not slow or not _in_turn(np.stack([one.slow[used] for one in slow]), _LONE_TURNS):
            return None
        return self._at_usual_pace(slow, "job")

    def _late_now_and_then(self, ranks: Sequence[LoneRank], view: View) -> list[Straggler]:
        """Those of these ranks that are slow now and then, each alone."""
        late = late_now_and_then(ranks, self._paced.recorded.used, self._paced.result.step_ns, view)
        return [found for one in late if (found := self._at_usual_pace([one], "rank")) is not None]

    def _at_usual_pace(self, slow: Sequence[LateSteps], scope: str) -> Straggler | None:
        """What the slow steps of these ranks cost; None where that is no more than noise."""
        used = self._paced.recorded.used
        noise_ns = self._least_of_few_ns(slow[0].slow[used]) if len(slow) == 1 else math.inf
        saved = self._paced.saved(at_usual_pace(self._paced.recorded, slow), (), noise_ns=noise_ns)
        if saved is None:
            return None
        longer = np.sum([one.longer_ns(used) for one in slow], axis=0)
        cause = CAUSES[TimeCategory(int(OWN[np.argmax(longer[OWN])]))]
        worst = max(slow, key=lambda one: (int(one.over_ns.sum()), -one.of.rank)).of.rank
        return Straggler(worst, tuple(one.of.rank for one in slow), scope, cause, float(saved.mean()), saved)

    def _least_of_few_ns(self, slow: Bool) -> float:
        """Mean saving of all used steps from which a rank that is slow in these is told, ns: a large one in each.
        Infinite where there are too few steps for that.
        """
        if len(slow) < MANY_STEPS or slow.sum() < _AGAIN_OF_MANY:
            return math.inf
        return LARGE * self._paced.result.step_ns * float(slow.mean())


def _in_turn(hits: Bool, fewest: int = _IN_TURN_RANKS) -> bool:
    """Are these ranks (lines), so many or more, slow in turn, seldom two in one step (column)?"""
    at_once = hits.sum(axis=0)
    turns = hits[:, at_once > 0].argmax(axis=0)
    if len(hits) < fewest or not len(turns):
        return False
    changes = int((turns[1:] != turns[:-1]).sum())
    return changes >= _IN_TURN_RANKS - 1 and float((at_once[at_once > 0] == 1).mean()) >= _AT_ONCE
