"""Comparisons and checks for the terminal, in colours where there are any."""

from __future__ import annotations

import textwrap
from typing import Final

from perfscope.reports.compare import words
from perfscope.reports.paint import PLAIN, Paint
from perfscope.results.budget import FAILED, PASSED, SKIPPED, UNKNOWN, Check
from perfscope.results.comparison import CategoryChange, Comparison, Difference, StageChange
from perfscope.text import duration, printable

_MARKS: Final = {
    PASSED: ("passed", "good"), FAILED: ("FAILED", "bad"), UNKNOWN: ("UNKNOWN", "warning"), SKIPPED: ("skipped", ""),
}  # fmt: skip
_TONES: Final = {"faster": "good", "slower": "bad", "same": "", "unknown": "warning"}
"""Verdict on a step time -> how it is shown."""


def comparison(value: Comparison, paint: Paint = PLAIN) -> str:
    """What the page says first, each candidate against the baseline, then how the job scales."""
    blocks = [_difference(value, difference, paint) for difference in value.differences]
    title = words.title(value)
    if value.scaling is not None or len(value.differences) > 1:
        tone = _TONES[words.tone(value)]
        blocks.insert(0, [paint.tone(line, tone) for line in _wrapped(title, paint.width)])
    if value.scaling is not None:
        blocks.append([line for sentence in words.scaled(value.scaling) for line in _wrapped(sentence, paint.width)])
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def check(value: Check, paint: Paint = PLAIN) -> str:
    """One line per check, failed checks first."""
    lines = []
    for row in sorted(value.rows, key=lambda row: row.status in (PASSED, SKIPPED)):
        measured = words.metric_value(row.measured, row.unit)
        limit = f" (limit {words.metric_value(row.limit, row.unit)})" if row.limit is not None else ""
        number = f"{measured}{limit}; " if row.measured is not None else ""
        mark, tone = _MARKS[row.status]
        first, *others = _wrapped(f"{mark:<9} {row.name}: {number}{row.message}", paint.width, indent=10)
        lines += [paint.tone(mark, tone) + first[len(mark) :], *others]
    lines += [line for note in value.notes for line in _wrapped(note, paint.width)]
    return "\n".join([*lines, words.checked(value)]) + "\n"


def _difference(value: Comparison, difference: Difference, paint: Paint) -> list[str]:
    width, tone = paint.width, _TONES[difference.step.verdict]
    lines = [paint.tone(line, tone) for line in _wrapped(words.headline(value, difference), width)]
    for lead, text in (*words.sentences(difference), ("Confidence", words.certainty(difference))):
        lines += _wrapped(f"{lead + ':':<11} {text}", width, indent=12)
    rows: list[tuple[str, CategoryChange | StageChange]]
    rows = [(words.category_name(row.name), row) for row in difference.categories]
    rows = rows or [(words.stage_name(stage.name), stage) for stage in difference.stages]
    shown = [
        (name, row) for name, row in rows if row.significant or abs(row.delta_us) >= 0.01 * difference.step.baseline_us
    ]
    if shown:
        lines.append("")
        for name, row in shown:
            times = (
                f"{duration(row.baseline_us):>8} -> {duration(row.candidate_us):>8}  {words.signed(row.delta_us):>9}"
            )
            tone = ("bad" if row.delta_us > 0 else "good") if row.significant else ""
            verdict = paint.tone(words.category_verdict(difference, row), tone)
            lines.append(f"  {name:<33}{times}  {verdict}")
    findings = [f"  {finding.status:<5} {printable(finding.title)}" for finding in difference.findings]
    return [*lines, *(["", "Findings:", *findings] if findings else [])]


def _wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        printable(text), max(width, 40), subsequent_indent=" " * min(indent, 20), break_on_hyphens=False
    )
