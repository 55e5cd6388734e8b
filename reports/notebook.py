"""Results in a notebook's cell: the verdict in a few lines, and where to go on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from perfscope.reports.compare import words
from perfscope.reports.html import environment
from perfscope.reports.page import advice, overview
from perfscope.results.budget import Check
from perfscope.results.categories import TimeCategory
from perfscope.results.comparison import Comparison, Difference
from perfscope.results.findings import Block, Finding, Findings, Prediction, blocks
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import shares
from perfscope.text import ABSENT, duration, factor, percent, ranks_in_words

_VISIBLE_SHARE: Final = 0.01
"""Smaller parts of the step are left out."""


def summary(value: Summary) -> str:
    """The verdict as a fragment of HTML; everything that came from a recording is escaped, as in all of these."""
    taken = shares(value.time_breakdown)
    shown = [category for category in TimeCategory if taken[category.id] >= _VISIBLE_SHARE]
    return (
        environment()
        .get_template("notebook.html")
        .render(
            verdict=value.verdict,
            identity=overview.identity(value),
            step_time=duration(value.job.step_time_us),
            parts=[(category.label, percent(taken[category.id])) for category in shown],
        )
    )


def findings(value: Findings) -> str:
    """A row for each finding."""
    rows = [
        (str(number), each.title, each.severity, _speed(each), each.action.setting)
        for number, each in enumerate(value, start=1)
    ]
    title = "What to change" if rows else "Nothing worth changing was found."
    return _table([title], ("", "Finding", "Severity", "Step with the change", "Setting"), rows)


def finding(value: Finding) -> str:
    """What limits the job, by which numbers, and what to change."""
    lines = [value.title, f"{value.severity} severity, {value.confidence} confidence. {_speed(value)}".strip()]
    rows = [
        (each.what, advice.measure(each.value, each.unit), ranks_in_words(each.ranks) if each.ranks else "")
        for each in value.evidence
    ]
    costs = [Block("", f"Costs: {value.action.costs}")] if value.action.costs else []
    return _table(lines, ("Evidence", "Value", "Ranks"), rows, [*blocks(value.action.how), *costs])


def comparison(value: Comparison) -> str:
    """What changed, for each candidate."""
    lines = [words.title(value)]
    if len(value.differences) > 1 or value.scaling is not None:
        lines += [words.headline(value, each) for each in value.differences]
    for each in value.differences if len(value.differences) == 1 else ():
        lines += [f"{lead}: {text}" for lead, text in words.sentences(each)]
    rows = [(value.runs[each.candidate].label, *row) for each in value.differences for row in _changes(each)]
    return _table(lines, ("Candidate", "Part of the step", "Baseline", "Candidate", "Change", "Verdict"), rows)


def check(value: Check) -> str:
    """A row for each check, those that failed first."""
    rows = [
        (each.name, each.status, each.message) for each in sorted(value.rows, key=lambda row: row not in value.failed)
    ]
    return _table([words.checked(value), value.headline], ("Check", "Status", "Why"), rows)


def whatif(value: Any) -> str:
    """A prediction, with what it is compared with; ``value`` is a ``WhatIfAnswer``."""
    settings = ", ".join(f"{name}={setting}" for name, setting in value.settings.items()) or "no change"
    predicted: Prediction = value.predicted_us
    measured_us = value.measured_ns / 1e3
    lines = [f"{settings}: {duration(predicted.mid)} per step instead of {duration(measured_us)}"]
    rows = [
        (name, duration(us), factor(measured_us / us) if us else ABSENT)
        for name, us in (
            ("Measured", measured_us), ("Replayed without a change", value.replayed_ns / 1e3),
            ("Predicted", predicted.mid), ("Predicted at best", predicted.low), ("Predicted at worst", predicted.high),
        )
    ]  # fmt: skip
    return _table(lines, ("Step", "Time", "Speedup"), rows, [Block("", text) for text in value.assumed])


def _changes(difference: Difference) -> list[tuple[str, ...]]:
    return [
        (
            words.category_name(row.name), duration(row.baseline_us), duration(row.candidate_us),
            words.signed(row.delta_us), words.category_verdict(difference, row),
        )
        for row in difference.categories
        if row.significant or abs(row.delta_us) >= _VISIBLE_SHARE * difference.step.baseline_us
    ]  # fmt: skip


def _speed(value: Finding) -> str:
    predicted = value.predicted_step_us
    if predicted is not None:
        return f"{duration(predicted.mid)} ({duration(predicted.low)} to {duration(predicted.high)})"
    return f"at most {factor(1 + value.ceiling)} faster" if value.ceiling is not None else ""


def _table(
    lines: Sequence[str], heads: Sequence[str], rows: Iterable[Sequence[str]], further: Sequence[Block] = ()
) -> str:
    return (
        environment()
        .get_template("notebook_table.html")
        .render(lines=lines, heads=heads, rows=list(rows), blocks=further)
    )
