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
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.analyzers.replay.engine import ReplayResult
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.analyzers.replay.stragglers.causes import Causes
from perfscope.analyzers.replay.stragglers.chance import (
    all_there_by_chance,
    by_chance,
    by_same_share,
    least_told_ns,
    rests_on_long_steps,
    rests_on_one_step,
)
from perfscope.analyzers.replay.stragglers.hiding import CANDIDATES, Hiding
from perfscope.analyzers.replay.stragglers.in_turn import Turns
from perfscope.analyzers.replay.stragglers.own_time import LARGE, excess_apart, most_apart
from perfscope.analyzers.replay.stragglers.paced import PacedReplays, ranks_of
from perfscope.analyzers.replay.stragglers.slow_links import slow_links, with_usual_links
from perfscope.analyzers.replay.stragglers.slow_stages import SlowStage, slow_stages
from perfscope.analyzers.replay.stragglers.straggler import (
    ALIKE,
    CAUSES,
    LOADING,
    OWN,
    TOGETHER,
    Straggler,
    at_once,
    is_a_host,
)
from perfscope.analyzers.replay.stragglers.uneven import UnevenWork
from perfscope.grouping import grouped
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Int64

_OF_DEVICE: Final = [int(category) for category in (TimeCategory.COMPUTE, TimeCategory.COPY)]

_OF_ITS_OWN: Final = 0.5
"""Part of what one of them is slower by, at least, that has another cause than what all of them are slower by."""

_AT_ONCE: Final = 0.5
"""Share of slow steps in common from which a host's ranks are slow at once."""

_MUCH_LONGER: Final = 2.0
"""From this ratio of the time in the loader to that on other hosts on, a host's ranks wait for slower loaders."""


def find_stragglers(
    result: AlignedJob,
    recorded: RecordedSchedules,
    base: ReplayResult,
    hosts: Mapping[int, str],
    core_ns: Mapping[int, Int64] | None = None,
) -> tuple[Straggler, ...]:
    """All stragglers that cost the job more than noise, the costliest first.

    ``base`` is the unchanged replay; ``hosts`` names each rank's host, where known; ``core_ns`` is for how long each
    waited for a core in each used step, where recorded. Empty where nothing can be compared: a single rank, or
    schedules that cannot be replayed to their end.
    """
    if not base.complete:
        return ()
    paced = PacedReplays(result, recorded, base, hosts, core_ns)
    search = _Search(paced)
    stragglers = [*search.run(), *search.slow_link(result.matched_before)]
    stragglers += search.of_unpaired(attributed={rank for one in stragglers for rank in one.ranks})
    stragglers += _slow_stages(result, paced, hosts, attributed={rank for one in stragglers for rank in one.ranks})
    stragglers = Turns(paced).with_lone_ranks(stragglers)
    return tuple(sorted(stragglers, key=lambda one: (-one.lost_ns, one.rank)))


class _Search:
    """Has ranks replayed at their peers' pace, and collects what that saves."""

    def __init__(self, paced: PacedReplays) -> None:
        self._paced, self._causes = paced, Causes(paced)

    def run(self) -> list[Straggler]:
        """Single ranks, then what costs more than its ranks one by one: a host, several ranks, or ranks in turn."""
        candidates = [*self._paced.slow, *self._paced.behind_hosts][:CANDIDATES]
        stragglers = [one for rank in candidates if (one := self._cost((rank,), "rank")) is not None]
        for members in self._slow_hosts():
            stragglers = self._merge(stragglers, members, "host")
        stragglers = Hiding(self._paced, self._causes).merged(stragglers)
        stragglers = self._merge(stragglers, Turns(self._paced).taking_turns(), "job")
        work = UnevenWork(self._paced)
        together = self._evenly(work.ranks())
        if together is not None:
            return work.marked(work.separated(together, stragglers))
        within = work.within_steps()
        return work.separated_within(within, self._evenly(tuple(sorted(within))), stragglers) if within else stragglers

    def _evenly(self, ranks: tuple[int, ...]) -> Straggler | None:
        """What it costs that the compute of these ranks is not that of their mean; None where it is something else that
        differs, or nothing.
        """
        together = self._cost(ranks, "job", even=True) if ranks else None
        return together if together is not None and together.cause == CAUSES[TimeCategory.COMPUTE] else None

    def _merge(self, stragglers: list[Straggler], members: tuple[int, ...], scope: str) -> list[Straggler]:
        """With these ranks as one straggler, where together they cost so much more than each of them alone."""
        alone = [other.lost_ns for other in stragglers if other.rank in members]
        straggler = self._cost(members, scope) if len(members) > 1 else None
        if straggler is None or straggler.lost_ns < TOGETHER * max(alone, default=0.0):
            return stragglers
        return [*(other for other in stragglers if other.rank not in members), straggler]

    def slow_link(self, matched: MatchedCollectives) -> list[Straggler]:
        """The host or rank whose link is slower than the others', if it costs more than noise."""
        link = slow_links(matched, self._paced.hosts, on_devices=self._paced.on_devices)
        saved = (
            self._paced.saved(with_usual_links(self._paced.recorded.schedules, link), ()) if link is not None else None
        )
        if link is None or saved is None:
            return []
        return [Straggler(link.ranks[0], link.ranks, link.scope, "communication", float(saved.mean()), saved)]

    def of_unpaired(self, attributed: Collection[int]) -> list[Straggler]:
        """Slow hosts and ranks whose messages' other ends were not found, so that no replay shows who waits for them,
        with the most that they may cost, where that is much; ``attributed`` ranks have their cause already.
        """
        if not self._paced.result.unpaired_messages.any():
            return []
        told, found = set(attributed), []
        for unit in (*self._slow_hosts(), *((rank,) for rank in self._paced.slow[:CANDIDATES])):
            over = [ns for peers, own in self._paced.own for ns in excess_apart(peers, own, unit).values()]
            if told.intersection(unit) or not over:
                continue
            per_step, cause = self._paced.at_most(unit, np.max(over, axis=0)), self._causes.of(unit)
            if per_step is None or per_step.mean() < LARGE * self._paced.result.step_ns or cause == LOADING:
                continue
            scope, worst = "host" if len(unit) > 1 else "rank", self._slowest_of(unit)
            found.append(Straggler(worst, unit, scope, cause, float(per_step.mean()), per_step, replayed=False))
            told.update(unit)
        return found

    def _slow_hosts(self) -> list[tuple[int, ...]]:
        """The slow ranks of each host nearly all of whose ranks are slow in the same steps, where there are others; and
        those that wait for batches, where a host's ranks hide each other.

        They are compared with the ranks of the other hosts only: where half of all ranks are slow, the median of all is
        half-way.
        """
        members = grouped((self._paced.hosts.get(rank, ""), rank) for rank in self._paced.peers)
        members.pop("", None)
        most = {
            rank: over
            for peers, own in self._paced.own
            for rank, over in most_apart(peers, own, self._paced.hosts).items()
        }
        slow = {rank for rank, over in most.items() if np.maximum(over, 0).mean() >= self._paced.noise}
        groups = []
        for ranks in members.values() if len(members) > 1 else ():
            apart, mine = {}, []
            if len(slow.intersection(ranks)) >= max(2, ALIKE * len(ranks)):  # thousands of hosts, few of them slow
                for peers, own in self._paced.own:
                    apart.update(excess_apart(peers, own, ranks))
                mine = self._alike(apart, ranks)
            waiting = self._waiting_for_batches(ranks)
            if len(waiting) > len(mine):
                mine = sorted(waiting)
            else:
                waiting = {}
            if mine and not self._slow_by_others_causes(mine, waiting):
                groups.append(tuple(mine))
        return groups

    def _alike(self, apart: Mapping[int, Int64], ranks: Sequence[int]) -> list[int]:
        """Those of a host's ranks that are slow, by so much in each used step; none where too few of them are, or they
        are so in different steps.
        """
        mine = sorted(rank for rank, over in apart.items() if np.maximum(over, 0).mean() >= self._paced.noise)
        if len(mine) < max(2, ALIKE * len(ranks)):
            return []
        return mine if at_once(np.stack([apart[rank] >= self._paced.noise for rank in mine])) >= _AT_ONCE else []

    def _waiting_for_batches(self, ranks: Sequence[int]) -> dict[int, Int64]:
        """The ranks of a host that were in the loader for many times as long as those of other hosts, and for how much
        longer in each used step; none where too few of them were, or it may be chance.

        While the batch of one of them comes last, the others' devices do not wait for theirs: all but the latest are
        slow by nothing that their devices show, and another of them may be the latest in the next step.
        """
        waited, noise = self._paced.in_loader_per_step_ns, self._paced.noise
        others = [ns for rank, ns in waited.items() if rank not in ranks]
        usual = np.median(others, axis=0) if others else np.zeros(1)
        over = {rank: np.asarray(waited[rank] - usual, dtype=np.int64) for rank in ranks}
        mine = {
            rank: ns
            for rank, ns in over.items()
            if np.maximum(ns, 0).mean() >= noise and waited[rank].mean() >= _MUCH_LONGER * usual.mean()
        }
        if not others or len(mine) < max(2, ALIKE * len(ranks)):
            return {}
        # A wait may last for several steps.
        times = sum(int(np.count_nonzero(np.diff(ns >= noise, prepend=False)) + 1) // 2 for ns in mine.values())
        return {} if all_there_by_chance(len(ranks), len(waited), times) else mine

    def _slow_by_others_causes(self, ranks: Sequence[int], waiting: Mapping[int, Int64]) -> bool:
        """Is any of these ranks of a host slow mainly by its device beyond what all of them are, and these by their
        hosts, or the other way round? Then they hide each other, and are not slow alike. ``waiting``: what they wait
        for batches longer than others in each used step, where they are slow by that.
        """
        over = np.stack(
            [self._paced.peers[rank].excess_ns(rank, ranks)[self._paced.recorded.used].mean(axis=0) for rank in ranks]
        )
        of_device = over[:, _OF_DEVICE].sum(axis=1)
        of_host = over[:, OWN].sum(axis=1) - of_device
        if waiting:
            of_host = np.maximum(of_host, [waiting[rank].mean() for rank in ranks])
        parts = np.maximum(np.stack([of_device, of_host], axis=1), 0)
        shared = parts.min(axis=0)
        beyond = parts - shared
        # Where each is slow in steps of its own, nothing is shared but the kind.
        kind = (shared if shared.max() >= self._paced.noise else np.median(parts, axis=0)).argmax()
        other = beyond.argmax(axis=1) != kind
        much = np.maximum(_OF_ITS_OWN * parts.sum(axis=1), self._paced.noise)
        return bool((other & (beyond.max(axis=1) >= much)).any())

    def _cost(self, ranks: tuple[int, ...], scope: str, *, even: bool = False) -> Straggler | None:
        """What these ranks cost together; None where that is no more than noise."""
        saved = self._paced.saved_at_pace(ranks, even=even)
        if saved is None:
            return None
        cause: str | None = self._causes.of(ranks)
        lost_ns = float(saved.mean())
        if scope == "rank" and self._by_chance(ranks[0], cause, saved):
            return None
        loads_longer = self._causes.load_longer_in_turn if scope == "job" else self._paced.load_longer
        slow_loader = loads_longer(ranks, lost_ns) and not self._causes.as_slow_in_operators(ranks)
        if cause == LOADING and not slow_loader:
            cause = self._causes.on_host(ranks, lost_ns) or self._causes.by_draining(ranks)
        if cause is None or (cause == LOADING and self._causes.by_one_batch(ranks)):
            return None
        if cause != LOADING:
            saved = self._paced.not_by_loading(saved)
            if saved is None:
                return None
            lost_ns = float(saved.mean())
        return Straggler(self._slowest_of(ranks), tuple(sorted(ranks)), scope, cause, lost_ns, saved)

    def _slowest_of(self, ranks: Collection[int]) -> int:
        """That with the most time over its peers."""
        return max(ranks, key=lambda rank: (float(self._paced.excess[rank].sum()), -rank))

    def _by_chance(self, rank: int, cause: str | None, saved: Int64) -> bool:
        """Is what this rank takes longer than its peers, and ``saved`` of each used step are without, little and only
        what comes once, or to all of them now and then?
        """
        peers, own = next((peers, own) for peers, own in self._paced.own if rank in peers.ranks)
        step_ns = self._paced.result.step_ns
        in_long = rests_on_long_steps(saved, own, step_ns)
        if saved.mean() >= least_told_ns(own, step_ns) and not in_long:
            return False
        if rests_on_one_step(saved, self._paced.noise):
            return True
        rows = peers.rows_ns[:, self._paced.recorded.used]
        of_cause = [int(category) for category, name in CAUSES.items() if name == cause]
        line, views = peers.line_of(rank), [own, rows[:, :, of_cause].sum(axis=2)]
        if in_long:  # of the many parts of a long step some differ by much in one of them
            return by_chance(line, views, step_ns) and not any(by_same_share(line, view) for view in views)
        return by_chance(line, [*views, *self._paced.parts_of(peers)], step_ns)


def _slow_stages(
    result: AlignedJob, paced: PacedReplays, hosts: Mapping[int, str], attributed: Collection[int]
) -> list[Straggler]:
    """Pipeline stages that do the same work as others, more slowly; ``attributed`` ranks have their cause already.

    Where all stages of one host are slow, the host is the straggler if that costs more than they do one by one.
    """
    slow = slow_stages(result, attributed)
    stragglers = [one for stage in slow if (one := _slow_stages_cost(paced, (stage,), "stage", hosts)) is not None]
    for name in sorted({name for name in hosts.values() if name}):
        on_host = tuple(stage for stage in slow if {hosts.get(rank) for rank in stage.ranks} == {name})
        if len(on_host) < 2 or not is_a_host(ranks_of(on_host), hosts):
            continue
        straggler = _slow_stages_cost(paced, on_host, "host", hosts)
        alone = [other.lost_ns for other in stragglers if hosts.get(other.rank) == name]
        if straggler is not None and straggler.lost_ns >= TOGETHER * max(alone, default=0.0):
            stragglers = [other for other in stragglers if hosts.get(other.rank) != name]
            stragglers.append(straggler)
    return stragglers


def _slow_stages_cost(
    paced: PacedReplays, stages: tuple[SlowStage, ...], scope: str, hosts: Mapping[int, str]
) -> Straggler | None:
    """What these stages cost together; None where that is no more than noise."""
    ranks = ranks_of(stages)
    saved = paced.saved_at_other_stages_pace(stages)
    replayed = saved is not None
    if saved is None:
        saved = paced.at_most(ranks, np.max([(1 - one.factor) * paced.own_ns(one.slowest) for one in stages], axis=0))
    if saved is None:
        return None
    worst = max(stages, key=lambda stage: 1 / stage.factor)
    scope = "host" if is_a_host(ranks, hosts) else "rank" if len(ranks) == 1 else scope
    cause = CAUSES[worst.row]
    return Straggler(worst.slowest, ranks, scope, cause, float(saved.mean()), saved, replayed=replayed)
