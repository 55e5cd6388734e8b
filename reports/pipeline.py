"""A job's pipeline on the page: one step of every stage as a bar of work and bubbles, and the table of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from perfscope.reports import tables
from perfscope.reports.format import count, duration, flop, plural, rank_list, share, significant
from perfscope.reports.tables import Table, absent, written
from perfscope.summary import Strip, Summary
from perfscope.summary_tables import Pipeline, StageRow

NAMES: Final = {
    "1f1b": "one forward, one backward (1F1B)",
    "gpipe": "all forwards, then all backwards (GPipe)",
    "interleaved": "interleaved chunks of the model",
    "zero_bubble": "zero bubble, backwards in two halves",
}
"""Schedules in words."""

_LEAST: Final = 0.002
"""Shorter stretches of the picture than this share of its width are not seen: they go to what is around them."""

_UNEVEN: Final = 1.05
"""Own work of the busiest stage over the mean from which it is worth a sentence."""

_NO_RANGES: Final = "No range marks the passes of single micro-batches."
_NO_SHAPES: Final = "No shapes of operators are recorded."


@dataclass(frozen=True)
class Stretch:
    """A stretch of a bar; places are per cent of its width."""

    kind: str
    """``busy`` or ``bubble``."""
    left: float
    width: float


@dataclass(frozen=True)
class Bar:
    """One stage's step in the picture."""

    label: str
    stretches: tuple[Stretch, ...]


def values(summary: Summary) -> dict[str, Any]:
    """What the template shows of the pipeline; ``pipeline`` is None where there is none."""
    pipeline = summary.pipeline
    if pipeline is None or not pipeline.stages:
        return {"pipeline": None}
    bars = stage_bars(pipeline, summary.strips)
    return {
        "pipeline": {
            "reading": reading(pipeline),
            "bars": bars,
            "picture": _picture(summary, bars),
            "table": stage_table(pipeline),
        }
    }


def reading(pipeline: Pipeline) -> str:
    """How the pipeline works, and how its bubble compares with what it must cost."""
    size = plural(pipeline.degree, "stage") if pipeline.degree is not None else "stages"
    if pipeline.microbatches is not None:
        size += f", {plural(pipeline.microbatches, 'micro-batch', 'micro-batches')} a step"
    if pipeline.virtual_stages > 1:
        size += f", {pipeline.virtual_stages} chunks of the model a stage"
    bound = "at most " if pipeline.bubbles_are_bounds else ""
    text = f"{size[0].upper()}{size[1:]}; order: {NAMES.get(pipeline.schedule, 'not recognised')}. "
    text += f"Bubbles take {bound}{share(pipeline.bubble_share)} of the step"
    ideal = pipeline.ideal_bubble_share
    if ideal is not None and ideal < pipeline.bubble_share:
        text += f"; with even stages they would take {share(ideal)}"
    elif ideal is not None:
        text += f", no more than the {share(ideal)} that so many stages and micro-batches cost"
    text += "."
    if pipeline.imbalance >= _UNEVEN:
        busiest = max(pipeline.stages, key=lambda row: row.busy_us)
        text += (
            f" Stage {busiest.stage} has the most work of its own, {significant(pipeline.imbalance)} times the mean."
        )
    if pipeline.degree is not None and len(pipeline.stages) < pipeline.degree:
        text += f" {plural(pipeline.degree - len(pipeline.stages), 'stage')} not in the recording."
    return text


def stage_table(pipeline: Pipeline) -> Table:
    """Every stage with its work and its bubbles, means per step."""
    rows = pipeline.stages
    largest = max(row.busy_us + _bubble_us(row) for row in rows)
    bubbles = [_bubble_us(row) / (row.busy_us + _bubble_us(row)) for row in rows]
    columns = [
        tables.numbers("Stage", [tables.Cell(text=str(row.stage), order=row.stage) for row in rows]),
        tables.words("Ranks", [rank_list(row.ranks) for row in rows]),
        tables.durations("Own work", [row.busy_us for row in rows], definition="stage_busy", largest=largest),
        tables.durations(
            "Bubble at the start", [row.bubble_start_us for row in rows], definition="bubble_start", largest=largest
        ),
        tables.durations(
            "in between", [row.bubble_steady_us for row in rows], definition="bubble_steady", largest=largest
        ),
        tables.durations(
            "at the end", [row.bubble_drain_us for row in rows], definition="bubble_drain", largest=largest
        ),
        tables.numbers("of the step", [written(share(part), part, "") for part in bubbles], definition="bubble"),
    ]
    if any(row.forward_us is not None or row.backward_us is not None for row in rows):
        forwards, backwards = [row.forward_us for row in rows], [row.backward_us for row in rows]
        columns += [
            tables.durations("Forward", forwards, definition="micro_batch_pass", reason=_NO_RANGES),
            tables.durations("Backward", backwards, definition="micro_batch_pass", reason=_NO_RANGES),
        ]
    if any(row.flops_per_step is not None for row in rows):
        cells = [written(flop(row.flops_per_step), row.flops_per_step, _NO_SHAPES) for row in rows]
        columns.append(tables.numbers("Model FLOPs", cells, definition="stage_flops"))
    if any(row.kernels_per_step is not None for row in rows):
        cells = [
            absent("This rank has no device.")
            if row.kernels_per_step is None
            else tables.Cell(text=count(row.kernels_per_step), order=row.kernels_per_step)
            for row in rows
        ]
        columns.append(tables.numbers("Kernels", cells))
    return tables.table("pipeline-stages", "Stages", columns, "Means per step over the ranks of a stage.")


def stage_bars(pipeline: Pipeline, strips: Sequence[Strip]) -> tuple[Bar, ...]:
    """A bar for each stage of which a rank is among the ``strips`` (of one step, on aligned clocks)."""
    first: dict[int, Strip] = {}
    for strip in strips:
        if strip.start_us and (not first or strip.step == next(iter(first.values())).step):
            first.setdefault(strip.rank, strip)
    shown = [(row, next((first[rank] for rank in row.ranks if rank in first), None)) for row in pipeline.stages]
    known = [(row, strip) for row, strip in shown if strip is not None]
    if not known:
        return ()
    begin = min(strip.start_us[0] for _, strip in known)
    span = max(strip.start_us[-1] + strip.duration_us[-1] for _, strip in known) - begin
    waiting = {"exposed_comm_wait"}
    if pipeline.bubbles_are_bounds:  # without its neighbours a rank's waits look like transfers
        waiting.add("exposed_comm_transfer")
    return tuple(_bar(row, strip, begin, span, waiting) for row, strip in known) if span > 0 else ()


def _bar(row: StageRow, strip: Strip, begin: float, span: float, waiting: set[str]) -> Bar:
    pieces = [
        ("bubble" if name in waiting and length >= _LEAST * span else "busy", start, start + length)
        for name, start, length in zip(strip.categories, strip.start_us, strip.duration_us, strict=True)
    ]
    stretches = []
    for kind, group in groupby(pieces, key=lambda piece: piece[0]):
        joined = list(group)
        left, right = 100 * (joined[0][1] - begin) / span, 100 * (joined[-1][2] - begin) / span
        stretches.append(Stretch(kind, left, right - left))
    return Bar(f"{row.stage} · rank {strip.rank}", tuple(stretches))


def _picture(summary: Summary, bars: Sequence[Bar]) -> str:
    """What the picture shows here."""
    if not bars:
        return ""
    step = next((strip.step for strip in summary.strips if strip.start_us), None)
    name = f"step {step}" if step is not None else "the recording"
    return f"Here {name}, about {duration(summary.job.step_time_us)}, one rank of each stage."


def _bubble_us(row: StageRow) -> float:
    return row.bubble_start_us + row.bubble_steady_us + row.bubble_drain_us
