"""The job's pipeline as the summary shows it: busy time and bubbles of every stage, and the ideal bubble.

A stage's step is its busy time and its bubbles, in which its device waits for other stages and does nothing else. The
bubble of p balanced stages that pass m micro-batches through v chunks each is (p-1)/(v·m + p-1) of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.pipelines.bubbles import Bubbles, find_bubbles
from perfscope.analyzers.job.pipelines.messages import PipelineMessages, pipeline_messages
from perfscope.analyzers.job.pipelines.schedule import PipelineSchedule, find_schedule
from perfscope.analyzers.job.pipelines.stages import place, ranks_of
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.partial import BACKWARD, FORWARD, WEIGHTS
from perfscope.recording.metadata import RunMetadata
from perfscope.results.categories import TimeCategory
from perfscope.results.notes import Note, note
from perfscope.results.tables import Pipeline, StageRow


def find_pipeline(result: AlignedJob, runs: Mapping[int, RunMetadata]) -> Pipeline | None:
    """The pipeline of the used steps; None where the job has none, or the order of its ranks is not known.

    ``runs`` is the metadata of the ranks that wrote some.
    """
    messages = pipeline_messages(result)
    placement = place(result, messages)
    if not placement.stage_of:
        return None
    bubbles = find_bubbles(result, messages, placement.stage_of)
    schedule = find_schedule(result, messages, placement, runs)
    members = ranks_of({rank: placement.stage_of[rank] for rank in bubbles})
    rows = tuple(_row(result, messages, bubbles, stage, ranks) for stage, ranks in members.items())
    return Pipeline(
        stages=rows,
        microbatches=schedule.microbatches,
        virtual_stages=schedule.chunks or 1,
        schedule=schedule.name,
        bubble_share=fmean(row.bubble_us / (row.busy_us + row.bubble_us) for row in rows),
        ideal_bubble_share=_ideal(placement.degree, schedule),
        imbalance=max(row.busy_us for row in rows) / fmean(row.busy_us for row in rows),
        degree=placement.degree,
        bubbles_are_bounds=any(own.bounded for own in bubbles.values()),
    )


def pipeline_notes(pipeline: Pipeline | None, strategies: Collection[str]) -> Iterator[Note]:
    """What the reader must know of a pipeline: that it could not be made out, or only in part."""
    if pipeline is None and "pipeline" in strategies:
        yield note("pipeline", "pipeline_unknown")
    elif pipeline is not None and pipeline.ideal_bubble_share is None and pipeline.schedule != "zero_bubble":
        yield note("pipeline", "microbatches_unknown")
    if pipeline is not None and pipeline.bubbles_are_bounds:
        yield note("pipeline", "bubbles_are_bounds")


def ideal_bubble_share(degree: int, microbatches: int, chunks: int) -> float:
    """(p-1)/(v·m + p-1): 4 stages and 8 micro-batches wait 3/11 of the step (Narayanan et al., SC'21, section 2.2)."""
    return (degree - 1) / (chunks * microbatches + degree - 1)


def inherent_bubble_share(pipeline: Pipeline) -> float:
    """The part of the bubble that balanced stages would have too, as a share (0..1) of the step; 0 where not known."""
    if pipeline.ideal_bubble_share is None:
        return 0.0
    return min(pipeline.bubble_share, pipeline.ideal_bubble_share)


def _ideal(degree: int | None, schedule: PipelineSchedule) -> float | None:
    if degree is None or schedule.microbatches is None or schedule.chunks is None or schedule.name == "zero_bubble":
        return None
    return ideal_bubble_share(degree, schedule.microbatches, schedule.chunks)


def _row(
    result: AlignedJob, messages: PipelineMessages, bubbles: Mapping[int, Bubbles], stage: int, ranks: tuple[int, ...]
) -> StageRow:
    own = [bubbles[rank] for rank in ranks]
    start, steady, drain = (
        fmean(float(part.mean()) for part in parts) / 1e3
        for parts in zip(*((each.start_ns, each.steady_ns, each.drain_ns) for each in own), strict=True)
    )
    step_us = fmean(result.mean_step_ns(rank) for rank in ranks) / 1e3
    forward, backward = _pass_us(result, messages, ranks)
    return StageRow(
        stage=stage,
        ranks=ranks,
        busy_us=step_us - start - steady - drain,
        bubble_start_us=start,
        bubble_steady_us=steady,
        bubble_drain_us=drain,
        forward_us=forward,
        backward_us=backward,
        flops_per_step=_mean_known([_flops(result, rank) for rank in ranks]),
        kernels_per_step=_mean_known([_kernels(result, rank) for rank in ranks]),
    )


def _pass_us(result: AlignedJob, messages: PipelineMessages, ranks: Sequence[int]) -> tuple[float | None, float | None]:
    """Mean (forward, backward) of one micro-batch on these ranks; None where no range marks them."""
    forward = forwards = backward = backwards = 0
    for rank in ranks:
        own, used = result.partials[rank].passes, result.partials[rank].steps.indices_of(result.steps)
        if len(own) == 0:
            continue
        inside = np.isin(own.step, used)
        mine = messages.rank == rank
        moving = Intervals.of(messages.start_ns[mine], messages.end_ns[mine])
        # A range may hold the wait for its input.
        idle = result.timelines[rank].where(TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER).intersect(moving)
        length = own.end_ns - own.start_ns - idle.within(own.start_ns, own.end_ns)
        forward += int(length[inside & (own.phase == FORWARD)].sum())
        backward += int(length[inside & np.isin(own.phase, (BACKWARD, WEIGHTS))].sum())
        forwards += int((inside & (own.phase == FORWARD)).sum())
        backwards += int((inside & (own.phase == BACKWARD)).sum())
    return forward / forwards / 1e3 if forwards else None, backward / backwards / 1e3 if backwards else None


def _flops(result: AlignedJob, rank: int) -> float | None:
    """Model FLOPs per step; None where none could be counted."""
    partial = result.partials[rank]
    counted = float(partial.flops.model.sum(axis=0)[partial.steps.indices_of(result.steps)].mean())
    return counted or None


def _kernels(result: AlignedJob, rank: int) -> float | None:
    """Compute kernels per step; None without a device."""
    partial = result.partials[rank]
    kernels = partial.tables.kernels
    computing = np.array([category == "compute" for category in kernels.category], dtype=np.bool_)
    if not partial.has_device_work or not computing.any():
        return None
    return float(kernels.count[computing].sum(axis=0)[partial.steps.indices_of(result.steps)].mean())


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
