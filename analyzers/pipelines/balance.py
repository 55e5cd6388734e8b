"""What a step of a pipeline would take if its stages shared the work evenly: the recorded steps, played again.

A stage that does 1.5 times the mean's work computes 1/1.5 as long in the replay, one that does 0.5 times the mean's
twice as long; all else (loading, launching, the optimizer's waits) stays. Layers move as wholes, so that the even share
is the best case; the prediction's upper end is reached when half of the difference has been moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Final

from perfscope.analyzers.compared import Compared
from perfscope.analyzers.replay.engine import Programs, play
from perfscope.analyzers.replay.pace import scaled
from perfscope.analyzers.timeline import Row
from perfscope.findings import Prediction
from perfscope.summary_tables import Pipeline

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
    """The stage with the most work of its own, where it is given clearly more to do than the others; else None.

    One that takes long for the same work is slow, not uneven.
    """
    shares = work_shares(pipeline)
    if shares is None:
        return None
    busiest = max(pipeline.stages, key=lambda row: row.busy_us)
    return busiest.stage if shares[busiest.stage] >= UNEVEN else None


def balanced_step_ns(compared: Compared, pipeline: Pipeline | None) -> Prediction | None:
    """The step with even stages; None where they are even already, or the steps cannot be played."""
    if pipeline is None or uneven_stage(pipeline) is None or not compared.played.complete:
        return None
    shares = work_shares(pipeline)
    assert shares is not None
    measured = compared.result.step_ns
    replayed = float(compared.recorded.slowest_ns(compared.played).mean())
    error = abs(replayed / measured - 1)
    even, half = (_step_ns(compared, pipeline, shares, moved) for moved in (1.0, _HALF))
    if even is None or half is None:
        return None
    # What the unchanged replay misses, this one misses too.
    even, half = even * measured / replayed, half * measured / replayed
    least = min(even, _least_ns(compared, pipeline, shares))
    return Prediction(low=least * (1 - error), mid=even, high=max(half, even) * (1 + error))


def _least_ns(compared: Compared, pipeline: Pipeline, shares: Mapping[int, float]) -> float:
    """The step at the ideal bubble. Of several chunks a stage holds, a replay leaves one as uneven as it is; otherwise
    it knows better.
    """
    if pipeline.virtual_stages == 1 or pipeline.ideal_bubble_share is None:
        return float("inf")
    even = [
        row.busy_us * 1e3 + (1 / shares[row.stage] - 1) * _own_ns(compared, row.ranks)[0] for row in pipeline.stages
    ]
    return fmean(even) / (1 - pipeline.ideal_bubble_share)


def _step_ns(compared: Compared, pipeline: Pipeline, shares: Mapping[int, float], moved: float) -> float | None:
    """The step once that much of the difference to an even share has been moved."""
    programs: Programs = compared.recorded.programs
    for row in pipeline.stages:
        target = 1 + moved * (1 / shares[row.stage] - 1)
        programs = scaled(programs, row.ranks, _factor(compared, row.ranks, target))
    played = play(programs)
    return float(compared.recorded.slowest_ns(played).mean()) if played.complete else None


def _factor(compared: Compared, ranks: tuple[int, ...], target: float) -> float:
    """What scales all own time of these ranks by what scaling their computation by ``target`` changes in it."""
    compute, total = _own_ns(compared, ranks)
    return 1 + (target - 1) * compute / total if total else 1.0


def _own_ns(compared: Compared, ranks: tuple[int, ...]) -> tuple[float, float]:
    """(computation, all own time) of these ranks, mean per step."""
    result = compared.result
    own = [result.partials[rank].progress.own.totals(*result.windows[rank]).mean(axis=0) for rank in ranks]
    compute = fmean(float(rows[Row.COMPUTE]) for rows in own)
    total = fmean(float(rows.sum() - rows[Row.COMM_TRANSFER] - rows[Row.COMM_WAIT]) for rows in own)
    return compute, total
