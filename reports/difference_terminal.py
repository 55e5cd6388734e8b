"""Comparisons and checks for the terminal: plain text without colours."""

from __future__ import annotations

import textwrap
from typing import Final

from perfscope.budget import EXCEEDED, HELD, SKIPPED, UNKNOWN, Check
from perfscope.comparison import Comparison, Difference
from perfscope.reports import difference_words as words
from perfscope.reports.format import duration, plural, printable

_MARKS: Final = {HELD: "held", EXCEEDED: "EXCEEDED", UNKNOWN: "UNKNOWN", SKIPPED: "skipped"}


def comparison(value: Comparison, width: int = 100) -> str:
    """Each run against the first, then how the job scales."""
    blocks = [_difference(value, difference, width) for difference in value.differences]
    if value.scaling is not None:
        blocks.append(
            [
                line
                for row in value.scaling.rows
                if row.kind not in ("base", "same")
                for line in _wrapped(words.scaled(row), width)
            ]
        )
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def check(value: Check, width: int = 100) -> str:
    """One line a limit, what is broken first."""
    lines = []
    for row in sorted(value.rows, key=lambda row: row.status in (HELD, SKIPPED)):
        measured = words.metric_value(row.measured, row.unit)
        limit = f" (limit {words.metric_value(row.limit, row.unit)})" if row.limit is not None else ""
        number = f"{measured}{limit}; " if row.measured is not None else ""
        lines += _wrapped(f"{_MARKS[row.status]:<9} {row.name}: {number}{row.message}", width, indent=10)
    lines += [line for note in value.notes for line in _wrapped(note, width)]
    total = len(value.rows)
    lines.append(f"{plural(total, 'check')} held" if value.held else f"{len(value.broken)} of {total} checks broken")
    return "\n".join(lines) + "\n"


def _difference(value: Comparison, difference: Difference, width: int) -> list[str]:
    lines = _wrapped(words.headline(value, difference), width)
    for lead, text in (
        ("Why", words.because(difference)),
        ("Changed", words.changed(difference)),
        *(("Predicted", words.prediction(tried)) for tried in difference.tried),
        *(("Mind", note) for note in difference.notes),
        ("How sure", words.certainty(difference)),
    ):
        if text:
            lines += _wrapped(f"{lead + ':':<10} {text}", width, indent=11)
    shown = [row for row in difference.rows if row.real or abs(row.delta_us) >= 0.01 * difference.step.before_us]
    if shown:
        lines.append("")
        for row in shown:
            times = f"{duration(row.before_us):>8} -> {duration(row.after_us):>8}  {words.signed(row.delta_us):>9}"
            lines.append(f"  {words.row_name(row.name):<33}{times}  {words.verdict_word(row.real)}")
    found = [f"  {finding.status:<5} {printable(finding.title)}" for finding in difference.findings]
    return [*lines, *(["", "Findings:", *found] if found else [])]


def _wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        printable(text), max(width, 40), subsequent_indent=" " * min(indent, 20), break_on_hyphens=False
    )
