"""Pipeline stages that take longer than the others for the same work.

The ranks of one stage are each other's peers, so a stage that is slow as a whole has no slow rank. Stages that compute
the same number of FLOPs do the same work, and so do those that run the same kernels about as often, with as many FLOPs
in each as far as that is known: among those, one that takes longer than their median is slow. A stage with more work
than the others is not slow but too big: that is imbalance, which the pipeline's table shows.

On CPUs operators are what kernels are elsewhere, and each shows how long it takes, whatever else a stage does: all
stages whose products are of one size are compared by these, and all by what their hosts do between operators. What
stages do there is never quite the same, so there a stage is slow from a larger excess on, as in step histories.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.pipelines.stages import ranks_of, stages
from perfscope.analyzers.rank.host_lane import HostTime
from perfscope.analyzers.rank.work.tables import OperatorTimes
from perfscope.analyzers.replay.engine import Schedules
from perfscope.analyzers.replay.pace import scaled, scaled_beside
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.analyzers.replay.stragglers.own_time import NOISE, flops_per_step
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.results.rows import UNLIKE_STAGES
from perfscope.trace.trace import Float64, Int64

SAME_WORK: Final = 0.02
"""Stages whose FLOPs differ by no more than this share do the same work."""

SAME_KERNELS: Final = 0.85
"""Share of its kernels that a stage must have in common with another where FLOPs are not known. The embedding and the
loss are a few of many; a layer more in a stage of four is a fifth."""

_COMPARED: Final = (TimeCategory.COMPUTE, TimeCategory.LAUNCH, TimeCategory.HOST)
"""Categories that stages have in common. Only some of them load batches, copy or print."""

_COMPARED_ROWS: Final = [int(row) for row in _COMPARED]

_COMMUNICATES: Final = re.compile(r"(c10d|gloo|_c10d_functional|record_param_comms)\b")
"""Operators without a device that communicate: they hold waits for other ranks."""

_BY_HOST: Final = [_COMPARED.index(TimeCategory.LAUNCH), _COMPARED.index(TimeCategory.HOST)]


@dataclass(frozen=True, eq=False)
class SlowStage:
    """At the other stages' pace ``ranks`` take ``factor`` times their own time; ``row`` is the category in which they
    exceed it most, ``slowest`` the rank with the most own time. Of that their devices take ``compute`` times as long
    for their work, and their hosts ``host`` times for all but loading; ``left`` is the same by category of own time.
    """

    ranks: tuple[int, ...]
    slowest: int
    row: TimeCategory
    factor: float
    compute: float
    host: float
    left: Float64


def slow_stages(result: AlignedJob, attributed: Collection[int]) -> list[SlowStage]:
    """Stages all of whose ranks are slower than the stages of the same work; empty without a pipeline."""
    members = ranks_of(stages(result))
    flops = {stage: _flops(result, ranks) for stage, ranks in members.items()}
    paces = {stage: [_WorkPace.of(result, rank) for rank in ranks] for stage, ranks in members.items()}
    together = {stage: _WorkPace.mean(mine) for stage, mine in paces.items()}
    stragglers = []
    for stage, ranks in members.items():
        mine, others = together[stage], {other: pace for other, pace in together.items() if other != stage}
        alike = [pace for other, pace in others.items() if _same(flops[other], flops[stage]) or mine.does_like(pace)]
        compared = alike if mine.on_device else list(others.values())
        if not compared or any(rank in attributed for rank in ranks):
            continue
        excess = np.min([pace.excess(compared, alike) for pace in paces[stage]], axis=0)
        total = min(float(pace.rows.sum()) for pace in paces[stage])
        # What waits for data seems to save more at another stage's pace than it takes longer.
        if (NOISE if mine.on_device else UNLIKE_STAGES) * result.step_ns <= excess.sum() < total:
            slowest = max(zip(ranks, paces[stage], strict=True), key=lambda pair: float(pair[1].rows.sum()))[0]
            row = _COMPARED[int(excess.argmax())]
            factor = (total - float(excess.sum())) / total
            compute = 1 - float(excess[0]) / max(min(pace.rows[_COMPARED[0]] for pace in paces[stage]), 1.0)
            host = max(pace.host_factor(compared) for pace in paces[stage]) if excess[_BY_HOST].any() else 1.0
            least = np.min([pace.rows[_COMPARED_ROWS] for pace in paces[stage]], axis=0)
            left = np.ones(len(TimeCategory))
            left[_COMPARED_ROWS] = np.maximum(1 - excess / np.maximum(least, 1), 0)
            stragglers.append(SlowStage(ranks, slowest, row, factor, compute, host, left))
    return stragglers


def at_other_stages_pace(
    result: AlignedJob, recorded: RecordedSchedules, slow: Sequence[SlowStage], *, with_hosts: bool
) -> Schedules:
    """Schedules in which these stages are as quick as the others. ``with_hosts``: those with hosts beside their
    devices, where what a slow host delays is not in proportion to what its device computes; but for pauses.
    """
    on_cpus = not any(result.partials[rank].has_device_work for stage in slow for rank in stage.ranks)
    if on_cpus or any(stage.row is TimeCategory.HOST for stage in slow):
        return _by_category(result, recorded, slow)
    if recorded.with_hosts is None or not with_hosts:
        schedules = recorded.schedules
        for stage in slow:
            schedules = scaled(schedules, stage.ranks, stage.factor)
        return schedules
    schedules = recorded.with_hosts
    for stage in slow:
        of_host = np.array([1.0 if row is HostTime.LOADER else stage.host for row in HostTime])
        schedules = scaled_beside(recorded, schedules, stage.ranks, stage.compute, of_host)
    return schedules


def _by_category(result: AlignedJob, recorded: RecordedSchedules, slow: Sequence[SlowStage]) -> Schedules:
    """Each category of own time is shorter where it is: a pause before the first message delays more than one that
    comes while the rank would wait.
    """
    schedules = recorded.schedules
    own = schedules.own_ns.copy()
    for stage in slow:
        for rank in stage.ranks:
            span = schedules.slice_of(rank)
            rows = recorded.rows_between(result, rank, np.concatenate(([0], np.cumsum(own[span]))))
            own[span] = np.diff(np.rint(np.cumsum(own[span] - (rows * (1 - stage.left)).sum(axis=1))), prepend=0)
    return replace(schedules, own_ns=np.maximum(own, 0))


def _same(one: float, other: float) -> bool:
    return one > 0 and abs(one - other) <= SAME_WORK * max(one, other)


def _per_step(
    names: Sequence[str], chosen: Sequence[bool], count: Int64, total_ns: Int64
) -> dict[str, tuple[float, float]]:
    """Of these lines of a table: how often and how long in all, mean over the steps."""
    lines = zip(names, chosen, count.mean(axis=1).tolist(), total_ns.mean(axis=1).tolist(), strict=True)
    return {name: (often, ns) for name, is_chosen, often, ns in lines if is_chosen and often}


def _flops_of_calls(operators: OperatorTimes, chosen: Int64) -> dict[str, float]:
    """Operator -> FLOPs of one call of it, mean over those of these steps."""
    count = operators.count[operators.flops_line][:, chosen].sum(axis=1).tolist()
    flops = operators.flops[:, chosen].sum(axis=1).tolist()
    names = [operators.names[line] for line in operators.flops_line.tolist()]
    return {name: all_ / often for name, often, all_ in zip(names, count, flops, strict=True) if often and all_ > 0}


def _flops(result: AlignedJob, ranks: tuple[int, ...]) -> float:
    """Model FLOPs per step of a stage's rank, mean over its ranks."""
    return float(flops_per_step(result, ranks).mean(axis=1).mean())


@dataclass(frozen=True, eq=False)
class _WorkPace:
    """How quickly one rank works. ``rows`` is its own time by category, ns per step; ``kernels`` are, for each kernel
    by name (on CPUs for each operator), how often it runs and how long in all, per step; ``flops`` are those of one
    call, by the operator's name, where they are known; ``host_busy`` is the host's time per step (inf on CPUs, where
    the host is the device).

    Stages that multiply as much may differ in the rest: the last one has the loss, the first one the embedding. So the
    same kernels are compared, and the host's time for each kernel launched.
    """

    rows: Float64
    kernels: Mapping[str, tuple[float, float]]
    flops: Mapping[str, float]
    host_busy: float

    @classmethod
    def of(cls, result: AlignedJob, rank: int) -> _WorkPace:
        """That of one rank over the used steps."""
        partial, (start, end) = result.partials[rank], result.windows[rank]
        rows = np.asarray(partial.progress.own.totals(start, end).sum(axis=0) / len(start), dtype=np.float64)
        rows[TimeCategory.COMM_TRANSFER] = rows[TimeCategory.COMM_WAIT] = 0
        chosen = partial.steps.indices_of(result.steps)
        kernels, operators = partial.tables.kernels, partial.tables.operators
        if partial.has_device_work:
            computes = [category == "compute" for category in kernels.category]
            lines = _per_step(kernels.names, computes, kernels.count[:, chosen], kernels.total_ns[:, chosen])
            busy = float(partial.progress.host_busy_ns[chosen].mean())
        else:
            computes = [not _COMMUNICATES.match(name) for name in operators.names]
            lines = _per_step(operators.names, computes, operators.count[:, chosen], operators.host_ns[:, chosen])
            busy = math.inf
        return cls(rows, lines, _flops_of_calls(operators, chosen), busy)

    @classmethod
    def mean(cls, paces: Sequence[_WorkPace]) -> _WorkPace:
        """That of several ranks together."""
        kernels: dict[str, tuple[float, float]] = {}
        for pace in paces:
            for name, (count, total) in pace.kernels.items():
                known = kernels.get(name, (0.0, 0.0))
                kernels[name] = known[0] + count / len(paces), known[1] + total / len(paces)
        rows = np.asarray(np.mean([pace.rows for pace in paces], axis=0), dtype=np.float64)
        return cls(rows, kernels, paces[0].flops, float(np.mean([pace.host_busy for pace in paces])))

    def does_like(self, other: _WorkPace) -> bool:
        """Do both run the same kernels as often, but for some that only the first or the last stage has, and with as
        much to compute in each? On CPUs: with as much, however often.
        """
        common = self.flops.keys() & other.flops
        alike = all(_same(self.flops[name], other.flops[name]) for name in common)
        return alike and (self.launches_like(other) if self.on_device else bool(common))

    @property
    def on_device(self) -> bool:
        """Is the host not the device?"""
        return math.isfinite(self.host_busy)

    def launches_like(self, other: _WorkPace) -> bool:
        """Do both run the same kernels as often, but for some that only the first or the last stage has?"""
        common = sum(min(self.kernels[name][0], other.kernels[name][0]) for name in self.kernels.keys() & other.kernels)
        return common >= SAME_KERNELS * max(self.launched, other.launched) > 0

    @property
    def launched(self) -> float:
        """Compute kernels per step."""
        return sum(count for count, _ in self.kernels.values())

    def excess(self, compared: Sequence[_WorkPace], alike: Sequence[_WorkPace]) -> Float64:
        """Ns per step of each compared category beyond the median at the paces of other stages; compute beyond that of
        those that are ``alike``.

        A device's idle time before launches does not show how slow its host is: where all hosts are, those of stages
        that wait for messages launch meanwhile. So it counts as far as the host was busier for each kernel, too.
        """
        usual = np.median([pace.at_work_of(self) for pace in compared], axis=0)
        over = np.asarray(self.rows[_COMPARED_ROWS] - usual, dtype=np.float64)
        if self.on_device:
            others = [pace.host_busy * self.launched / pace.launched for pace in compared if pace.launched]
            busier = max(self.host_busy - float(np.median(others)), 0.0) if others else 0.0
            over[_BY_HOST] = np.minimum(over[_BY_HOST], busier)
        else:
            computes = [pace.at_work_of(self)[0] for pace in alike]
            over[0] = self.rows[_COMPARED_ROWS[0]] - np.median(computes) if computes else 0.0
        return over

    def host_factor(self, alike: Sequence[_WorkPace]) -> float:
        """How many times as long the host would take at the pace of other stages' hosts, 1 at most."""
        if not self.on_device:
            return 1.0
        others = [pace.host_busy * self.launched / pace.launched for pace in alike if pace.launched]
        return min(float(np.median(others)) / self.host_busy, 1.0) if others and self.host_busy else 1.0

    def at_work_of(self, other: _WorkPace) -> Float64:
        """What the compared categories of ``other`` would take at this pace; without kernels, this rank's own time."""
        mine = np.asarray(self.rows[_COMPARED_ROWS], dtype=np.float64)
        common = sorted(self.kernels.keys() & other.kernels.keys())
        taken = np.array([other.kernels[name][1] for name in common], dtype=np.float64)
        if taken.sum() <= 0:
            return mine
        factor = self._factors(other, common, taken)
        theirs = sum(total for _, total in other.kernels.values())
        # With fewer operators there may be as much to do between them.
        more = other.launched / self.launched
        mine *= more if self.on_device else max(more, 1.0)
        here = float((taken * (factor - 1)).sum())
        mine[_COMPARED.index(TimeCategory.COMPUTE)] = other.rows[TimeCategory.COMPUTE] * (1 + here / theirs)
        return mine

    def _factors(self, other: _WorkPace, common: Sequence[str], taken: Float64) -> Float64:
        """How many times as long as at ``other`` each of these kernels takes here.

        One that only runs more often at one of the two also does something there that the other does not have: the
        loss's matrix product is larger than the layers'. Such a kernel differs by no more than those do that run as
        often at both, and where they differ the other way by nothing.
        """
        counts, theirs = (np.array([of.kernels[name][0] for name in common]) for of in (self, other))
        here = np.array([self.kernels[name][1] for name in common]) / counts * theirs
        factor = np.divide(here, taken, out=np.ones_like(taken), where=taken > 0)
        as_often = np.abs(counts - theirs) <= SAME_WORK * np.maximum(counts, theirs)
        if as_often.all() or taken[as_often].sum() <= 0:
            return np.asarray(factor, dtype=np.float64)
        alike = float(here[as_often].sum() / taken[as_often].sum())
        bounded = np.clip(factor, min(alike, 1.0), max(alike, 1.0))
        return np.asarray(np.where(as_often, factor, bounded), dtype=np.float64)
