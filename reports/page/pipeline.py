"""Pipeline parallelism on the page: how it works in words, and the table of stages."""

from __future__ import annotations

from typing import Any, Final

from perfscope.reports import tables
from perfscope.reports.tables import HtmlTable
from perfscope.results.summary import Summary
from perfscope.results.tables import Pipeline
from perfscope.text import count, duration, factor, flop, percent, plural, rank_list

NAMES: Final = {
    "1f1b": "one forward, one backward (1F1B)",
    "gpipe": "all forwards, then all backwards (GPipe)",
    "interleaved": "interleaved 1F1B",
    "zero_bubble": "zero bubble, backward in two halves",
}
"""Schedules in words."""

_UNEVEN: Final = 1.05
"""Busy time of the busiest stage over the mean, from which the page has a sentence about it."""

_NO_RANGES: Final = "No range marks single micro-batches."
_NO_SHAPES: Final = "No operator shapes were recorded."


def values(summary: Summary) -> dict[str, Any]:
    """What the template shows of the pipeline; ``pipeline`` is None where there is none."""
    pipeline = summary.pipeline
    if pipeline is None or not pipeline.stages:
        return {"pipeline": None}
    return {
        "pipeline": {
            "reading": reading(pipeline),
            "caption": _caption(summary),
            "table": stage_table(pipeline),
        }
    }


def reading(pipeline: Pipeline) -> str:
    """How the pipeline works, and how its bubble compares with what it must cost."""
    size = plural(pipeline.degree, "stage") if pipeline.degree is not None else "stages"
    if pipeline.microbatches is not None:
        size += f", {plural(pipeline.microbatches, 'micro-batch', 'micro-batches')} per step"
    if pipeline.virtual_stages > 1:
        size += f", {pipeline.virtual_stages} model chunks per stage"
    bound = "at most " if pipeline.bubbles_are_bounds else ""
    text = f"{size[0].upper()}{size[1:]}; schedule: {NAMES.get(pipeline.schedule, 'not recognized')}. "
    text += f"Bubbles take {bound}{percent(pipeline.bubble_share)} of the step"
    ideal = pipeline.ideal_bubble_share
    if ideal is not None and ideal < pipeline.bubble_share:
        text += f"; with balanced stages: {percent(ideal)}"
    elif ideal is not None:
        text += f", no more than the {percent(ideal)} inherent in these stages and micro-batches"
    text += "."
    if pipeline.imbalance >= _UNEVEN:
        busiest = max(pipeline.stages, key=lambda row: row.busy_us)
        text += f" Stage {busiest.stage} is the busiest: {factor(pipeline.imbalance)} the mean."
    if pipeline.degree is not None and len(pipeline.stages) < pipeline.degree:
        text += f" {plural(pipeline.degree - len(pipeline.stages), 'stage')} not recorded."
    return text


def stage_table(pipeline: Pipeline) -> HtmlTable:
    """Every stage with its work and its bubbles, means per step."""
    rows = pipeline.stages
    largest = max(row.busy_us + row.bubble_us for row in rows)
    bubbles = [row.bubble_us / (row.busy_us + row.bubble_us) for row in rows]
    columns = [
        tables.column("Stage", [row.stage for row in rows], str),
        tables.words("Ranks", [rank_list(row.ranks) for row in rows]),
        tables.durations("Busy", [row.busy_us for row in rows], definition="stage_busy", largest=largest),
        tables.durations(
            "Warm-up bubble", [row.bubble_start_us for row in rows], definition="bubble_start", largest=largest
        ),
        tables.durations(
            "Steady bubble", [row.bubble_steady_us for row in rows], definition="bubble_steady", largest=largest
        ),
        tables.durations(
            "Drain bubble", [row.bubble_drain_us for row in rows], definition="bubble_drain", largest=largest
        ),
        tables.column("Bubble share", bubbles, percent, definition="bubble"),
    ]
    if any(row.forward_us is not None or row.backward_us is not None for row in rows):
        forwards, backwards = [row.forward_us for row in rows], [row.backward_us for row in rows]
        columns += [
            tables.durations("Forward", forwards, definition="micro_batch_pass", reason=_NO_RANGES),
            tables.durations("Backward", backwards, definition="micro_batch_pass", reason=_NO_RANGES),
        ]
    if any(row.flops_per_step is not None for row in rows):
        flops = [row.flops_per_step for row in rows]
        columns.append(tables.column("Model FLOPs", flops, flop, definition="stage_flops", reason=_NO_SHAPES))
    if any(row.kernels_per_step is not None for row in rows):
        kernels = [row.kernels_per_step for row in rows]
        columns.append(tables.column("Kernels", kernels, count, reason="This rank has no device."))
    return tables.table("pipeline-stages", "Stages", columns, "Means per step over the ranks of a stage.")


def _caption(summary: Summary) -> str:
    """What the chart shows."""
    step = next((strip.step for strip in summary.step_timeline if strip.start_us), None)
    name = f"step {step}" if step is not None else "the recording"
    return f"{name.capitalize()}, about {duration(summary.job.step_time_us)}; one rank per stage."
