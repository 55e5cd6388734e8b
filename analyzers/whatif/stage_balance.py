"""What a step of a pipeline would take if its stages shared the work evenly.

The recorded steps are replayed twice, and the quicker way counts. Once the FLOPs are spread evenly: a stage with 1.5
times the mean's work computes 1/1.5 as long, one with 0.5 times twice as long. Once the time of computation is: each
stage takes the mean of all. What a stage computes besides its layers, such as the loss, stays where it is and makes
one with few layers seem slow. Example: stages that compute 165 and 110 ms of twice and once the FLOPs would take 124
and 164 with as many layers each, but 137.5 with the layers that make them even. All else (loading, launching, the
optimizer's waits) stays. Only whole layers can move, so the even share is the best case; the prediction's upper end
assumes that half of the difference was moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Final

from perfscope.analyzers.replay.engine import Schedules, replay
from perfscope.analyzers.replay.job_replay import JobReplay
from perfscope.analyzers.replay.pace import scaled
from perfscope.results.categories import TimeCategory
from perfscope.results.findings import Prediction
from perfscope.results.tables import Pipeline

UNEVEN: Final = 1.10
"""Work of the busiest stage over the stages' mean from which they are uneven."""

_HALF: Final = 0.5


def work_shares(pipeline: Pipeline) -> dict[int, float] | None:
    """Stage -> its work over the stages' mean, by model FLOPs, else by compute kernels; None unless all are known."""
    if len(pipeline.stages) != pipeline.degree:
        return None
    for works in (
        {row.stage: row.flops_per_step for row in pipeline.stages},
        {row.stage: row.kernels_per_step for row in pipeline.stages},
    ):
        known = {stage: work for stage, work in works.items() if work is not None}
        if len(known) == len(works):
            mean = fmean(known.values())
            return {stage: work / mean for stage, work in known.items()}
    return None


def uneven_stage(pipeline: Pipeline) -> int | None:
    """The busiest stage where it has clearly more work than the others; else None.

    A stage that takes long for the same work is slow, not uneven.
    """
    shares = work_shares(pipeline)
    if shares is None:
        return None
    busiest = max(pipeline.stages, key=lambda row: row.busy_us)
    return busiest.stage if shares[busiest.stage] >= UNEVEN else None


def balanced_step_us(job: JobReplay, pipeline: Pipeline | None) -> Prediction | None:
    """The step with even stages; None where they are even already, or the steps cannot be replayed."""
    if pipeline is None or uneven_stage(pipeline) is None or not job.replayed.complete:
        return None
    shares = work_shares(pipeline)
    assert shares is not None
    measured = job.result.step_ns
    replayed = job.recorded.step_time_ns(job.replayed)
    error = abs(replayed / measured - 1)
    ways = ({stage: 1 / share for stage, share in shares.items()}, _even_times(job, pipeline))
    steps = [
        (even, half, _least_ns(job, pipeline, targets))
        for targets in ways
        if (even := _step_ns(job, pipeline, targets, 1.0)) is not None
        and (half := _step_ns(job, pipeline, targets, _HALF)) is not None
    ]
    if not steps:
        return None
    even, half, least = min(steps)
    # The unchanged replay's error is in this one too: it is taken out.
    even, half = even * measured / replayed, half * measured / replayed
    low_ns, high_ns = min(even, least) * (1 - error), max(half, even) * (1 + error)
    return Prediction(low=low_ns / 1e3, mid=even / 1e3, high=high_ns / 1e3)


def _even_times(job: JobReplay, pipeline: Pipeline) -> dict[int, float]:
    """Stage -> what multiplies its computation so that all compute for the same time."""
    compute = {row.stage: _own_ns(job, row.ranks)[0] for row in pipeline.stages}
    mean = fmean(compute.values())
    return {stage: mean / ns if ns else 1.0 for stage, ns in compute.items()}


def _least_ns(job: JobReplay, pipeline: Pipeline, targets: Mapping[int, float]) -> float:
    """The step at the ideal bubble; without interleaving infinity, because the replay is then more exact. With several
    chunks per stage it leaves each chunk as uneven as it is.
    """
    if pipeline.virtual_stages == 1 or pipeline.ideal_bubble_share is None:
        return float("inf")
    even = [row.busy_us * 1e3 + (targets[row.stage] - 1) * _own_ns(job, row.ranks)[0] for row in pipeline.stages]
    return fmean(even) / (1 - pipeline.ideal_bubble_share)


def _step_ns(job: JobReplay, pipeline: Pipeline, targets: Mapping[int, float], moved: float) -> float | None:
    """The step once that much of the difference to what computation is to take (stage -> factor) has been moved."""
    schedules: Schedules = job.recorded.schedules
    for row in pipeline.stages:
        target = 1 + moved * (targets[row.stage] - 1)
        schedules = scaled(schedules, row.ranks, _factor(job, row.ranks, target))
    replayed = replay(schedules)
    return job.recorded.step_time_ns(replayed) if replayed.complete else None


def _factor(job: JobReplay, ranks: tuple[int, ...], target: float) -> float:
    """What scales all own time of these ranks by what scaling their computation by ``target`` changes in it."""
    compute, total = _own_ns(job, ranks)
    return 1 + (target - 1) * compute / total if total else 1.0


def _own_ns(job: JobReplay, ranks: tuple[int, ...]) -> tuple[float, float]:
    """(computation, all own time) of these ranks, mean per step."""
    result = job.result
    own = [result.partials[rank].progress.own.totals(*result.windows[rank]).mean(axis=0) for rank in ranks]
    compute = fmean(float(rows[TimeCategory.COMPUTE]) for rows in own)
    total = fmean(float(rows.sum() - rows[TimeCategory.COMM_TRANSFER] - rows[TimeCategory.COMM_WAIT]) for rows in own)
    return compute, total
