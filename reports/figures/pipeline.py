"""One step of every pipeline stage: busy time and bubbles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from perfscope.reports.figures.colours import LIGHT
from perfscope.reports.figures.layout import Drawn, bar, one_step
from perfscope.reports.figures.numbers import scaled
from perfscope.results.rows import StepTimeline
from perfscope.results.summary import Summary
from perfscope.results.tables import Pipeline
from perfscope.text import duration, unit_for

_LEAST: Final = 0.002
"""Stretches shorter than this share of the width cannot be seen: they become part of their neighbours."""

_COLOURS: Final = {"busy": "compute", "bubble": "exposed_comm_wait"}

Stretch = tuple[str, float, float]
"""``busy`` or ``bubble``, start and end in µs."""


def pipeline_figure(summary: Summary) -> Drawn | None:
    """A bar for each stage; None without a pipeline, or where no step was kept whole."""
    stages = stage_stretches(summary.pipeline, summary.step_timeline) if summary.pipeline is not None else {}
    if not stages:
        return None
    begin = min(stretches[0][1] for stretches in stages.values())
    unit = unit_for(max(stretches[-1][2] for stretches in stages.values()) - begin)
    traces = []
    for kind, colour in _COLOURS.items():
        mine = [(label, start, end) for label, stretches in stages.items() for k, start, end in stretches if k == kind]
        traces.append(
            bar(
                kind,
                LIGHT[colour],
                y=[label for label, _, _ in mine],
                x=scaled((end - start for _, start, end in mine), unit, 6),
                base=scaled((start - begin for _, start, _ in mine), unit, 6),
                customdata=[f"{duration(end - start)} from {duration(start - begin)}" for _, start, end in mine],
                hovertemplate=f"<b>{kind}</b><br>%{{y}}<br>%{{customdata}}<extra></extra>",
            )
        )
    labels = list(stages)
    height = 90 + max(len(labels), 2) * 22
    return one_step("One step of every pipeline stage", traces, labels, unit, height=height)


def stage_stretches(pipeline: Pipeline, strips: Sequence[StepTimeline]) -> dict[str, list[Stretch]]:
    """Label -> stretches of each stage of which a rank is among the ``strips`` (of one step, on aligned clocks)."""
    first: dict[int, StepTimeline] = {}
    for strip in strips:
        if strip.start_us and (not first or strip.step == next(iter(first.values())).step):
            first.setdefault(strip.rank, strip)
    shown = [(row.stage, next((first[rank] for rank in row.ranks if rank in first), None)) for row in pipeline.stages]
    known = [(stage, strip) for stage, strip in shown if strip is not None]
    if not known:
        return {}
    span = max(strip.start_us[-1] + strip.duration_us[-1] for _, strip in known)
    span -= min(strip.start_us[0] for _, strip in known)
    waiting = {"exposed_comm_wait"}
    if pipeline.bubbles_are_bounds:  # without its neighbours a rank's waits look like transfers
        waiting.add("exposed_comm_transfer")
    if span <= 0:
        return {}
    return {f"stage {stage} · rank {strip.rank}": _stretches(strip, _LEAST * span, waiting) for stage, strip in known}


def _stretches(strip: StepTimeline, least_us: float, waiting: set[str]) -> list[Stretch]:
    pieces = [
        ("bubble" if name in waiting and length >= least_us else "busy", start, start + length)
        for name, start, length in zip(strip.categories, strip.start_us, strip.duration_us, strict=True)
    ]
    joined = [(kind, list(group)) for kind, group in groupby(pieces, key=lambda piece: piece[0])]
    return [(kind, group[0][1], group[-1][2]) for kind, group in joined]
