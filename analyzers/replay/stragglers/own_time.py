"""By how much ranks' own time exceeds that of ranks with the same work, and how short a step can be for the hosts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.replay.pace import came_later_ns
from perfscope.analyzers.replay.peers import Peers
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.medians import SIGMA_OF_MAD
from perfscope.trace.trace import Bool, Float64, Int64

NOISE: Final = 0.02
"""Share of the step below which a straggler's cost is noise."""

LARGE: Final = 0.05
"""Share of the step from which a straggler's cost is told, whatever it comes from."""

_IN_TURN: Final = 4.0
"""How many times the usual distance the slowest rank of a step must be above the median to count as slow: the slowest
of many ranks is always above the median, but only pauses are of that size."""

_NOTICEABLE: Final = 0.05
"""Share of the step from which a loader is late."""
_OFTEN: Final = 0.25
"""Share of the steps in which some loader must be late."""
_AGAIN: Final = 3
"""Steps in which each of them must be."""
_MAIN: Final = 0.5
"""Part of what it loads for longer, at least, by which a rank's whole own time must be longer."""

_WAITED_FOR: Final = 0.05
"""A rank's host limits it where its device waits for launches for this share of the step: a host whose queue is full is
busy all the time too, inside its launches."""

_WORK_VARIES: Final = 0.03
"""Relative standard deviation of FLOPs, without each step's and each rank's mean, from which work varies."""
_FELT: Final = 0.015
"""Relative standard deviation of compute by its FLOPs from which that is felt: of a thousand ranks the busiest then
takes 5 % longer than the mean."""
_FOLLOWS: Final = 0.9
"""From this correlation on compute takes as long as its FLOPs."""


def own_in_step(recorded: RecordedSchedules, peers: Peers) -> Int64:
    """Own time of each rank (lines) in each used step (columns), with what made it come late to the first one."""
    own = peers.in_step_ns[:, recorded.used]
    if recorded.used[0]:
        lines = [recorded.schedules.line_of(rank) for rank in peers.ranks]
        lead = np.where(recorded.late[lines], over_others(recorded.lead_ns[lines, None])[:, 0], 0)
        own[:, 0] += came_later_ns(over_others(recorded.bound_ns[lines]), lead).astype(np.int64)
    return own


def excess(peers: Peers, own: Int64) -> dict[int, Int64]:
    """By how much each rank's own time exceeds the median of the others in each used step."""
    return dict(zip(peers.ranks, over_others(own), strict=True))


def over_others(values: Int64) -> Int64:
    """By how much each value exceeds the median of the others of its column."""
    order = np.sort(values, axis=0)
    place = np.empty(values.shape, dtype=np.int64)
    np.put_along_axis(place, np.argsort(values, axis=0, kind="stable"), np.arange(len(values))[:, None], axis=0)
    left = len(values) - 1

    def remaining(index: int) -> Int64:
        """The value at this place of the order once one is taken out of it, for each."""
        return np.asarray(np.where(place > index, order[index], order[index + 1]), dtype=np.int64)

    return np.asarray(values - (remaining((left - 1) // 2) + remaining(left // 2)) // 2, dtype=np.int64)


def excess_apart(peers: Peers, own: Int64, ranks: Collection[int]) -> dict[int, Int64]:
    """The same for those peers that are in ``ranks``, against those that are not; empty where either is empty."""
    mine = np.isin(peers.ranks, list(ranks))
    if mine.all() or not mine.any():
        return {}
    over = own[mine] - np.median(own[~mine], axis=0).astype(np.int64)
    return dict(zip(np.array(peers.ranks)[mine].tolist(), over, strict=True))


def most_apart(peers: Peers, own: Int64, hosts: Mapping[int, str]) -> dict[int, Int64]:
    """An upper bound of ``excess_apart`` of each rank against those of other hosts, quickly for all of them.

    Of n sorted values, k of which are taken out, the middle one of the rest is no lower than place (n - k - 1) // 2.
    """
    names = [hosts.get(rank, "") for rank in peers.ranks]
    on_host = Counter(names)
    order = np.sort(own, axis=0)
    return {
        rank: own[index] - order[max(len(own) - on_host[names[index]] - 1, 0) // 2]
        for index, rank in enumerate(peers.ranks)
    }


def steadiness(own: Int64) -> float:
    """Variance between ranks (lines) over that from step to step (columns), the F of an analysis of variance; inf where
    nothing varies from step to step, or one step does not show that.
    """
    ranks, steps = own.shape
    if ranks < 2 or steps < 2:
        return math.inf
    between = steps * float(own.mean(axis=1).var(ddof=1))
    within = float((from_step_to_step(own) ** 2).sum()) / ((ranks - 1) * (steps - 1))
    return between / within if within else math.inf


def flops_per_step(result: AlignedJob, ranks: Iterable[int]) -> Float64:
    """Model FLOPs of each rank (lines) in each used step (columns)."""
    own = [(result.partials[rank].flops.model, result.partials[rank].steps) for rank in ranks]
    return np.stack([model.sum(axis=0)[steps.indices_of(result.steps)] for model, steps in own]).astype(np.float64)


def flops_vary(flops: Float64) -> bool:
    """Does the work of ranks (lines) vary from step to step (columns)? Not where any of it is unknown (0)."""
    return bool(flops.all()) and varies_by(flops) >= _WORK_VARIES


def compute_varies(flops: Float64, compute_ns: Int64) -> bool:
    """Does the work of ranks (lines) vary from step to step (columns), and compute with it? It may vary by little that
    matters: the tokens of small experts.
    """
    if not flops_vary(flops):
        return False
    felt = ns_per_flop(flops, compute_ns) * float(from_step_to_step(flops).std())
    return felt >= _FELT * float(compute_ns.mean())


def ns_per_flop(flops: Float64, compute_ns: Int64 | Float64) -> float:
    """What compute takes longer for each FLOP more, from step to step, by least squares."""
    varies = from_step_to_step(flops)
    return float((from_step_to_step(compute_ns) * varies).sum()) / max(float((varies**2).sum()), 1.0)


def flops_differ(flops: Float64, compute_ns: Int64) -> bool:
    """Do ranks (lines) have different work in the only step (column), and compute as long as that takes? Whether it is
    always the same ones that have more, one step does not show.
    """
    if flops.shape[1] != 1 or len(flops) < 2 or not flops.all():
        return False
    work, taken = flops[:, 0], compute_ns[:, 0]
    if work.std() < _WORK_VARIES * work.mean() or not taken.std():
        return False
    return bool(np.corrcoef(work, taken)[0, 1] >= _FOLLOWS)


def varies_by(work: Float64) -> float:
    """Standard deviation of ranks' (lines) work from step to step (columns) over the mean; 0 for less than two."""
    if min(work.shape) < 2:
        return 0.0
    return float(from_step_to_step(work).std() / work.mean())


def from_step_to_step(values: Int64 | Float64) -> Float64:
    """Without each rank's (line) and each step's (column) mean."""
    apart = values - values.mean(axis=1, keepdims=True) - values.mean(axis=0) + values.mean()
    return np.asarray(apart, dtype=np.float64)


def slow_once(peers: Peers, own: Int64) -> list[int]:
    """Ranks that were the slowest of some used step, and far slower than ranks usually differ."""
    return [peers.ranks[line] for line in np.flatnonzero(_slow(own, NOISE * float(np.median(own))).any(axis=1))]


def late_loaders(peers: Peers, own: Int64, used: Bool, step_ns: float) -> list[int]:
    """Ranks whose loading is the longest now and then, plainly beside its own noise, where computing may vary by more:
    two or more of them, in many steps (of ``step_ns``) together.
    """
    loading = peers.rows_ns[:, used, TimeCategory.DATALOADER]
    slow = _slow(loading, _NOTICEABLE * step_ns)
    late = [
        line
        for line in np.flatnonzero(slow.sum(axis=1) >= _AGAIN).tolist()
        if _is_later(slow[line], line, own, loading)
    ]
    if slow[late].any(axis=0).mean() < _OFTEN or len(late) < 2:
        return []
    return [peers.ranks[line] for line in late]


def _slow(times: Int64, least: float) -> Bool:
    """Where a rank (line) is the slowest of its step (column), and far slower than ranks usually differ."""
    distance = times - np.median(times, axis=0)
    usual = float(np.median(np.abs(distance))) * SIGMA_OF_MAD
    far = (distance > _IN_TURN * usual) & (distance > least)
    return np.asarray(far & (times == times.max(axis=0)), dtype=np.bool_)


def _is_later(slow: Bool, line: int, own: Int64, loading: Int64) -> bool:
    """Is a rank's whole own time longer in its slow steps, and not only something else shorter?"""
    if slow.all():
        return False
    whole, of_loading = (
        (times[line] - np.median(times, axis=0))[slow].mean() - (times[line] - np.median(times, axis=0))[~slow].mean()
        for times in (own, loading)
    )
    return bool(whole >= _MAIN * of_loading)


@dataclass(frozen=True, eq=False)
class HostBound:
    """How short a step can be for the hosts: a device cannot be quicker than its host launches.

    ``busy_ns``: for which time each rank's host (lines) was busy in each used step (columns), without blocking calls
    and the loader. ``limits`` marks the ranks whose devices wait for that. A device's idle time before a launch does
    not show how slow its host is: where all hosts take as long, the rank whose peers happened to launch earlier waits
    more than they do, and hosts of other stages launch while their devices wait for messages.
    """

    ranks: tuple[int, ...]
    busy_ns: Int64
    limits: Bool

    @classmethod
    def of(cls, result: AlignedJob, recorded: RecordedSchedules) -> HostBound:
        """That of all ranks. On CPUs the hosts are the devices, and nothing limits them."""
        busy, limits = [], []
        for rank in recorded.schedules.ranks:
            partial, (start, end) = result.partials[rank], result.windows[rank]
            busy.append(partial.progress.host_busy_ns[partial.steps.indices_of(result.steps)])
            waited = partial.progress.own.totals(start, end)[:, [TimeCategory.LAUNCH, TimeCategory.HOST]].sum()
            limits.append(partial.has_device_work and waited >= _WAITED_FOR * (end - start).sum())
        return cls(recorded.schedules.ranks, np.stack(busy), np.array(limits, dtype=np.bool_))

    def busier_among_ns(self, ranks: Sequence[int]) -> Int64:
        """For how much longer the host of each of these ranks (lines; two or more) was busy in each used step than the
        median of the others of them.
        """
        line = {rank: line for line, rank in enumerate(self.ranks)}
        return over_others(self.busy_ns[[line[rank] for rank in ranks]])

    def busier_ns(self, rank: int, others: Collection[int]) -> Int64:
        """For how much longer a rank's host was busy per used step than the median of the others; 0 without any."""
        busy = self.busy_ns[self.ranks.index(rank)]
        rest = np.isin(self.ranks, list(others))
        usual = np.median(self.busy_ns[rest], axis=0).astype(np.int64) if rest.any() else busy
        return np.asarray(busy - usual, dtype=np.int64)

    def least_ns(self, paced: Collection[int], steps_ns: Int64) -> float:
        """What a step takes at least with the hosts of ``paced`` no slower than the median of the others; of no step
        more than it took (``steps_ns``).
        """
        mine = np.isin(self.ranks, list(paced))
        busy = np.where(self.limits[:, None], self.busy_ns, 0)
        if mine.any() and not mine.all():
            usual = np.median(self.busy_ns[~mine], axis=0).astype(np.int64)
            busy[mine] = np.minimum(busy[mine], usual)
        return float(np.minimum(busy.max(axis=0), steps_ns).mean())
