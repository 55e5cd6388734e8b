"""Markdown for pull requests and job summaries: a verdict, a short table, details that unfold.

GitHub, GitLab and Gitea render it alike. What came from a recording is escaped: a name can neither format nor link.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from perfscope.reports.compare import words
from perfscope.reports.page import advice, crash, hang, overview, run_history, tiles
from perfscope.results.budget import FAILED, PASSED, SKIPPED, UNKNOWN, Check, CheckRow
from perfscope.results.categories import TimeCategory
from perfscope.results.comparison import Comparison, Difference, WorkChange
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import shares
from perfscope.text import byte_size, duration, factor, percent, printable

_SPECIAL: Final = re.compile(r"([\\`*_\[\]|~])")

_REFERENCE: Final = re.compile(r"[@#](?=\w)|:(?=//)")
"""What hosts make links of, to users, issues and addresses, even where it is escaped."""

_MOST_ROWS: Final = 15
"""Rows of a table: a comment is read on a phone, and hosts cut long ones."""

_ICONS: Final = {PASSED: "✅", FAILED: "❌", UNKNOWN: "❔", SKIPPED: "➖"}
_TONES: Final = {"faster": "🟢", "slower": "🔴", "same": "⚪", "unknown": "❔"}


def of_summary(summary: Summary) -> str:
    """One analysis."""
    taken = shares(summary.time_breakdown)
    lines = [f"### PerfScope: {escaped(summary.verdict.headline)}", ""]
    lines.append(escaped(" · ".join(overview.identity(summary))))
    if summary.verdict.first_action:
        lead = f"**{summary.verdict.lead}:** " if summary.verdict.lead else ""
        lines += ["", f"{lead}{escaped(summary.verdict.first_action)}"]
    if summary.crash is not None:
        lines += ["", *(f"- {escaped(line.strip())}" for line in crash.terminal_lines(summary.crash))]
    if summary.hang is not None:
        lines += ["", escaped(f"{hang.reading(summary.hang)} {hang.certainty(summary.hang)}")]
    numbers = [[tile.label, tile.value, tile.detail] for tile in tiles.tiles(summary)]
    if numbers:
        lines += ["", *_table(["", "", ""], numbers)]
    for over_run in filter(None, (run_history.comparison(summary), run_history.goodput_reading(summary))):
        lines += ["", escaped(over_run)]
    if summary.findings:
        cards = advice.cards(summary)[:_MOST_ROWS]
        rows = [[str(card.number), card.finding.title, card.finding.severity, card.speedup.short] for card in cards]
        table = _table(["", "finding", "severity", "speedup"], rows)
        costs = [
            f"- Change {card.number} costs: {escaped(card.finding.action.costs)}"
            for card in cards
            if card.finding.action.costs
        ]
        lines += ["", *_folded("What to change", [*table, "", *costs] if costs else table)]
    parts = [[category.label, percent(taken[category.id])] for category in TimeCategory if taken[category.id] > 0]
    if parts:
        lines += ["", *_folded("Time breakdown, mean of all ranks", _table(["", "share"], parts))]
    return "\n".join([*lines, "", _sign(summary.perfscope_version)]) + "\n"


def of_comparison(comparison: Comparison) -> str:
    """Each candidate against the baseline."""
    lines: list[str] = []
    for difference in comparison.differences:
        lines += [*_difference(comparison, difference), ""]
    if comparison.scaling is not None:
        rows = [
            [
                comparison.runs[row.run].label, str(row.devices), duration(row.step_time_us),
                factor(row.speedup), percent(row.efficiency), row.kind,
            ]
            for row in comparison.scaling.rows
        ]  # fmt: skip
        heads = ["run", "devices", "step", "speedup", "efficiency", "scaling"]
        lines += [*_folded("Scaling", _table(heads, rows)), ""]
    return "\n".join([*lines, _sign(comparison.perfscope_version)]) + "\n"


def of_check(check: Check) -> str:
    """A job against its budget."""
    lines = [f"### {'✅' if check.passed else '❌'} PerfScope: {words.checked(check)}", "", escaped(check.headline), ""]
    shown = sorted(check.rows, key=lambda row: row.status in (PASSED, SKIPPED))
    heads = ["", "check", "measured", "limit", "baseline"]
    lines += _table(heads, [_check_cells(row) for row in shown[:_MOST_ROWS]])
    if len(shown) > _MOST_ROWS:
        lines += ["", f"… and {len(shown) - _MOST_ROWS} more."]
    details = [f"- {_ICONS[row.status]} **{escaped(row.name)}**: {escaped(row.message)}" for row in shown]
    lines += ["", *_folded("Details", details)]
    lines += [f"> {escaped(note)}" for note in check.notes]
    return "\n".join([*lines, "", _sign(check.perfscope_version)]) + "\n"


def escaped(text: str) -> str:
    """Text that Markdown and HTML take as it is, on one line."""
    plain = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _REFERENCE.sub(r"\g<0><!-- -->", _SPECIAL.sub(r"\\\1", plain))


def _difference(comparison: Comparison, difference: Difference) -> list[str]:
    icon = _TONES[difference.step.verdict]
    lines = [f"### {icon} PerfScope: {escaped(words.headline(comparison, difference))}", ""]
    lines += [f"- **{lead}:** {escaped(sentence)}" for lead, sentence in words.sentences(difference)]
    metrics = [
        [
            words.LABELS.get(change.name, change.name), words.metric_value(change.baseline, change.unit),
            words.metric_value(change.candidate, change.unit), words.relative(change.baseline, change.candidate),
        ]
        for change in difference.metrics
    ]  # fmt: skip
    lines += ["", *_table(["", "baseline", "candidate", "change"], metrics[:6])]
    rows = [
        [words.category_name(row.name), duration(row.baseline_us), duration(row.candidate_us),
         words.signed(row.delta_us), words.category_verdict(difference, row)]
        for row in difference.categories if row.baseline_us > 0 or row.candidate_us > 0
    ]  # fmt: skip
    if rows:
        lines += ["", *_folded("Where the time goes", _table(["", "baseline", "candidate", "change", "verdict"], rows))]
    lines += _worked("Kernels", difference.kernels) + _worked("Operators", difference.operators)
    lines += _communicated(difference)
    if difference.findings:
        findings = [f"- {finding.status}: {escaped(finding.title)}" for finding in difference.findings]
        lines += ["", *_folded("Findings", findings)]
    return [*lines, "", f"<sub>{escaped(words.certainty(difference))}</sub>"]


def _worked(title: str, changes: Sequence[WorkChange]) -> list[str]:
    """The kernels or operators that changed significantly."""
    rows = [
        [change.name[:80], duration(change.baseline_us), duration(change.candidate_us), words.signed(change.delta_us)]
        for change in changes
        if change.significant
    ]
    if not rows:
        return []
    return ["", *_folded(f"{title} that changed", _table(["", "baseline", "candidate", "change"], rows[:_MOST_ROWS]))]


def _communicated(difference: Difference) -> list[str]:
    rows = [
        [f"{change.kind} in {change.group}", byte_size(change.bytes), words.signed(change.delta_us), change.status]
        for change in difference.collectives
        if change.significant
    ]
    if not rows:
        return []
    return ["", *_folded("Collectives that changed", _table(["", "size", "change per step", "in"], rows[:_MOST_ROWS]))]


def _check_cells(row: CheckRow) -> list[str]:
    return [
        _ICONS[row.status],
        row.name,
        words.metric_value(row.measured, row.unit),
        words.metric_value(row.limit, row.unit),
        words.metric_value(row.baseline, row.unit),
    ]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, *rows]
    written = [f"| {' | '.join(escaped(cell) for cell in line)} |" for line in lines]
    return [written[0], f"|{'---|' * len(heads)}", *written[1:]]


def _folded(title: str, lines: Sequence[str]) -> list[str]:
    """A part that unfolds; the blank lines make hosts read Markdown inside HTML."""
    return ["<details>", f"<summary>{escaped(title)}</summary>", "", *lines, "", "</details>"]


def _sign(version: str) -> str:
    return f"<sub>PerfScope {version}</sub>"
