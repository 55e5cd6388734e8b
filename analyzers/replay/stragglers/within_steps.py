"""Work that differs between ranks from one collective to the next: each time another of them is the slowest.

Over a whole step all of them may take about as long, as where every layer's experts get tokens of their own: no
comparison of steps shows it, though all wait for one another at each collective. What ranks compute between the same
two collectives does. Kernels' durations vary by some percent in all of these, so what differs counts only where it is
far above what the quieter part of the step has. A rank that takes longer in all of them is slow, or has a larger batch:
what is compared is without each rank's own pace in the step.

Example, compute of two ranks between five collectives: 10 30 10 10, and 10 10 10 30. Each takes 60 in all, and waits
for the other for 20.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.replay.engine import Schedules
from perfscope.analyzers.replay.pace import with_own_time
from perfscope.analyzers.replay.peers import Peers, progress_at
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.analyzers.replay.stragglers.own_time import flops_per_step
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Bool, Float64, Int64

_DIFFERS: Final = 0.05
"""Share of the step that the slowest ranks between collectives must be above the mean, together."""
_ABOVE_NOISE: Final = 2.0
"""How many times what kernels' own variation brings that must be: where nothing else varies it is 1.2 at most."""
_QUIET: Final = 0.25
"""Part of the compute whose deviations are taken to be noise: the smallest ones."""
_AT_QUIET: Final = 0.3186
"""Standard deviations of a normal distribution within which that part of it is."""
_LARGEST_PART: Final = 2 / 3
"""Of what the slowest ranks are above the mean, at most, one rank's: with more it is that rank that does more."""
_FEWEST: Final = 8
"""Stretches between collectives, over all steps, below which these do not tell noise from work."""
_SLOWER: Final = 1.03
"""From this ratio of a rank's pace to the mean on it is slow: kernels' durations differ by some percent."""
_EQUAL: Final = 0.005
"""Relative standard deviation of FLOPs up to which ranks have the same work, as far as FLOPs are known."""
_UNCOUNTED: Final = 0.5
"""Part of the compute without FLOPs, at most, that may be a difference which FLOPs do not show."""


@dataclass(frozen=True, eq=False)
class ComputeBetween:
    """Compute of peers [rank, segment] between the collectives that all of them issue, ns, and each rank's pace: how
    many times as long as the mean of all it takes in the middle of these.
    """

    compute_ns: Int64
    pace: Float64

    @classmethod
    def of(cls, result: AlignedJob, recorded: RecordedSchedules, peers: Peers) -> ComputeBetween:
        """That of all recorded steps; the pace of the used ones."""
        lines = []
        for rank, anchors in zip(peers.ranks, peers.anchors, strict=True):
            progress = progress_at(recorded.schedules.own_ns[recorded.schedules.slice_of(rank)], anchors)
            lines.append(recorded.rows_between(result, rank, progress)[:, TimeCategory.COMPUTE])
        compute = np.stack(lines)
        return cls(compute, paces(compute[:, recorded.used[peers.step]]))

    def longer_ns(self, step: Int64, used: Bool, used_ns: float) -> float:
        """What ``differs`` says of the ``used`` steps, without each rank's pace in each of them; ``step`` is the index
        of each segment's.
        """
        even = self.compute_ns.astype(np.float64)
        for number in np.flatnonzero(used).tolist():
            mine = step == number
            even[:, mine] /= paces(self.compute_ns[:, mine])[:, None]
        return differs(even[:, used[step]], used_ns)

    def slow(self) -> dict[int, float]:
        """Lines of the ranks that take longer in most of the segments, with how many times as long."""
        return {line: float(self.pace[line]) for line in np.flatnonzero(self.pace >= _SLOWER).tolist()}

    def evened(self, recorded: RecordedSchedules, peers: Peers, slower: Mapping[int, float]) -> Schedules:
        """Schedules in which each rank has as much to compute in each segment as the others, at its own pace. Ranks
        that are ``slower`` take so many times as long for the same work; where none is known to, the middle of the
        segments tells, in which a rank may have more work by chance.
        """
        paces = {peers.line_of(rank): factor for rank, factor in slower.items()} or self.slow()
        pace = np.array([[paces.get(line, 1.0)] for line in range(len(self.pace))])
        even = pace * (self.compute_ns / pace).mean(axis=0)
        target = np.maximum(np.rint(peers.own_ns - self.compute_ns + even), 0).astype(np.int64)
        return with_own_time(recorded, {rank: (peers, own) for rank, own in zip(peers.ranks, target, strict=True)})


def paces(compute_ns: Int64) -> Float64:
    """How many times as long each rank (lines) takes as the mean of all, in the middle of the segments (columns) by how
    long they take: what has more to do in some of them only is as fast.
    """
    mean = compute_ns.mean(axis=0)
    if not mean.any():
        return np.ones(len(compute_ns))
    ratio = (compute_ns / np.maximum(mean, 1.0))[:, mean > 0]
    weight = mean[mean > 0]
    middle = np.array([_quantile(each, weight, 0.5) or 1.0 for each in ratio])
    return np.asarray(middle / middle.mean(), dtype=np.float64)


def differs(own: Float64, used_ns: float) -> float:
    """For how much longer the slowest rank (lines) of each segment (columns) computes than the mean, ns in all; 0 where
    that is little of the steps' time ``used_ns``, one rank's, or noise. ``own`` is without the ranks' pace.

    Noise of n kernels grows with the root of n, so deviations are compared over the root of what they are of.
    """
    even = own[:, own.any(axis=0)]
    ranks, segments = even.shape
    if ranks < 2 or segments < _FEWEST:
        return 0.0
    mean = even.mean(axis=0)
    ahead = even.max(axis=0) - mean
    total = float(ahead.sum())
    if total < _DIFFERS * used_ns:
        return 0.0
    mine = np.bincount(even.argmax(axis=0), weights=ahead, minlength=ranks)
    apart = np.abs(even - mean) / np.sqrt(mean) * np.sqrt(ranks / (ranks - 1))
    usual = _quantile(apart.ravel(), np.broadcast_to(mean, apart.shape).ravel(), _QUIET) / _AT_QUIET
    by_noise = _largest_of(ranks) * usual * float(np.sqrt(mean).sum())
    return total if mine.max() <= _LARGEST_PART * total and total >= _ABOVE_NOISE * by_noise else 0.0


def all_recorded(result: AlignedJob, ranks: tuple[int, ...]) -> bool:
    """Are all ranks that share a group with these in the recording? Those that are not may be the slowest ones."""
    groups = {group for rank in ranks for group in result.partials[rank].collectives.groups}
    known = set(result.partials)
    return all(group.size == len(group.ranks) and known.issuperset(group.ranks) for group in groups)


def same_by_flops(result: AlignedJob, peers: Peers, used: Bool, longer_ns: float) -> bool:
    """Do the FLOPs show that these ranks have the same work, and is ``longer_ns`` (of all used steps) too much to come
    from kernels whose FLOPs are not known?
    """
    flops = flops_per_step(result, peers.ranks)
    if not flops.all() or (flops - flops.mean(axis=0)).std() > _EQUAL * flops.mean():
        return False
    counted = 0.0
    for rank in peers.ranks:
        partial = result.partials[rank]
        counted += float(partial.tables.kernels.flops_ns[:, partial.steps.indices_of(result.steps)].sum())
    whole = float(peers.rows_ns[:, used, TimeCategory.COMPUTE].sum())
    return longer_ns > _UNCOUNTED * max(whole - counted, 0.0) / len(peers.ranks)


def _largest_of(ranks: int) -> float:
    """By how many standard deviations the largest of so many normal draws is above their mean, about (Blom)."""
    place = (ranks - 0.375) / (ranks + 0.25)
    return NormalDist().inv_cdf(place)


def _quantile(values: Float64, weights: Float64, part: float) -> float:
    """The value below which this part of the weight is."""
    order = np.argsort(values, kind="stable")
    passed = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(passed, part * passed[-1])])
