"""Pipeline stages that take longer than the others for the same work.

The ranks of one stage are each other's peers, so a stage that is slow as a whole has no slow rank. Stages that compute
the same number of FLOPs do the same work, and so do those that run the same kernels about as often, with as many FLOPs
in each as far as that is known: among those, one that takes longer than their median is slow. A stage with more work
than the others is not slow but too big: that is imbalance, which the pipeline's table shows.

On CPUs operators are what kernels are elsewhere, and each shows how long it takes, whatever else a stage does: there
stages are compared part by part (``host_parts``). What is not the same work on two of them is never quite alike, so by
that a stage is slow from a larger excess on, as in step histories.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.pipelines.stages import ranks_of, stages
from perfscope.analyzers.rank.host_lane import HostTime
from perfscope.analyzers.replay.engine import Schedules
from perfscope.analyzers.replay.pace import scaled, scaled_beside
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.analyzers.replay.stragglers.host_parts import StepParts
from perfscope.analyzers.replay.stragglers.own_time import NOISE, flops_per_step
from perfscope.analyzers.replay.stragglers.work_pace import BY_HOST, COMPARED, COMPARED_ROWS, WorkPace, own_rows, same
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.results.rows import UNLIKE_STAGES
from perfscope.trace.medians import deviation
from perfscope.trace.trace import Float64, Int64

_SAME_LONGER: Final = 0.05
"""Share of the step from which a stage on CPUs is slow by what is the same work on others."""
_CLEAR: Final = 4.0
"""Standard errors by which that is no chance."""
_FEWEST: Final = 5
"""Steps from which that can be told."""

_MOST: Final = 64
"""So many ranks of other stages show where own time lies."""

_IN_OPERATORS: Final = np.array([float(category is TimeCategory.COMPUTE) for category in COMPARED])
_BETWEEN: Final = np.array([float(category is TimeCategory.HOST) for category in COMPARED])
"""Parts of each compared category."""


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
    known = {stage: ranks for stage, ranks in members.items() if not any(rank in attributed for rank in ranks)}
    if any(result.partials[rank].has_device_work for ranks in members.values() for rank in ranks):
        found = _slow_devices(result, members, known)
    else:
        found = _slow_hosts(result, members, known)
    return list(found)


def _slow_devices(
    result: AlignedJob, members: Mapping[int, tuple[int, ...]], known: Mapping[int, tuple[int, ...]]
) -> Iterator[SlowStage]:
    """Those of the ``known`` stages whose devices, or the hosts that launch their work, take longer."""
    flops = {stage: _flops(result, ranks) for stage, ranks in members.items()}
    paces = {stage: [WorkPace.of(result, rank) for rank in ranks] for stage, ranks in members.items()}
    together = {stage: WorkPace.mean(mine) for stage, mine in paces.items()}
    for stage, ranks in known.items():
        mine, others = together[stage], {other: pace for other, pace in together.items() if other != stage}
        alike = [pace for other, pace in others.items() if same(flops[other], flops[stage]) or mine.does_like(pace)]
        if not alike:
            continue
        excess = np.min([pace.excess(alike) for pace in paces[stage]], axis=0)
        total = min(float(pace.rows.sum()) for pace in paces[stage])
        # What waits for data seems to save more at another stage's pace than it takes longer.
        if NOISE * result.step_ns <= excess.sum() < total:
            slow = _SlowRows(ranks, np.stack([pace.rows for pace in paces[stage]]), excess)
            host = max(pace.host_factor(alike) for pace in paces[stage]) if excess[BY_HOST].any() else 1.0
            yield slow.stage(host)


def _slow_hosts(
    result: AlignedJob, members: Mapping[int, tuple[int, ...]], known: Mapping[int, tuple[int, ...]]
) -> Iterator[SlowStage]:
    """Those of the ``known`` stages that take longer on CPUs."""
    each = {rank: StepParts.of(result, rank, result.steps) for ranks in members.values() for rank in ranks}
    together = {stage: StepParts.mean([each[rank] for rank in ranks]) for stage, ranks in members.items()}
    rows = {rank: own_rows(result, rank) for rank in each}
    for stage, ranks in known.items():
        others = [other for other in members if other != stage]
        apart = [_longer_ns(each[rank], [together[other] for other in others], result.step_ns) for rank in ranks]
        in_operators, between = min(apart, key=sum)
        mine = np.stack([rows[rank] for rank in ranks])
        if not 0 < in_operators + between < float(mine.sum(axis=1).min()):
            continue
        # An operator that calls Python, as a function of autograd's may, takes the host's time.
        usual = np.median([np.mean([rows[rank] for rank in members[other]], axis=0) for other in others], axis=0)
        above = np.maximum((mine.min(axis=0) - usual)[COMPARED_ROWS], 0)
        split = above / above.sum() if above.any() else _IN_OPERATORS
        yield _SlowRows(ranks, mine, in_operators * split + between * _BETWEEN).stage(1.0)


def _longer_ns(mine: StepParts, others: Sequence[StepParts], step_ns: float) -> tuple[float, float]:
    """(in operators, between them) what a rank takes longer in most steps than the other stages; (0, 0) where that is
    no more than stages may differ.
    """
    if not others:
        return 0.0, 0.0
    found = [mine.excess(other) for other in others]
    operators, alike, total = (
        np.median(of_each, axis=0)
        for of_each in zip(*((excess.operators, excess.alike, excess.total) for excess in found), strict=True)
    )
    longer = float(np.median(total))
    in_operators = min(max(float(np.median(operators)), 0.0), max(longer, 0.0))
    parts = in_operators, longer - in_operators
    if longer >= UNLIKE_STAGES * step_ns:
        return parts
    if len(alike) < _FEWEST:
        return 0.0, 0.0
    error = deviation(alike) / math.sqrt(len(alike))
    least = max(_SAME_LONGER * step_ns, _CLEAR * error)
    return parts if min(float(np.median(alike)), longer) >= least else (0.0, 0.0)


class _SlowRows(NamedTuple):
    """A slow stage's ranks, their own time by category (lines), ns per step, and what of that is too much."""

    ranks: tuple[int, ...]
    rows: Float64
    excess: Float64
    """Of the compared categories."""

    def stage(self, host: float) -> SlowStage:
        """``host`` as in it."""
        totals = self.rows.sum(axis=1)
        row = COMPARED[int(self.excess.argmax())]
        least = self.rows[:, COMPARED_ROWS].min(axis=0)
        left = np.ones(len(TimeCategory))
        left[COMPARED_ROWS] = np.maximum(1 - self.excess / np.maximum(least, 1), 0)
        return SlowStage(
            ranks=self.ranks,
            slowest=self.ranks[int(totals.argmax())],
            row=row,
            factor=float((totals.min() - self.excess.sum()) / totals.min()),
            compute=1 - float(self.excess[0]) / max(float(least[0]), 1.0),
            host=host,
            left=left,
        )


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
    """Each category of own time is shorter, and where it is longer than on other stages: a pause before the first
    message delays more than one that comes while the rank would wait.
    """
    schedules = recorded.schedules
    own = schedules.own_ns.copy()
    slow_ranks = {rank for stage in slow for rank in stage.ranks}
    others = [rank for rank in schedules.ranks if rank not in slow_ranks]
    usual = _longest_first([_rows_before_ops(result, recorded, rank) for rank in others[:: -(-len(others) // _MOST)]])
    for stage in slow:
        for rank in stage.ranks:
            rows = _rows_before_ops(result, recorded, rank)
            shorter = [
                _longer_than(rows[:, category], usual[:, category], 1 - left)
                for category, left in enumerate(stage.left.tolist())
                if left < 1
            ]
            span = schedules.slice_of(rank)
            own[span] = np.diff(np.rint(np.cumsum(own[span] - np.sum(shorter, axis=0))), prepend=0)
    return replace(schedules, own_ns=np.maximum(own, 0))


def _longest_first(ranks: Sequence[Int64]) -> Float64:
    """Of each category (columns) of own time before ops: the median of the ranks' longest, then of those that come
    next, and so on.
    """
    if not ranks:
        return np.zeros((0, len(TimeCategory)))
    most = max(len(rows) for rows in ranks)
    ordered = [np.pad(-np.sort(-rows, axis=0), ((0, most - len(rows)), (0, 0))) for rows in ranks]
    return np.asarray(np.median(ordered, axis=0), dtype=np.float64)


def _rows_before_ops(result: AlignedJob, recorded: RecordedSchedules, rank: int) -> Int64:
    """Ns of each category of own time (columns) before each op of the rank's schedule."""
    own = recorded.schedules.own_ns[recorded.schedules.slice_of(rank)]
    return recorded.rows_between(result, rank, np.concatenate(([0], np.cumsum(own))))


def _longer_than(mine: Int64, usual: Float64, share: float) -> Float64:
    """Where ``share`` of a rank's own time before its ops is too much: where the longest are longer than ``usual``
    (longest first), those that come next longer than that, and so on; what that does not explain, of all alike.
    """
    order = np.argsort(-mine, kind="stable")
    theirs = np.pad(usual[: len(mine)], (0, max(len(mine) - len(usual), 0)))
    longer = np.zeros(len(mine))
    longer[order] = np.maximum(mine[order] - theirs, 0)
    too_much = share * float(mine.sum())
    longer *= min(too_much / max(float(longer.sum()), 1.0), 1.0)
    rest = mine - longer
    return np.asarray(longer + rest * max(too_much - float(longer.sum()), 0.0) / max(float(rest.sum()), 1.0))


def _flops(result: AlignedJob, ranks: tuple[int, ...]) -> float:
    """Model FLOPs per step of a stage's rank, mean over its ranks."""
    return float(flops_per_step(result, ranks).mean(axis=1).mean())
