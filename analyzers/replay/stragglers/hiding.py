"""Ranks that hide each other: what they cost together, as one straggler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.replay.stragglers.causes import Causes
from perfscope.analyzers.replay.stragglers.paced import PacedReplays
from perfscope.analyzers.replay.stragglers.sets import HiddenSet, Unit, hidden_set
from perfscope.analyzers.replay.stragglers.straggler import LOADING, Straggler, at_once
from perfscope.grouping import grouped
from perfscope.trace.trace import Int64

CANDIDATES: Final = 24
"""Ranks that are tried one by one, those with the most time over their peers first. Only a few can cost 2 % of the step
each."""

_HIDDEN: Final = 1.25
"""Ranks that hide each other are one straggler where they cost this many times as much as the worst of them alone."""

_SAME_STEPS: Final = 0.75
"""Share of slow steps in common from which ranks on different hosts hide each other: noise comes at different times."""


class Hiding:
    """The ranks of one job that may hide each other."""

    def __init__(self, paced: PacedReplays, causes: Causes) -> None:
        self._paced, self._causes = paced, causes

    def merged(self, stragglers: list[Straggler]) -> list[Straggler]:
        """With those that hide each other as one straggler, where together they cost so much more than each alone."""
        units = self._units([one.ranks for one in stragglers if one.scope == "host"])
        behind = self._loaders_behind(units)
        units += behind
        known: dict[tuple[int, ...], Int64 | None] = {}

        def saved(chosen: Sequence[Unit]) -> Int64 | None:
            ranks = tuple(sorted(rank for unit in chosen for rank in unit))
            if ranks not in known:
                known[ranks] = self._paced.saved_at_pace(ranks)
            return known[ranks]

        def cost(chosen: Sequence[Unit]) -> float:
            per_step = saved(chosen)
            return float(per_step.mean()) if per_step is not None else 0.0

        hidden = hidden_set(units, cost, self._paced.noise)
        per_step = saved(hidden.units) if hidden is not None else None
        if hidden is None or per_step is None:
            return stragglers
        if not self._in_same_steps([unit for unit in hidden.units if unit not in behind]):
            return stragglers
        members = {rank for unit in hidden.units for rank in unit}
        alone = [other.lost_ns for other in stragglers if members.issuperset(other.ranks)]
        if hidden.lost_ns < _HIDDEN * max(alone, default=0.0):
            return stragglers
        together = self._straggler_of(hidden, per_step, behind)
        loading = [rank for rank, cause in zip(together.ranks, together.causes, strict=True) if cause == LOADING]
        if loading and self._causes.by_one_batch(loading):
            return stragglers
        return [
            *(other for other in stragglers if not members.intersection(other.ranks)),
            together,
        ]

    def _units(self, hosts: Sequence[Unit]) -> list[Unit]:
        """What may hide each other, the slowest first: slow hosts and other slow ranks, at most half of those that do
        the same work (more are the usual case).
        """
        usual = {rank: float(self._paced.excess[rank].mean()) for rank in self._paced.slow[:CANDIDATES]}
        on_hosts = {rank for ranks in hosts for rank in ranks}
        units = [
            (rank,)
            for rank, over in usual.items()
            if rank not in on_hosts
            and over >= self._paced.noise
            and (self._causes.of((rank,)) != LOADING or self._paced.load_longer((rank,), over))
        ]
        by_excess = sorted(
            [*hosts, *units], key=lambda unit: -max(float(self._paced.excess[rank].mean()) for rank in unit)
        )
        chosen: list[Unit] = []
        for unit in by_excess:
            ranks = {rank for one in (*chosen, unit) for rank in one}
            if all(2 * len(ranks.intersection(peers.ranks)) <= len(peers.ranks) for peers, _ in self._paced.own):
                chosen.append(unit)
        return chosen

    def _loaders_behind(self, units: Sequence[Unit]) -> list[Unit]:
        """Ranks whose loaders are slow behind ``units``; none where those of most ranks are. While somebody else is
        slow, their hosts wait for batches and their devices do not: these have work until the batches come.
        """
        slow = {rank for unit in units for rank in unit}
        usual = float(np.median(list(self._paced.in_loader_ns.values())))
        over = {rank: ns - usual for rank, ns in self._paced.in_loader_ns.items() if rank in self._paced.peers}
        behind = sorted(rank for rank, ns in over.items() if ns >= self._paced.noise and rank not in slow)
        return [(rank,) for rank in behind] if slow and 2 * len(behind) <= len(self._paced.peers) else []

    def _in_same_steps(self, units: Sequence[Unit]) -> bool:
        """Are these slow in the same steps?"""
        hits = np.stack(
            [np.mean([self._paced.excess[rank] for rank in unit], axis=0) >= self._paced.noise for unit in units]
        )
        return bool(hits.any()) and at_once(hits) >= _SAME_STEPS

    def _straggler_of(self, hidden: HiddenSet, per_step_ns: Int64, loaders: Sequence[Unit]) -> Straggler:
        """The straggler that these are together; ``loaders`` are those that only load for longer, behind others."""
        ranks = tuple(sorted(rank for unit in hidden.units for rank in unit))
        part = {}
        for unit, alone, adds in zip(hidden.units, hidden.alone_ns, hidden.adds_ns, strict=True):
            cause = self._causes.behind(unit) if unit in loaders else self._causes.of(unit)
            part.update({rank: (cause, alone, adds / len(unit)) for rank in unit})
        causes, alone_ns, adds_ns = zip(*(part[rank] for rank in ranks), strict=True)
        by_cause = grouped(zip(causes, adds_ns, strict=True))
        slowest = max(ranks, key=lambda rank: (float(self._paced.excess[rank].sum()), -rank))
        return Straggler(
            rank=slowest,
            ranks=ranks,
            scope="ranks",
            cause=max(by_cause, key=lambda cause: (round(sum(by_cause[cause])), cause == part[slowest][0])),
            lost_ns=hidden.lost_ns,
            per_step_ns=per_step_ns,
            causes=causes,
            alone_ns=alone_ns,
            adds_ns=adds_ns,
        )
