"""Comparisons and checks for the terminal: plain text without colours."""

from __future__ import annotations

import textwrap
from typing import Final

from perfscope.reports.compare import words
from perfscope.results.budget import FAILED, PASSED, SKIPPED, UNKNOWN, Check
from perfscope.results.comparison import Comparison, Difference
from perfscope.text import duration, printable

_MARKS: Final = {PASSED: "passed", FAILED: "FAILED", UNKNOWN: "UNKNOWN", SKIPPED: "skipped"}


def comparison(value: Comparison, width: int = 100) -> str:
    """Each candidate against the baseline, then how the job scales."""
    blocks = [_difference(value, difference, width) for difference in value.differences]
    if value.scaling is not None:
        blocks.append([line for sentence in words.scaled(value.scaling) for line in _wrapped(sentence, width)])
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def check(value: Check, width: int = 100) -> str:
    """One line per check, failed checks first."""
    lines = []
    for row in sorted(value.rows, key=lambda row: row.status in (PASSED, SKIPPED)):
        measured = words.metric_value(row.measured, row.unit)
        limit = f" (limit {words.metric_value(row.limit, row.unit)})" if row.limit is not None else ""
        number = f"{measured}{limit}; " if row.measured is not None else ""
        lines += _wrapped(f"{_MARKS[row.status]:<9} {row.name}: {number}{row.message}", width, indent=10)
    lines += [line for note in value.notes for line in _wrapped(note, width)]
    return "\n".join([*lines, words.checked(value)]) + "\n"


def _difference(value: Comparison, difference: Difference, width: int) -> list[str]:
    lines = _wrapped(words.headline(value, difference), width)
    for lead, text in (*words.sentences(difference), ("Confidence", words.certainty(difference))):
        lines += _wrapped(f"{lead + ':':<11} {text}", width, indent=12)
    shown = [
        row
        for row in difference.categories
        if row.significant or abs(row.delta_us) >= 0.01 * difference.step.baseline_us
    ]
    if shown:
        lines.append("")
        for row in shown:
            times = (
                f"{duration(row.baseline_us):>8} -> {duration(row.candidate_us):>8}  {words.signed(row.delta_us):>9}"
            )
            lines.append(f"  {words.category_name(row.name):<33}{times}  {words.verdict_word(row.significant)}")
    findings = [f"  {finding.status:<5} {printable(finding.title)}" for finding in difference.findings]
    return [*lines, *(["", "Findings:", *findings] if findings else [])]


def _wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        printable(text), max(width, 40), subsequent_indent=" " * min(indent, 20), break_on_hyphens=False
    )
