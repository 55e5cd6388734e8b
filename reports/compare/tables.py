"""The tables of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perfscope.reports import tables
from perfscope.reports.compare.words import (
    LABELS,
    category_name,
    category_verdict,
    metric_value,
    relative,
    signed,
    stage_name,
    verdict_word,
)
from perfscope.reports.tables import Cell, Filled, HtmlTable
from perfscope.results.comparison import Comparison, Difference, Scaling, TimeChange, WorkChange
from perfscope.text import ABSENT, byte_size, factor, percent

MOST_ROWS: Final = 60
"""Kernels and operators listed, those with the largest changes."""

_NOT_RECORDED: Final = "not in this recording"


def difference_tables(difference: Difference, suffix: str) -> list[HtmlTable]:
    """All tables but the time breakdown, which the page draws; empty tables are left out."""
    made = [
        difference.metrics and _metrics(difference, suffix),
        difference.stages and _stages(difference, suffix),
        difference.path and _path(difference, suffix),
        difference.ranks and _ranks(difference, suffix),
        difference.collectives and _collectives(difference, suffix),
        _work("kernels", "Kernels", difference.kernels, suffix),
        _work("operators", "Operators", difference.operators, suffix),
    ]
    return [table for table in made if table]


def breakdown_table(difference: Difference, suffix: str) -> HtmlTable | None:
    """The time breakdown of baseline and candidate."""
    rows = difference.categories
    if not rows:
        return None
    largest = max(difference.step.baseline_us, difference.step.candidate_us)
    columns = [
        tables.words("Category", [category_name(row.name) for row in rows]),
        *_times(rows, largest=largest),
        _from_to("Range (99%)", [(row.low_us, row.high_us) for row in rows]),
        tables.words("Verdict", [category_verdict(difference, row) for row in rows], definition="significant"),
    ]
    reading = "Mean over ranks. The changes add up to that of the step time."
    return tables.table(f"breakdown{suffix}", "Time breakdown", columns, reading)


def settings_table(difference: Difference, suffix: str) -> HtmlTable | None:
    """Settings, versions and devices that differ."""
    changes = difference.settings
    if not changes:
        return None
    columns = [
        tables.words("Name", [change.name for change in changes]),
        tables.words("Kind", [change.about for change in changes]),
        tables.words("Baseline", [change.baseline or "" for change in changes], reason="not set, or not recorded"),
        tables.words("Candidate", [change.candidate or "" for change in changes], reason="not set, or not recorded"),
    ]
    return tables.table(f"settings{suffix}", "Differences between the runs", columns)


def scaling_table(comparison: Comparison, scaling: Scaling) -> HtmlTable:
    """Work per second and device for each number of devices."""
    rows = scaling.rows
    columns = [
        tables.words("Run", [comparison.runs[row.run].label for row in rows]),
        _counts("Devices", [row.devices for row in rows]),
        tables.durations("Step", [row.step_time_us for row in rows], definition="step_time"),
        tables.words("Scaling", [row.kind for row in rows], definition="scaling_kind"),
        tables.column("Speedup", [row.speedup for row in rows], factor),
        tables.column("Efficiency", [row.efficiency for row in rows], percent, definition="efficiency"),
        tables.durations("Ideal step", [row.ideal_step_us for row in rows]),
    ]
    names = [name for name in (rows[0].lost_us or {}) if any(abs(row.lost_us.get(name, 0.0)) > 0 for row in rows)]
    columns += [_deltas([row.lost_us.get(name) for row in rows], category_name(name)) for name in names]
    reading = (
        f"Work per device measured by: {scaling.work_from}. The columns of categories are the time above the ideal "
        "step; they add up to step − ideal."
    )
    return tables.table("scaling", "Scaling losses", columns, reading)


def _metrics(difference: Difference, suffix: str) -> HtmlTable:
    changes = difference.metrics
    columns = [
        tables.words("Metric", [LABELS.get(change.name, change.name) for change in changes]),
        _cells("Baseline", [(metric_value(change.baseline, change.unit), change.baseline) for change in changes]),
        _cells("Candidate", [(metric_value(change.candidate, change.unit), change.candidate) for change in changes]),
        _cells("Change", [(relative(change.baseline, change.candidate), change.delta) for change in changes]),
        _verdicts([change.significant for change in changes]),
    ]
    return tables.table(f"metrics{suffix}", "Metrics of the job", columns)


def _stages(difference: Difference, suffix: str) -> HtmlTable:
    rows = difference.stages
    columns = [
        tables.words("Stage", [stage_name(row.name) for row in rows]),
        *_times(rows),
        _from_to("Range (99%)", [(row.low_us, row.high_us) for row in rows]),
        _verdicts([row.significant for row in rows]),
    ]
    reading = (
        "Of the whole run without the profiler, mean over ranks, timed on the host: a stage holds its wait for the "
        "device and for other ranks."
    )
    return tables.table(f"stages{suffix}", "Stages of a step", columns, reading)


def _path(difference: Difference, suffix: str) -> HtmlTable:
    rows = difference.path
    columns = [tables.words("Category", [category_name(row.category) for row in rows]), *_times(rows)]
    reading = "The chain of work across ranks that fixes the step time. The changes add up to that of the step time."
    return tables.table(f"path{suffix}", "Critical path", columns, reading)


def _ranks(difference: Difference, suffix: str) -> HtmlTable:
    rows = difference.ranks
    names = [name for name in rows[0].categories_us if any(abs(row.categories_us[name]) >= 0.5 for row in rows)]
    columns = [tables.ranks("Rank", [row.rank for row in rows])]
    if any(row.baseline_host != row.candidate_host for row in rows):
        columns.append(tables.words("Baseline host", [row.baseline_host for row in rows]))
        columns.append(tables.words("Candidate host", [row.candidate_host for row in rows]))
    columns += [
        *_times(rows, ("Baseline step", "Candidate step", "Step change")),
        *(_deltas([row.categories_us[name] for row in rows], category_name(name)) for name in names),
        tables.words("Own time", ["changed differently" if row.stands_out else "like its peers" for row in rows]),
    ]
    reading = "The columns of categories are changes too. Own time is the step without waiting for late ranks."
    return tables.table(f"ranks{suffix}", "Ranks", columns, reading)


def _collectives(difference: Difference, suffix: str) -> HtmlTable:
    rows = difference.collectives
    columns = [
        tables.words("Group", [row.group for row in rows]),
        tables.words("Kind", [row.kind.replace("_", "-") for row in rows]),
        tables.words("Type", [row.dtype or "" for row in rows]),
        tables.column("Size", [row.bytes for row in rows], byte_size, reason=_NOT_RECORDED),
        tables.words("In", [_STATUS[row.status] for row in rows]),
        _counts("Baseline count", [row.baseline_count for row in rows]),
        _counts("Candidate count", [row.candidate_count for row in rows]),
        tables.durations("Baseline transfer", [row.baseline_transfer_us for row in rows], reason=_NOT_RECORDED),
        tables.durations("Candidate transfer", [row.candidate_transfer_us for row in rows], reason=_NOT_RECORDED),
        _deltas([row.delta_us for row in rows], "Change per step"),
        _deltas([row.wait_delta_us for row in rows], "Change of wait per step"),
        _verdicts([row.significant for row in rows]),
    ]
    reading = (
        "Transfer is the mean of one instance; counts and changes are per step. The verdict is on the change per step."
    )
    return tables.table(f"collectives{suffix}", "Collectives", columns, reading)


def _work(name: str, title: str, rows: Sequence[WorkChange], suffix: str) -> HtmlTable | None:
    shown = [row for row in rows if abs(row.delta_us) > 0][:MOST_ROWS]
    if not shown:
        return None
    columns = [
        tables.words(title[:-1], [row.name for row in shown]),
        tables.words("Class", [row.category for row in shown]),
        tables.words("In", [_STATUS[row.status] for row in shown]),
        _counts("Baseline calls", [row.baseline_count for row in shown]),
        _counts("Candidate calls", [row.candidate_count for row in shown]),
        *_times(shown),
        _deltas([row.from_count_us for row in shown], "By number of calls"),
        _deltas([row.from_duration_us for row in shown], "By duration of calls"),
        _verdicts([row.significant for row in shown]),
    ]
    more = f" The {MOST_ROWS} largest of {len(rows)}." if len(rows) > MOST_ROWS else ""
    reading = f"Per rank and step, the largest change first.{more}"
    return tables.table(f"{name}{suffix}", title, columns, reading)


_STATUS: Final = {"both": "both", "gone": "baseline only", "new": "candidate only"}


def _times(
    rows: Sequence[TimeChange],
    labels: tuple[str, str, str] = ("Baseline", "Candidate", "Change"),
    largest: float | None = None,
) -> list[Filled]:
    """Both times and their change."""
    return [
        tables.durations(labels[0], [row.baseline_us for row in rows], largest=largest),
        tables.durations(labels[1], [row.candidate_us for row in rows], largest=largest),
        _deltas([row.delta_us for row in rows], labels[2]),
    ]


def _deltas(values: Sequence[float | None], label: str = "Change") -> Filled:
    filled = tables.durations(label, [None if value is None else abs(value) for value in values], reason=_NOT_RECORDED)
    cells = [
        cell if value is None else Cell(text=_with_sign(cell.text, value), order=value)
        for cell, value in zip(filled.cells, values, strict=True)
    ]
    return Filled(column=filled.column, cells=tuple(cells))


def _with_sign(text: str, value: float) -> str:
    if value == 0 or text == "0":
        return "0"
    return f"{'−' if value < 0 else '+'}{text}"


def _verdicts(values: Sequence[bool | None]) -> Filled:
    return tables.words("Verdict", [verdict_word(value) for value in values], definition="significant")


def _from_to(label: str, ends: Sequence[tuple[float | None, float | None]]) -> Filled:
    cells = [
        tables.absent("not recorded for each step")
        if low is None or high is None
        else Cell(text=f"{signed(low)} to {signed(high)}" if low or high else "0", order=low)
        for low, high in ends
    ]
    return tables.numbers(label, cells)


def _cells(label: str, values: Sequence[tuple[str, float | None]]) -> Filled:
    return tables.numbers(
        label,
        [tables.absent(_NOT_RECORDED) if text == ABSENT else Cell(text=text, order=value) for text, value in values],
    )


def _counts(label: str, values: Sequence[float]) -> Filled:
    return tables.column(label, values, lambda value: f"{value:,.4g}")
