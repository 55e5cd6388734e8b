"""The job's pipeline as the summary shows it: work and bubbles of every stage, and what they would be at best.

A stage's step is its own work and its bubbles, the time in which its device waits for other stages and does nothing
else. The bubble of p balanced stages that pass m micro-batches through v chunks each is (p-1)/(v·m + p-1) of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.intervals import Intervals
from perfscope.analyzers.pipelines.bubbles import Bubbles, find_bubbles
from perfscope.analyzers.pipelines.messages import PipelineMessages, pipeline_messages
from perfscope.analyzers.pipelines.passes import BACKWARD, FORWARD, WEIGHTS
from perfscope.analyzers.pipelines.schedule import Schedule, find_schedule
from perfscope.analyzers.pipelines.stages import place, ranks_of
from perfscope.analyzers.timeline import Row
from perfscope.metadata import RunMetadata
from perfscope.summary import Note
from perfscope.summary_tables import Pipeline, StageRow


def find_pipeline(result: Comparison, runs: Mapping[int, RunMetadata]) -> Pipeline | None:
    """The pipeline of the used steps; None where the job has none, or who follows whom is not known.

    ``runs`` are the recorder's notes, where there are any.
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
        bubble_share=fmean(_bubble_us(row) / (row.busy_us + _bubble_us(row)) for row in rows),
        ideal_bubble_share=_ideal(placement.degree, schedule),
        imbalance=max(row.busy_us for row in rows) / fmean(row.busy_us for row in rows),
        degree=placement.degree,
        bubbles_are_bounds=any(own.bounded for own in bubbles.values()),
    )


def pipeline_notes(facts: JobFacts) -> Iterator[Note]:
    """What the reader must know of a pipeline: that it could not be made out, or only in part."""
    pipeline = facts.pipeline
    if pipeline is None and "pipeline" in facts.strategies:
        yield Note(
            about="pipeline",
            text="The job has a pipeline, but the recording does not tell which rank holds which stage, so there is no "
            "account of its bubbles. Record all ranks, with messages that name their peers (torch 2.5 or newer).",
        )
    elif pipeline is not None and pipeline.ideal_bubble_share is None and pipeline.schedule != "zero_bubble":
        yield Note(
            about="pipeline",
            text="How many micro-batches the pipeline works through cannot be told from the recorded ranks, so its "
            "bubble is not compared with what it must cost. Record a rank of the first and one of the last stage.",
        )
    if pipeline is not None and pipeline.bubbles_are_bounds:
        yield Note(
            about="pipeline",
            text="Not all ranks that pass messages on are in the recording: the bubbles of their neighbours are upper "
            "bounds, by the quickest message of each size.",
        )


def ideal_bubble_share(degree: int, microbatches: int, chunks: int) -> float:
    """(p-1)/(v·m + p-1): 4 stages and 8 micro-batches wait 3/11 of the step (Narayanan et al., SC'21, section 2.2)."""
    return (degree - 1) / (chunks * microbatches + degree - 1)


def inherent_bubble_share(pipeline: Pipeline) -> float:
    """The part of the bubble that even stages would have too, as a share (0..1) of the step; 0 where not known."""
    if pipeline.ideal_bubble_share is None:
        return 0.0
    return min(pipeline.bubble_share, pipeline.ideal_bubble_share)


def _ideal(degree: int | None, schedule: Schedule) -> float | None:
    if degree is None or schedule.microbatches is None or schedule.chunks is None or schedule.name == "zero_bubble":
        return None
    return ideal_bubble_share(degree, schedule.microbatches, schedule.chunks)


def _bubble_us(row: StageRow) -> float:
    return row.bubble_start_us + row.bubble_steady_us + row.bubble_drain_us


def _row(
    result: Comparison, messages: PipelineMessages, bubbles: Mapping[int, Bubbles], stage: int, ranks: tuple[int, ...]
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


def _pass_us(result: Comparison, messages: PipelineMessages, ranks: Sequence[int]) -> tuple[float | None, float | None]:
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
        idle = result.timelines[rank].where(Row.COMM_WAIT, Row.COMM_TRANSFER).intersect(moving)
        length = own.end_ns - own.start_ns - idle.within(own.start_ns, own.end_ns)
        forward += int(length[inside & (own.phase == FORWARD)].sum())
        backward += int(length[inside & np.isin(own.phase, (BACKWARD, WEIGHTS))].sum())
        forwards += int((inside & (own.phase == FORWARD)).sum())
        backwards += int((inside & (own.phase == BACKWARD)).sum())
    return forward / forwards / 1e3 if forwards else None, backward / backwards / 1e3 if backwards else None


def _flops(result: Comparison, rank: int) -> float | None:
    """Model FLOPs per step; None where none could be counted."""
    partial = result.partials[rank]
    counted = float(partial.flops.model.sum(axis=0)[partial.steps.indices_of(result.steps)].mean())
    return counted or None


def _kernels(result: Comparison, rank: int) -> float | None:
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
