"""Which ranks the others wait for, why, and how much step time that costs.

The cost of a straggler is what the step takes less when the recorded steps are replayed with that rank at its peers'
pace. This holds where waits pass through several ranks and groups, where they overlap transfers, and where the others
would wait for another rank anyway (this one then costs nothing). The category in which it exceeds its peers is the
cause.

Example, two ranks with one all-reduce::

    rank 0   compute 30, exposed all-reduce 15 (of which it waits 10)
    rank 1   host pause 10, compute 30, exposed all-reduce 5

At rank 0's pace rank 1 would not pause, and both would take 35 instead of 45: rank 1 costs the job 10, the cause is
its host.

Ranks of one host that are equally slow are one straggler, and so are ranks that are slow in the same steps and hide
each other, by one cause or several (``sets``): at its peers' pace alone, none of them would save much.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.analyzers.rank.host_lane import HostTime
from perfscope.analyzers.replay.engine import ReplayResult, Schedules, replay
from perfscope.analyzers.replay.pace import at_peers_pace, shortened, without_holds
from perfscope.analyzers.replay.peers import Peers, find_peers
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.analyzers.replay.step_time import is_trusted, predicted_step_ns
from perfscope.analyzers.replay.stragglers.lone_ranks import (
    LateSteps,
    LoneRank,
    at_usual_pace,
    late_now_and_then,
    lone_ranks,
    slow_now_and_then,
)
from perfscope.analyzers.replay.stragglers.own_time import (
    NOISE,
    HostBound,
    excess,
    excess_apart,
    flops_differ,
    flops_per_step,
    flops_vary,
    late_loaders,
    most_apart,
    own_in_step,
    slow_once,
    steadiness,
)
from perfscope.analyzers.replay.stragglers.sets import HiddenSet, Unit, hidden_set
from perfscope.analyzers.replay.stragglers.slow_for_work import longer_ns, slow_for_their_work, spread_evenly_ns
from perfscope.analyzers.replay.stragglers.slow_links import slow_links, with_usual_links
from perfscope.analyzers.replay.stragglers.slow_stages import SlowStage, at_other_stages_pace, slow_stages
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Bool, Float64, Int64

CAUSES: Final = {
    TimeCategory.COMPUTE: "compute",
    TimeCategory.COPY: "copy",
    TimeCategory.DATALOADER: "dataloader",
    TimeCategory.SYNC: "sync",
    TimeCategory.LAUNCH: "launch",
    TimeCategory.HOST: "host",
    TimeCategory.DEPENDENCY: "launch",
    TimeCategory.UNKNOWN: "host",
}
"""Category of a rank's own time -> cause as the summary names it."""

_LOADING: Final = CAUSES[TimeCategory.DATALOADER]

_OWN: Final = np.array([int(category) for category in CAUSES])
_OF_DEVICE: Final = [int(category) for category in (TimeCategory.COMPUTE, TimeCategory.COPY)]

_CANDIDATES: Final = 24
"""Ranks that are tried one by one, those with the most time over their peers first. Only a few can cost 2 % of the step
each."""

_TOGETHER: Final = 1.5
"""A host is the straggler, not its ranks, where it costs this many times as much as the worst of them alone."""

_HIDDEN: Final = 1.25
"""Ranks that hide each other are one straggler where they cost this many times as much as the worst of them alone."""

_ALIKE: Final = 0.75
"""Share of a host's ranks that must be slow for the host to be slow."""

_OF_ITS_OWN: Final = 0.5
"""Part of what one of them is slower by, at least, that has another cause than what all of them are slower by."""

_SAME_STEPS: Final = 0.75
"""Share of slow steps in common from which ranks on different hosts hide each other: noise comes at different times."""

_AT_ONCE: Final = 0.5
"""Share of slow steps in common from which a host's ranks are slow at once, and of slow steps with a single slow rank
from which ranks are slow in turn."""

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
_QUIET: Final = 2
"""Such steps, at least: in one, work that varies may happen to be even."""

_SLOW_HOST: Final = 1.25
"""From this ratio of the time for operators to their peers' on, hosts are slow."""

_BY_CHANCE: Final = (0.0, 0.0, 14.0, 3.2, 1.8)
"""Of so many and one more draws of a normal distribution the largest is farther above the others than this many times
what those are apart in 5 % of cases; of more than four in less, if it is once that."""

_NOW_AND_THEN: Final = 0.5
"""Part of what a stage costs that is slower than the others, from which its slow steps alone explain that."""

_IN_TURN_RANKS: Final = 3
"""Two ranks that are slow in different steps have two causes; from three on it is one cause that rotates."""

_LONE_TURNS: Final = 2
"""The same of ranks without peers, which are found in turn where one of them is slow in most steps, as in histories."""


@dataclass(frozen=True, eq=False)
class Straggler:
    """What some ranks cost the job: ``lost_ns`` per step, ``per_step_ns`` in each used step, and the main cause.

    ``lost_ns`` is the mean of ``per_step_ns``. Single steps may be negative: where one is shorter, another may wait
    longer. ``scope`` and ``ranks`` are as in ``StragglerRow``; ``rank`` is the one with the most time over its peers.
    ``causes``, ``alone_ns`` and ``adds_ns`` are those of each of ``ranks`` where they hide each other, else empty.
    """

    rank: int
    ranks: tuple[int, ...]
    scope: str
    cause: str
    lost_ns: float
    per_step_ns: Int64
    causes: tuple[str, ...] = ()
    alone_ns: tuple[float, ...] = ()
    adds_ns: tuple[float, ...] = ()


def find_stragglers(
    result: AlignedJob, recorded: RecordedSchedules, base: ReplayResult, hosts: Mapping[int, str]
) -> tuple[Straggler, ...]:
    """All stragglers that cost the job more than noise, the costliest first.

    ``base`` is the unchanged replay; ``hosts`` names each rank's host, where known. Empty where nothing can be
    compared: a single rank, or schedules that cannot be replayed to their end.
    """
    if not base.complete:
        return ()
    search = _Search(result, recorded, base, hosts)
    stragglers = [*search.run(), *search.slow_link(result.matched_before)]
    stragglers += _slow_stages(result, search, hosts, attributed={rank for one in stragglers for rank in one.ranks})
    stragglers = search.with_lone_ranks(stragglers)
    return tuple(sorted(stragglers, key=lambda one: (-one.lost_ns, one.rank)))


class _Search:
    """Replays ranks at their peers' pace, and collects what that saves."""

    def __init__(
        self, result: AlignedJob, recorded: RecordedSchedules, base: ReplayResult, hosts: Mapping[int, str]
    ) -> None:
        groups = find_peers(result, recorded)
        self._result, self._recorded, self._base = result, recorded, base
        self._host_bound = HostBound.of(result, recorded)
        self._beside_hosts = _replayed_beside_hosts(result, recorded)
        self._steps_ns = recorded.steps_ns(base if self._beside_hosts is None else self._beside_hosts)
        replayed_ns = float(self._steps_ns.mean())
        # No rank can be charged with the replay's own error.
        self._noise = NOISE * replayed_ns + abs(replayed_ns - result.step_ns)
        self._peers = {rank: peers for peers in groups for rank in peers.ranks}
        self._hosts = hosts
        self._on_devices = all(partial.has_device_work for partial in result.partials.values())
        waited = {
            rank: partial.loading.waited_ns[partial.steps.indices_of(result.steps)]
            for rank, partial in result.partials.items()
        }
        self._in_loader_per_step_ns = waited
        self._in_loader_ns = {rank: float(ns.mean()) for rank, ns in waited.items()}
        self._loading_ns = recorded.loading_step_ns(result)
        # At its peers' pace a rank loads as ranks usually do: also where all are brought to it.
        loading = [self._loading_ns.get(rank, 0.0) for rank in recorded.schedules.ranks]
        self._usual_loading_ns = float(np.median(loading))
        self._loaded_first_ns = np.array([waited[rank][0] for rank in recorded.schedules.ranks])
        self._own = [(peers, own_in_step(recorded, peers)) for peers in groups]
        self._excess = {rank: over for peers, own in self._own for rank, over in excess(peers, own).items()}
        over = {rank: float(np.maximum(excess, 0).mean()) for rank, excess in self._excess.items()}
        self._slow = [rank for rank in sorted(over, key=lambda rank: -over[rank]) if over[rank] >= self._noise]
        self._slow_once = {rank for peers, own in self._own for rank in slow_once(peers, own)}
        for peers, own in self._own:
            self._slow_once.update(late_loaders(peers, own, recorded.used, result.step_ns))

    @property
    def schedules(self) -> Schedules:
        """The recorded steps."""
        return self._recorded.schedules

    def run(self) -> list[Straggler]:
        """Single ranks, then what costs more than its ranks one by one: a host, several ranks, or ranks in turn."""
        candidates = self._slow[:_CANDIDATES]
        stragglers = [one for rank in candidates if (one := self._cost((rank,), "rank")) is not None]
        for members in self._slow_hosts():
            stragglers = self._merge(stragglers, members, "host")
        stragglers = self._merge_hidden(stragglers)
        in_turn = self._merge(stragglers, self._taking_turns(), "job")
        uneven = self._with_varying_work()
        together = self._cost(uneven, "job", even=True) if uneven else None
        if together is None or together.cause != CAUSES[TimeCategory.COMPUTE]:
            return in_turn
        # At its peers' pace a rank would also have less to compute than it has on the mean.
        others = [one for one in in_turn if one.cause != together.cause or not set(uneven).issuperset(one.ranks)]
        slow, rest = self._slow_for_their_work(together)
        named = {rank for one in others for rank in one.ranks}
        pauses = [one for rank in uneven if rank not in named and (one := self._pauses(rank)) is not None]
        if rest is not None:
            rest = _without_pauses(rest, pauses)
        return [*others, *slow, *pauses, *([rest] if rest is not None and rest.lost_ns >= self._noise else ())]

    def _slow_for_their_work(self, together: Straggler) -> tuple[list[Straggler], Straggler | None]:
        """Of ranks with uneven work: (those that are slow for it, what it costs beside them). ``together`` is what all
        of them cost at the mean of their time.
        """
        groups = [peers for peers, _ in self._own if set(together.ranks).issuperset(peers.ranks)]
        slower: dict[int, float] = {}
        for peers in groups:
            slower |= slow_for_their_work(self._result, peers, self._recorded.used)
        slow = [one for ranks in self._whole_hosts(slower) if (one := self._slow_devices(ranks, slower)) is not None]
        if not slow:
            return [], together
        slower = {rank: slower[rank] for one in slow for rank in one.ranks}
        evenly: dict[int, Int64] = {}
        for peers in groups:
            evenly |= zip(peers.ranks, spread_evenly_ns(peers, slower), strict=True)
        per_step = self.saved(shortened(self._recorded, self._peers, evenly), together.ranks)
        if per_step is None:
            return slow, None
        return slow, replace(together, lost_ns=float(per_step.mean()), per_step_ns=per_step)

    def _slow_devices(self, ranks: Sequence[int], slower: Mapping[int, float]) -> Straggler | None:
        """What it costs that these ranks take so many times as long for their work."""
        over = {rank: longer_ns(self._peers[rank], rank, slower[rank]) for rank in ranks}
        saved = self.saved(shortened(self._recorded, self._peers, over), ranks)
        if saved is None:
            return None
        worst, cause = max(ranks, key=lambda rank: (slower[rank], -rank)), CAUSES[TimeCategory.COMPUTE]
        scope = "rank" if len(ranks) == 1 else "host"
        return Straggler(worst, tuple(ranks), scope, cause, float(saved.mean()), saved)

    def _whole_hosts(self, ranks: Collection[int]) -> list[tuple[int, ...]]:
        """These ranks, those of a host together where they are nearly all of its ranks and there are other hosts."""
        members = grouped((self._hosts.get(rank, ""), rank) for rank in self._peers)
        members.pop("", None)
        units = []
        for everyone in members.values() if len(members) > 1 else ():
            mine = tuple(sorted(set(everyone).intersection(ranks)))
            if len(mine) >= max(2, _ALIKE * len(everyone)):
                units.append(mine)
        on_hosts = {rank for unit in units for rank in unit}
        return [*units, *((rank,) for rank in sorted(ranks) if rank not in on_hosts)]

    def _pauses(self, rank: int) -> Straggler | None:
        """What the pauses of a rank's host cost where its work varies: that it has more to compute than its peers now
        and then is not its own.
        """
        peers, used = self._peers[rank], self._recorded.used
        over = np.maximum(peers.excess_ns(rank)[:, TimeCategory.HOST], 0)
        if over[used].mean() < self._noise:
            return None
        saved = self.saved(shortened(self._recorded, self._peers, {rank: over}), (rank,))
        cause = CAUSES[TimeCategory.HOST]
        return None if saved is None else Straggler(rank, (rank,), "rank", cause, float(saved.mean()), saved)

    def _merge(self, stragglers: list[Straggler], members: tuple[int, ...], scope: str) -> list[Straggler]:
        """With these ranks as one straggler, where together they cost so much more than each of them alone."""
        alone = [other.lost_ns for other in stragglers if other.rank in members]
        straggler = self._cost(members, scope) if len(members) > 1 else None
        if straggler is None or straggler.lost_ns < _TOGETHER * max(alone, default=0.0):
            return stragglers
        return [*(other for other in stragglers if other.rank not in members), straggler]

    def slow_link(self, matched: MatchedCollectives) -> list[Straggler]:
        """The host or rank whose link is slower than the others', if it costs more than noise."""
        link = slow_links(matched, self._hosts)
        saved = self.saved(with_usual_links(self._recorded.schedules, link), ()) if link is not None else None
        if link is None or saved is None:
            return []
        return [Straggler(link.ranks[0], link.ranks, link.scope, "communication", float(saved.mean()), saved)]

    def _slow_hosts(self) -> list[tuple[int, ...]]:
        """The slow ranks of each host nearly all of whose ranks are slow in the same steps, where there are others.

        They are compared with the ranks of the other hosts only: where half of all ranks are slow, the median of all is
        half-way.
        """
        members = grouped((self._hosts.get(rank, ""), rank) for rank in self._peers)
        members.pop("", None)
        most = {rank: over for peers, own in self._own for rank, over in most_apart(peers, own, self._hosts).items()}
        slow = {rank for rank, over in most.items() if np.maximum(over, 0).mean() >= self._noise}
        groups = []
        for ranks in members.values() if len(members) > 1 else ():
            if len(slow.intersection(ranks)) < max(2, _ALIKE * len(ranks)):
                continue  # A job has thousands of hosts, few of them slow.
            apart = {rank: over for peers, own in self._own for rank, over in excess_apart(peers, own, ranks).items()}
            mine = sorted(rank for rank, over in apart.items() if np.maximum(over, 0).mean() >= self._noise)
            if len(mine) < max(2, _ALIKE * len(ranks)):
                continue
            at_once = _at_once(np.stack([apart[rank] >= self._noise for rank in mine])) >= _AT_ONCE
            if at_once and not self._slow_by_others_causes(mine):
                groups.append(tuple(mine))
        return groups

    def _slow_by_others_causes(self, ranks: Sequence[int]) -> bool:
        """Is any of these ranks of a host slow mainly by its device beyond what all of them are, and these by their
        hosts, or the other way round? Then they hide each other, and are not slow alike.
        """
        over = np.stack([self._peers[rank].excess_ns(rank, ranks)[self._recorded.used].mean(axis=0) for rank in ranks])
        of_device = over[:, _OF_DEVICE].sum(axis=1)
        parts = np.maximum(np.stack([of_device, over[:, _OWN].sum(axis=1) - of_device], axis=1), 0)
        shared = parts.min(axis=0)
        beyond = parts - shared
        other = beyond.argmax(axis=1) != shared.argmax()
        return bool((other & (beyond.max(axis=1) >= _OF_ITS_OWN * parts.sum(axis=1))).any())

    def _merge_hidden(self, stragglers: list[Straggler]) -> list[Straggler]:
        """With those that hide each other as one straggler, where together they cost so much more than each alone."""
        units = self._units([one.ranks for one in stragglers if one.scope == "host"])
        behind = self._loaders_behind(units)
        units += behind
        known: dict[tuple[int, ...], Int64 | None] = {}

        def saved(chosen: Sequence[Unit]) -> Int64 | None:
            ranks = tuple(sorted(rank for unit in chosen for rank in unit))
            if ranks not in known:
                known[ranks] = self.saved_at_pace(ranks)
            return known[ranks]

        def cost(chosen: Sequence[Unit]) -> float:
            per_step = saved(chosen)
            return float(per_step.mean()) if per_step is not None else 0.0

        hidden = hidden_set(units, cost, self._noise)
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
        loading = [rank for rank, cause in zip(together.ranks, together.causes, strict=True) if cause == _LOADING]
        if loading and self._by_one_batch(loading):
            return stragglers
        return [
            *(other for other in stragglers if not members.intersection(other.ranks)),
            together,
        ]

    def _units(self, hosts: Sequence[Unit]) -> list[Unit]:
        """What may hide each other, the slowest first: slow hosts and other slow ranks, at most half of those that do
        the same work (more are the usual case).
        """
        usual = {rank: float(self._excess[rank].mean()) for rank in self._slow[:_CANDIDATES]}
        on_hosts = {rank for ranks in hosts for rank in ranks}
        units = [
            (rank,)
            for rank, over in usual.items()
            if rank not in on_hosts
            and over >= self._noise
            and (self._cause((rank,)) != _LOADING or self._load_longer((rank,), over))
        ]
        by_excess = sorted([*hosts, *units], key=lambda unit: -max(float(self._excess[rank].mean()) for rank in unit))
        chosen: list[Unit] = []
        for unit in by_excess:
            ranks = {rank for one in (*chosen, unit) for rank in one}
            if all(2 * len(ranks.intersection(peers.ranks)) <= len(peers.ranks) for peers, _ in self._own):
                chosen.append(unit)
        return chosen

    def _loaders_behind(self, units: Sequence[Unit]) -> list[Unit]:
        """Ranks whose loaders are slow behind ``units``; none where those of most ranks are. While somebody else is
        slow, their hosts wait for batches and their devices do not: these have work until the batches come.
        """
        slow = {rank for unit in units for rank in unit}
        usual = float(np.median(list(self._in_loader_ns.values())))
        over = {rank: ns - usual for rank, ns in self._in_loader_ns.items() if rank in self._peers}
        behind = sorted(rank for rank, ns in over.items() if ns >= self._noise and rank not in slow)
        return [(rank,) for rank in behind] if slow and 2 * len(behind) <= len(self._peers) else []

    def _in_same_steps(self, units: Sequence[Unit]) -> bool:
        """Are these slow in the same steps?"""
        hits = np.stack([np.mean([self._excess[rank] for rank in unit], axis=0) >= self._noise for unit in units])
        return bool(hits.any()) and _at_once(hits) >= _SAME_STEPS

    def _straggler_of(self, hidden: HiddenSet, per_step_ns: Int64, loaders: Sequence[Unit]) -> Straggler:
        """The straggler that these are together; ``loaders`` are those that only load for longer, behind others."""
        ranks = tuple(sorted(rank for unit in hidden.units for rank in unit))
        part = {}
        for unit, alone, adds in zip(hidden.units, hidden.alone_ns, hidden.adds_ns, strict=True):
            cause = self._cause_behind(unit) if unit in loaders else self._cause(unit)
            part.update({rank: (cause, alone, adds / len(unit)) for rank in unit})
        causes, alone_ns, adds_ns = zip(*(part[rank] for rank in ranks), strict=True)
        by_cause = grouped(zip(causes, adds_ns, strict=True))
        slowest = max(ranks, key=lambda rank: (float(self._excess[rank].sum()), -rank))
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

    def _cause_behind(self, ranks: Sequence[int]) -> str:
        """Loading, or what else their hosts do for as many times as long as their peers'."""
        over = self._busier_at(ranks) if self._as_slow_in_operators(ranks) else None
        return _LOADING if over is None else CAUSES[_by_host(over)]

    def _taking_turns(self) -> tuple[int, ...]:
        """Ranks that are slow in turn, seldom two at once; empty without any. Those that are slow most of the time are
        not among them.
        """
        hit = {rank: self._excess[rank] >= self._noise for rank in sorted(self._slow_once)}
        ranks = [rank for rank, steps in hit.items() if steps.mean() <= _AT_ONCE]
        return tuple(ranks) if ranks and _in_turn(np.stack([hit[rank] for rank in ranks])) else ()

    def with_lone_ranks(self, stragglers: list[Straggler]) -> list[Straggler]:
        """With ranks that have no peers and are slow in turn as one straggler, where together they cost so much more
        than each alone; and each of the others that is slow now and then, unless it costs more than that throughout.
        """
        ranks = lone_ranks(self._result, self._recorded, self._peers)
        # In one category a delay is plain that the noise of the whole step would hide.
        views = (None, *CAUSES)
        in_turn = [one for view in views if (one := self._lone_turns(ranks, view)) is not None]
        together = max(in_turn, key=lambda one: one.lost_ns, default=None)
        if together is not None:
            alone = [other.lost_ns for other in stragglers if other.rank in together.ranks]
            if together.lost_ns >= _TOGETHER * max(alone, default=0.0):
                return [*(other for other in stragglers if other.rank not in together.ranks), together]
        found = [one for view in views for one in self._late_now_and_then(ranks, view)]
        for mine in grouped((one.rank, one) for one in found).values():
            worst = max(mine, key=lambda one: one.lost_ns)
            throughout = [other for other in stragglers if other.ranks == worst.ranks]
            if worst.lost_ns >= _NOW_AND_THEN * max((other.lost_ns for other in throughout), default=0.0):
                stragglers = [*(other for other in stragglers if other not in throughout), worst]
        return stragglers

    def _lone_turns(self, ranks: Sequence[LoneRank], view: TimeCategory | None) -> Straggler | None:
        """Those of these ranks that are slow in turn, by their whole own time or by a category of it."""
        used = self._recorded.used
        slow = slow_now_and_then(ranks, used, self._result.step_ns, view)
        if not slow or not _in_turn(np.stack([one.slow[used] for one in slow]), _LONE_TURNS):
            return None
        return self._at_usual_pace(slow, "job")

    def _late_now_and_then(self, ranks: Sequence[LoneRank], view: TimeCategory | None) -> list[Straggler]:
        """Those of these ranks that are slow now and then, each alone."""
        late = late_now_and_then(ranks, self._recorded.used, self._result.step_ns, view)
        return [found for one in late if (found := self._at_usual_pace([one], "rank")) is not None]

    def _at_usual_pace(self, slow: Sequence[LateSteps], scope: str) -> Straggler | None:
        """What the slow steps of these ranks cost; None where that is no more than noise."""
        used = self._recorded.used
        saved = self.saved(at_usual_pace(self._recorded, slow), ())
        if saved is None:
            return None
        longer = np.sum([one.longer_ns(used) for one in slow], axis=0)
        cause = CAUSES[TimeCategory(int(_OWN[np.argmax(longer[_OWN])]))]
        worst = max(slow, key=lambda one: (int(one.over_ns.sum()), -one.of.rank)).of.rank
        return Straggler(worst, tuple(one.of.rank for one in slow), scope, cause, float(saved.mean()), saved)

    def _with_varying_work(self) -> tuple[int, ...]:
        """Ranks whose compute varies from step to step, so that none is the slow one; empty without any. Several may be
        slow at once, as where the work of batches varies.
        """
        varying: list[int] = []
        for peers, own in self._own:
            ahead = own.max(axis=0) - own.mean(axis=0)
            often = np.bincount(own.argmax(axis=0))
            flops = flops_per_step(self._result, peers.ranks)
            compute = peers.rows_ns[:, self._recorded.used, TimeCategory.COMPUTE]
            by_flops = flops_vary(flops) or flops_differ(flops, compute)
            # Of several that are slow together, as those of a host, none is the slowest of most steps.
            ratio, alone = steadiness(own), often.max() > _AT_ONCE * own.shape[1]
            if not by_flops and (ratio >= _SURELY_STEADY or (ratio >= _STEADY and alone) or _of_one_rank(own)):
                continue
            if ahead.mean() >= _VARIES * self._steps_ns.mean() and self._varies_by_compute(peers):
                varying += peers.ranks
        return tuple(varying)

    def _varies_by_compute(self, peers: Peers) -> bool:
        """Is compute the category that varies most between these ranks?"""
        rows = peers.rows_ns[:, self._recorded.used]
        spread = (rows.max(axis=0) - rows.mean(axis=0)).mean(axis=0)
        return CAUSES[TimeCategory(int(_OWN[np.argmax(spread[_OWN])]))] == CAUSES[TimeCategory.COMPUTE]

    def _cost(self, ranks: tuple[int, ...], scope: str, *, even: bool = False) -> Straggler | None:
        """What these ranks cost together; None where that is no more than noise."""
        saved = self.saved_at_pace(ranks, even=even)
        if saved is None:
            return None
        cause: str | None = self._cause(ranks)
        lost_ns = float(saved.mean())
        loads_longer = self._load_longer_in_turn if scope == "job" else self._load_longer
        slow_loader = loads_longer(ranks, lost_ns) and not self._as_slow_in_operators(ranks)
        if cause == _LOADING and not slow_loader:
            cause = self._cause_on_host(ranks, lost_ns) or self._cause_by_draining(ranks)
        if cause is None or (cause == _LOADING and self._by_one_batch(ranks)):
            return None
        worst = max(ranks, key=lambda rank: (float(self._excess[rank].sum()), -rank))
        return Straggler(worst, tuple(sorted(ranks)), scope, cause, lost_ns, saved)

    def _by_one_batch(self, ranks: Collection[int]) -> bool:
        """Is there a single step, and are these ranks no farther above the others in it than one of as many may be by
        chance? What one batch takes to load varies.
        """
        others = [waited for rank, waited in self._in_loader_ns.items() if waited and rank not in ranks]
        if self._recorded.used.sum() > 1 or len(others) < 2:
            return False
        farther = _BY_CHANCE[len(others)] if len(others) < len(_BY_CHANCE) else 1.0
        return min(self._in_loader_ns[rank] for rank in ranks) - max(others) < farther * (max(others) - min(others))

    def _as_slow_in_operators(self, ranks: Sequence[int]) -> bool:
        """Do the hosts of these ranks take as many times as long as their peers' for operators as in the loader?"""
        for rank in ranks:
            peers = self._peers[rank]
            of, line, others = peers.on_host, peers.ranks.index(rank), peers.others(rank, ranks)
            if of is None:
                return False
            operators = of.own_ns[:, :, HostTime.OPERATORS].sum(axis=1)
            slower = operators[line] / max(float(np.median(operators[others])), 1.0)
            waited = float(np.median([self._in_loader_ns[peers.ranks[other]] for other in others]))
            if slower < _SLOW_HOST or self._in_loader_ns[rank] > _SLOW_HOST * slower * waited:
                return False
        return True

    def _cause_on_host(self, ranks: Sequence[int], lost_ns: float) -> str | None:
        """What the hosts of these ranks do for longer than their peers', so that their devices wait for a loader no
        slower than the others'; None where they do nothing for so much longer.
        """
        over = self._busier_at(ranks)
        if over is None or over.sum() < lost_ns / 2 * len(self._recorded.steps):
            return None
        return CAUSES[_by_host(over)]

    def _cause_by_draining(self, ranks: Sequence[int]) -> str | None:
        """Synchronization, where these ranks are idle behind it and their peers are not: a drained device then waits
        for batches, too, which come as soon as those of the others; None where they are not.
        """
        each = [self._peers[rank].excess_ns(rank, ranks)[self._recorded.used, TimeCategory.SYNC] for rank in ranks]
        return CAUSES[TimeCategory.SYNC] if float(np.mean(each)) >= self._noise else None

    def _busier_at(self, ranks: Sequence[int]) -> Float64 | None:
        """For how much longer than their peers the hosts of these ranks do each thing (``HostTime``) but loading; None
        where they are not known.
        """
        over = np.zeros(len(HostTime))
        for rank in ranks:
            of, line = self._peers[rank].on_host, self._peers[rank].ranks.index(rank)
            if of is None:
                return None
            own = of.own_ns.sum(axis=1)
            over += own[line] - np.median(own[self._peers[rank].others(rank, ranks)], axis=0)
        over[HostTime.LOADER] = 0
        return over

    def _load_longer(self, ranks: Collection[int], lost_ns: float) -> bool:
        """Are these ranks in the loader for so much longer than the others? Where all loaders are slow, they may differ
        only in that their devices have no work left to overlap that.
        """
        others = [waited for rank, waited in self._in_loader_ns.items() if rank not in ranks]
        usual = float(np.median(others)) if others else 0.0
        return max(self._in_loader_ns[rank] for rank in ranks) - usual >= lost_ns / 2

    def _load_longer_in_turn(self, ranks: Collection[int], lost_ns: float) -> bool:
        """Is in each step one of these ranks in the loader for so much longer than usual in that step? Of ranks that
        take turns each is so in few steps, and over all steps none much longer than the others.
        """
        per_step = self._in_loader_per_step_ns
        usual = np.median(np.stack(list(per_step.values())), axis=0)
        longest = np.stack([per_step[rank] for rank in ranks]).max(axis=0)
        return float((longest - usual).mean()) >= lost_ns / 2

    def saved_at_pace(self, ranks: Collection[int], *, even: bool = False) -> Int64 | None:
        """``saved`` with these ranks at their peers' pace."""
        paced, with_hosts = sorted(ranks), self._beside_hosts is not None
        return self.saved(at_peers_pace(self._recorded, self._peers, paced, even=even, with_hosts=with_hosts), paced)

    def saved_at_other_stages_pace(self, stages: Sequence[SlowStage]) -> Int64 | None:
        """``saved`` with these stages as quick as the others."""
        changed = at_other_stages_pace(self._result, self._recorded, stages, with_hosts=self._beside_hosts is not None)
        return self.saved(changed, _ranks_of(stages), loading=False)

    def saved(self, schedules: Schedules, paced: Collection[int], *, loading: bool = True) -> Int64 | None:
        """By how much each used step is shorter with ``schedules``, in which ``paced`` ranks are no slower than others,
        nor their loader workers (``loading``); None where that is no more than noise. Their mean is what a what-if
        predicts.
        """
        schedules, lifted = without_holds(schedules) if paced else (schedules, False)
        replayed = replay(schedules)
        if not replayed.complete:
            return None
        recorded, result = self._recorded, self._result
        base = self._base if replayed.host_mark_ns is None else self._beside_hosts
        assert base is not None
        before = recorded.steps_ns(base)
        kept = [ns for rank, ns in self._loading_ns.items() if not loading or rank not in paced]
        floors = [self._usual_loading_ns, *kept]
        if replayed.host_mark_ns is None:
            floors.append(self._host_bound.least_ns(paced, before))
        step_ns = predicted_step_ns(
            recorded, replayed, base, settling=0, steps_alike=False, lifted=lifted, floors_ns=floors
        )
        per_step = before - recorded.steps_ns(replayed)
        mean, saved_ns = float(per_step.mean()), result.step_ns * (1 - step_ns / float(before.mean()))
        # Ranks do not begin a recording together, and no rank causes that skew: where no step before the first used one
        # was recorded, a saving in that step alone is evidence only where a batch is seen to come late.
        only_first = len(per_step) > 1 and recorded.used[0] and per_step[1:].sum() <= 0
        if mean <= 0 or saved_ns < self._noise:
            return None
        if only_first and not (paced and self._load_longer(paced, saved_ns)):
            return None
        return np.asarray(np.rint(per_step * (saved_ns / mean)), dtype=np.int64)

    def _cause(self, ranks: Sequence[int]) -> str:
        """The category in which these ranks exceed their peers most, over the used steps in which they are slower: in
        other steps a peer may stand out.

        Where all synchronize, and the host of these ranks is busy for longer, it launches more slowly, or pauses: the
        same synchronizations then leave its device idle for longer.
        """
        total = np.zeros(len(TimeCategory), dtype=np.float64)
        busier_ns = 0.0
        for rank in ranks:
            peers = self._peers[rank]
            slower = self._recorded.used.copy()
            slower[slower] = self._excess[rank] > 0
            total += peers.excess_ns(rank, ranks)[slower].sum(axis=0)
            total[TimeCategory.DATALOADER] += self._loaded_before_window_ns(rank, ranks)
            over = self._host_bound.busier_ns(rank, [other for other in peers.ranks if other not in ranks])
            busier_ns += float(over[self._excess[rank] > 0].sum())
        if self._on_devices:
            # Devices of ranks that wait for others do not wait for launches, however slow their hosts are.
            total[TimeCategory.LAUNCH] = min(total[TimeCategory.LAUNCH], busier_ns - max(total[TimeCategory.HOST], 0.0))
        most = TimeCategory(int(_OWN[np.argmax(total[_OWN])]))
        if most is TimeCategory.SYNC and busier_ns >= total[most] / 2:
            busier = self._busier_at(ranks)
            most = TimeCategory.LAUNCH if busier is None else _by_host(busier)
        return CAUSES[most]

    def _loaded_before_window_ns(self, rank: int, without: Collection[int]) -> float:
        """For how much longer than its peers a rank loaded before its first window begins, and its device waited."""
        recorded = self._recorded
        ranks = recorded.schedules.ranks
        others = [ranks.index(peer) for peer in self._peers[rank].ranks if peer != rank and peer not in without]
        mine = ranks.index(rank)
        if not others or not recorded.late[mine] or not recorded.used[0]:
            return 0.0
        longer = [each[mine] - np.median(each[others]) for each in (recorded.lead_ns, self._loaded_first_ns)]
        return max(float(min(longer)), 0.0)


def _by_host(over: Float64) -> TimeCategory:
    """What hosts cause by what they do for longer (``HostTime``): operators, or anything else."""
    return TimeCategory.LAUNCH if over.argmax() == HostTime.OPERATORS else TimeCategory.HOST


def _without_pauses(together: Straggler, pauses: Sequence[Straggler]) -> Straggler:
    """What uneven work costs beside these pauses: at the mean of n ranks, as replayed, an n-th of each is left."""
    part = 1 - 1 / len(together.ranks)
    per_step = together.per_step_ns - np.rint(part * sum(one.per_step_ns for one in pauses)).astype(np.int64)
    return replace(together, lost_ns=float(per_step.mean()), per_step_ns=per_step) if pauses else together


def _replayed_beside_hosts(result: AlignedJob, recorded: RecordedSchedules) -> ReplayResult | None:
    """The unchanged replay with hosts beside their devices, where that replays what was recorded."""
    if recorded.with_hosts is None:
        return None
    replayed = replay(recorded.with_hosts)
    return replayed if is_trusted(recorded, replayed, result.step_ns) else None


def _slow_stages(
    result: AlignedJob, search: _Search, hosts: Mapping[int, str], attributed: Collection[int]
) -> list[Straggler]:
    """Pipeline stages that do the same work as others, more slowly; ``attributed`` ranks have their cause already.

    Where all stages of one host are slow, the host is the straggler if that costs more than they do one by one.
    """
    slow = slow_stages(result, attributed)
    stragglers = [one for stage in slow if (one := _slow_stages_cost(search, (stage,), "stage", hosts)) is not None]
    for name in sorted({name for name in hosts.values() if name}):
        on_host = tuple(stage for stage in slow if {hosts.get(rank) for rank in stage.ranks} == {name})
        if len(on_host) < 2 or not _is_a_host(_ranks_of(on_host), hosts):
            continue
        straggler = _slow_stages_cost(search, on_host, "host", hosts)
        alone = [other.lost_ns for other in stragglers if hosts.get(other.rank) == name]
        if straggler is not None and straggler.lost_ns >= _TOGETHER * max(alone, default=0.0):
            stragglers = [other for other in stragglers if hosts.get(other.rank) != name]
            stragglers.append(straggler)
    return stragglers


def _slow_stages_cost(
    search: _Search, stages: tuple[SlowStage, ...], scope: str, hosts: Mapping[int, str]
) -> Straggler | None:
    """What these stages cost together; None where that is no more than noise."""
    ranks = _ranks_of(stages)
    saved = search.saved_at_other_stages_pace(stages)
    if saved is None:
        return None
    worst = max(stages, key=lambda stage: 1 / stage.factor)
    scope = "host" if _is_a_host(ranks, hosts) else "rank" if len(ranks) == 1 else scope
    return Straggler(worst.slowest, ranks, scope, CAUSES[worst.row], float(saved.mean()), saved)


def _ranks_of(stages: Collection[SlowStage]) -> tuple[int, ...]:
    return tuple(sorted(rank for stage in stages for rank in stage.ranks))


def _is_a_host(ranks: tuple[int, ...], hosts: Mapping[int, str]) -> bool:
    """Are these all ranks of one host, and are there other hosts?"""
    names = {hosts.get(rank, "") for rank in ranks}
    whole = tuple(sorted(rank for rank, name in hosts.items() if name in names))
    return len(names) == 1 and "" not in names and len(ranks) > 1 and whole == ranks and len(set(hosts.values())) > 1


def _of_one_rank(own_ns: Int64) -> bool:
    """Is one rank (line) slower in some steps (columns), as a device whose clock drops, and nobody in the others? Work
    that varies does so in all steps, and on all ranks.
    """
    ahead = own_ns.max(axis=0) - own_ns.mean(axis=0)
    slow = ahead >= _OF_ONE * ahead.max()
    of_one = len(set(own_ns.argmax(axis=0)[slow].tolist())) == 1
    return of_one and int((~slow).sum()) >= _QUIET


def _in_turn(hits: Bool, fewest: int = _IN_TURN_RANKS) -> bool:
    """Are these ranks (lines), so many or more, slow in turn, seldom two in one step (column)?"""
    at_once = hits.sum(axis=0)
    turns = hits[:, at_once > 0].argmax(axis=0)
    if len(hits) < fewest or not len(turns):
        return False
    changes = int((turns[1:] != turns[:-1]).sum())
    return changes >= _IN_TURN_RANKS - 1 and float((at_once[at_once > 0] == 1).mean()) >= _AT_ONCE


def _at_once(hits: Bool) -> float:
    """Of the steps (columns) in which any rank (line) is slow, the mean share of the ranks that are."""
    return float(hits[:, hits.any(axis=0)].mean())
