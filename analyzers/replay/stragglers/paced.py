"""Replays with ranks or stages at the pace of others: what each saves of the recorded steps."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.collectives.matched import EXCHANGE
from perfscope.analyzers.replay.engine import ReplayResult, Schedules, replay
from perfscope.analyzers.replay.pace import at_peers_pace, without_holds
from perfscope.analyzers.replay.peers import Peers, find_peers
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.analyzers.replay.step_time import is_trusted, predicted_step_ns
from perfscope.analyzers.replay.stragglers.host_parts import StepParts
from perfscope.analyzers.replay.stragglers.own_time import (
    LARGE,
    NOISE,
    HostBound,
    excess,
    late_loaders,
    own_in_step,
    slow_once,
)
from perfscope.analyzers.replay.stragglers.slow_stages import SlowStage, at_other_stages_pace
from perfscope.analyzers.replay.stragglers.straggler import OWN
from perfscope.analyzers.replay.uneven_sizes import UnevenSizes
from perfscope.trace.trace import Float64, Int64

_UNPAIRED: Final = 0.25
"""Share of a rank's messages without a known other end from which a replay may not hold who waits for it."""


class PacedReplays:
    """One job's ranks beside their peers, and what the steps take with some of them at their peers' pace."""

    def __init__(
        self,
        result: AlignedJob,
        recorded: RecordedSchedules,
        base: ReplayResult,
        hosts: Mapping[int, str],
        core_ns: Mapping[int, Int64] | None = None,
    ) -> None:
        self.core_ns = core_ns or {}
        """Rank -> how long it waited for a core in each used step; empty where not recorded."""
        self._uneven_sizes = UnevenSizes(result)
        self._parts: dict[tuple[int, ...], list[Int64]] = {}
        groups = find_peers(result, recorded)
        self.result, self.recorded, self.base = result, recorded, base
        self.host_bound = HostBound.of(result, recorded)
        self.beside_hosts = _replayed_beside_hosts(result, recorded)
        self.steps_ns = recorded.steps_ns(base if self.beside_hosts is None else self.beside_hosts)
        replayed_ns = float(self.steps_ns.mean())
        # No rank can be charged with the replay's own error.
        self.noise = NOISE * replayed_ns + abs(replayed_ns - result.step_ns)
        self.peers = {rank: peers for peers in groups for rank in peers.ranks}
        self.hosts = hosts
        self.on_devices = all(partial.has_device_work for partial in result.partials.values())
        waited = {
            rank: partial.loading.waited_ns[partial.steps.indices_of(result.steps)]
            for rank, partial in result.partials.items()
        }
        self.in_loader_per_step_ns = waited
        self.in_loader_ns = {rank: float(ns.mean()) for rank, ns in waited.items()}
        found = recorded.deliveries
        unheld = {rank for rank in recorded.hidden_loading if not found[rank].timed}
        self.loading_ns = {rank: ns for rank, ns in recorded.loading_step_ns(result).items() if rank not in unheld}
        # At its peers' pace a rank loads as ranks usually do: also where all are brought to it.
        loading = [self.loading_ns.get(rank, 0.0) for rank in recorded.schedules.ranks]
        self.usual_loading_ns = float(np.median(loading))
        self.copying_ns = {rank: float(ns.mean()) for rank, ns in result.copied_beside_ns.items()}
        self.usual_copying_ns = float(np.median(list(self.copying_ns.values())))
        self.loaded_first_ns = np.array([waited[rank][0] for rank in recorded.schedules.ranks])
        self.own = [(peers, own_in_step(recorded, peers)) for peers in groups]
        self.excess = {rank: over for peers, own in self.own for rank, over in excess(peers, own).items()}
        over = {rank: float(np.maximum(excess, 0).mean()) for rank, excess in self.excess.items()}
        self.slow = [rank for rank in sorted(over, key=lambda rank: -over[rank]) if over[rank] >= self.noise]
        self.behind_hosts = self._behind_hosts()
        self.slow_once = {rank for peers, own in self.own for rank in slow_once(peers, own)}
        for peers, own in self.own:
            self.slow_once.update(late_loaders(peers, own, recorded.used, result.step_ns))

    def _behind_hosts(self) -> list[int]:
        """Ranks whose hosts are busy for longer than their peers', and whose devices are hardly slower, where hosts are
        replayed: what a host issues late besides, as FSDP's gathers, the others wait for as well.
        """
        if self.beside_hosts is None:
            return []
        slow = set(self.slow)
        longer = {
            rank: float(ns.mean())
            for peers, _ in self.own
            for rank, ns in zip(peers.ranks, self.host_bound.busier_among_ns(peers.ranks), strict=True)
            if rank not in slow and ns.mean() >= self.noise
        }
        return sorted(longer, key=lambda rank: -longer[rank])

    def saved_at_pace(self, ranks: Collection[int], *, even: bool = False) -> Int64 | None:
        """``saved`` with these ranks at their peers' pace; ``even``: with the same work, loaders as they are."""
        paced, with_hosts = sorted(ranks), self.beside_hosts is not None
        schedules = at_peers_pace(self.recorded, self.peers, paced, even=even, with_hosts=with_hosts)
        return self.saved(self.moving_as_much(schedules, paced), paced, loading=not even)

    def moving_as_much(self, schedules: Schedules, ranks: Collection[int]) -> Schedules:
        """``schedules`` with all-to-alls as long as where ``ranks`` send and receive no more than the mean of all."""
        moved = self._uneven_sizes.transfers_ns(schedules.instance, schedules.transfer_ns, ranks)
        return replace(schedules, transfer_ns=moved)

    def saved_at_other_stages_pace(self, stages: Sequence[SlowStage]) -> Int64 | None:
        """``saved`` with these stages as quick as the others."""
        changed = at_other_stages_pace(self.result, self.recorded, stages, with_hosts=self.beside_hosts is not None)
        return self.saved(changed, ranks_of(stages), loading=False)

    def own_ns(self, rank: int) -> Int64:
        """What a rank works itself in each used step."""
        return np.asarray(self.result.totals[rank][:, OWN].sum(axis=1), dtype=np.int64)

    def at_most(self, ranks: Collection[int], longer_ns: Float64 | Int64) -> Int64 | None:
        """What these ranks, which take so much longer for the same work in each used step, cost it where the other ends
        of their messages were not found, so that no replay shows who waits for them; None where that is no more than
        noise, or their messages were paired up.

        A step can be shorter by no more than that, and by no more than what the busiest of them works longer than any
        other rank: the others would wait for that one then.
        """
        if not _unpaired(self.result, ranks):
            return None
        mine, others = (
            np.max([self.own_ns(rank) for rank in self.result.totals if (rank in ranks) is among], axis=0)
            for among in (True, False)
        )
        per_step = np.minimum(longer_ns, np.maximum(mine - others, 0))
        return np.rint(per_step).astype(np.int64) if per_step.mean() >= self.noise else None

    def saved(
        self, schedules: Schedules, paced: Collection[int], *, loading: bool = True, noise_ns: float = math.inf
    ) -> Int64 | None:
        """By how much each used step is shorter with ``schedules``, in which ``paced`` ranks are no slower than others,
        nor their loader workers (``loading``); None where that is no more than noise, or than ``noise_ns`` if that is
        less. Their mean is what a what-if predicts.
        """
        schedules, lifted = without_holds(schedules) if paced else (schedules, False)
        replayed = replay(schedules)
        if not replayed.complete:
            return None
        recorded, result = self.recorded, self.result
        base = self.base if replayed.host_mark_ns is None else self.beside_hosts
        assert base is not None
        before = recorded.steps_ns(base)
        kept = [ns for rank, ns in self.loading_ns.items() if not loading or rank not in paced]
        copying = [min(ns, self.usual_copying_ns) if rank in paced else ns for rank, ns in self.copying_ns.items()]
        floors = [self.usual_loading_ns, *kept, *copying]
        if replayed.host_mark_ns is None:
            floors.append(self.host_bound.least_ns(paced, before))
        step_ns = predicted_step_ns(
            recorded, replayed, base, settling=0, steps_alike=False, lifted=lifted, floors_ns=floors
        )
        per_step = before - recorded.steps_ns(replayed)
        mean, saved_ns = float(per_step.mean()), result.step_ns * (1 - step_ns / float(before.mean()))
        # Ranks do not begin a recording together, and no rank causes that skew: where no step before the first used one
        # was recorded, a saving in that step alone is evidence only where a batch is seen to come late.
        only_first = len(per_step) > 1 and recorded.used[0] and per_step[1:].sum() <= 0
        if mean <= 0 or saved_ns < min(self.noise, noise_ns):
            return None
        if only_first and not (paced and self.load_longer(paced, saved_ns)):
            return None
        return np.asarray(np.rint(per_step * (saved_ns / mean)), dtype=np.int64)

    def not_by_loading(self, saved: Int64) -> Int64 | None:
        """What of ``saved`` (each used step) ranks at their peers' pace save though no workers hold any rank up before
        and after; None where that is no more than noise. Workers that set the pace now and then hold ranks up as they
        happened to, and the floors that stand for their pace are below that: no rank's work causes the difference.
        """
        saved_ns = float(saved.mean())
        left_ns = saved_ns - self._by_loading_ns
        if left_ns < self.noise:
            return None
        return np.asarray(np.rint(saved * (left_ns / saved_ns)), dtype=np.int64)

    @functools.cached_property
    def _by_loading_ns(self) -> float:
        """By how much the recorded steps are shorter on average where no workers hold ranks up, and their batches come
        at the pace of their loaders.
        """
        base = self.base if self.beside_hosts is None else self.beside_hosts
        schedules = self.recorded.schedules if self.beside_hosts is None else self.recorded.with_hosts
        assert schedules is not None
        schedules, lifted = without_holds(schedules)
        replayed = replay(schedules) if lifted else base
        if not lifted or not replayed.complete:
            return 0.0
        before_ns = self.recorded.step_time_ns(base)
        step_ns = predicted_step_ns(
            self.recorded, replayed, base, settling=0, steps_alike=False, lifted=True,
            floors_ns=[self.usual_loading_ns, *map(self._delivering_ns, self.loading_ns)],
        )  # fmt: skip
        return max(self.result.step_ns * (1 - step_ns / before_ns), 0.0)

    def _delivering_ns(self, rank: int) -> float:
        """What a rank's workers take for the batches of a step, where that is known; else what its loading bounds."""
        batch_ns = self.recorded.deliveries[rank].batch_ns
        whole = math.inf if batch_ns is None else batch_ns * self.result.batches_per_step[rank]
        return min(whole, self.loading_ns[rank])

    def parts_of(self, peers: Peers) -> list[Int64]:
        """Own time of peers [rank, used step], ns, part by part: on CPUs each operator, and each phase for the time
        between its operators, that takes a noticeable time in some step. In one of them a delay is plain that the noise
        of the rest hides.
        """
        if self.result.partials[peers.ranks[0]].has_device_work:
            return []
        if peers.ranks not in self._parts:
            steps = self.result.steps
            each = [StepParts.of(self.result, rank, steps).longest(0) for rank in peers.ranks]
            names = dict.fromkeys(name for parts in each for name in parts)
            nothing = np.zeros(len(steps), np.int64)
            found = [np.stack([parts.get(name, nothing) for parts in each]) for name in names]
            self._parts[peers.ranks] = [part for part in found if part.max() >= LARGE * self.result.step_ns]
        return self._parts[peers.ranks]

    def load_longer(self, ranks: Collection[int], lost_ns: float) -> bool:
        """Are these ranks in the loader for so much longer than the others? Where all loaders are slow, they may differ
        only in that their devices have no work left to overlap that.
        """
        others = [waited for rank, waited in self.in_loader_ns.items() if rank not in ranks]
        usual = float(np.median(others)) if others else 0.0
        return max(self.in_loader_ns[rank] for rank in ranks) - usual >= lost_ns / 2


def ranks_of(stages: Collection[SlowStage]) -> tuple[int, ...]:
    """The ranks of these stages, in order."""
    return tuple(sorted(rank for stage in stages for rank in stage.ranks))


def _unpaired(result: AlignedJob, ranks: Collection[int]) -> bool:
    """Are many messages of these ranks without a known other end?"""
    mine = result.matched.instance[np.isin(result.matched.rank, list(ranks))]
    messages = result.matched.instances.is_kind((EXCHANGE,))[mine]
    return int(result.unpaired_messages[mine].sum()) > _UNPAIRED * int(messages.sum())


def _replayed_beside_hosts(result: AlignedJob, recorded: RecordedSchedules) -> ReplayResult | None:
    """The unchanged replay with hosts beside their devices, where that replays what was recorded."""
    if recorded.with_hosts is None:
        return None
    replayed = replay(recorded.with_hosts)
    return replayed if is_trusted(recorded, replayed, result.step_ns) else None
