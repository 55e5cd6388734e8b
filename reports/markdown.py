"""Markdown for pull requests and job summaries: a verdict, a short table, details that unfold.

GitHub, GitLab and Gitea render it alike. What came from a recording is escaped: a name can neither format nor link.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from perfscope.budget import EXCEEDED, HELD, SKIPPED, UNKNOWN, Check, CheckRow
from perfscope.comparison import Comparison, Difference, WorkChange
from perfscope.reports import advice, overview
from perfscope.reports import difference_words as words
from perfscope.reports.categories import CATEGORIES, shares
from perfscope.reports.format import byte_size, duration, plural, printable, share, significant
from perfscope.summary import Summary

_SPECIAL: Final = re.compile(r"([\\`*_\[\]|~])")

_REFERENCE: Final = re.compile(r"[@#](?=\w)|:(?=//)")
"""What hosts make links of, to users, issues and addresses, even where it is escaped."""

_MOST_ROWS: Final = 15
"""Rows of a table: a comment is read on a phone, and hosts cut long ones."""

_ICONS: Final = {HELD: "✅", EXCEEDED: "❌", UNKNOWN: "❔", SKIPPED: "➖"}
_TONES: Final = {"faster": "🟢", "slower": "🔴", "same": "⚪", "unknown": "❔"}


def of_summary(summary: Summary) -> str:
    """One analysis."""
    taken = shares(summary.accounting)
    lines = [f"### PerfScope: {escaped(summary.verdict.headline)}", ""]
    lines.append(escaped(" · ".join(overview.identity(summary))))
    if summary.verdict.first_action:
        lines += ["", f"**Do first:** {escaped(summary.verdict.first_action)}"]
    tiles = overview.tiles(summary)
    lines += ["", *_table(["", "", ""], [[tile.label, tile.value, tile.detail] for tile in tiles])]
    if summary.findings:
        rows = [
            [str(card.number), card.finding.title, card.finding.severity, card.gain.short]
            for card in advice.cards(summary)[:_MOST_ROWS]
        ]
        lines += ["", *_folded("What to change", _table(["", "finding", "severity", "worth"], rows))]
    parts = [[category.label, share(taken[category.name])] for category in CATEGORIES if taken[category.name] > 0]
    lines += ["", *_folded("Where the time goes, all ranks", _table(["", "share"], parts))]
    return "\n".join([*lines, "", _sign(summary.perfscope_version)]) + "\n"


def of_comparison(comparison: Comparison) -> str:
    """Every run against the first."""
    lines: list[str] = []
    for difference in comparison.differences:
        lines += [*_difference(comparison, difference), ""]
    if comparison.scaling is not None:
        rows = [
            [
                comparison.runs[row.run].label, str(row.devices), duration(row.step_time_us),
                f"{significant(row.speedup)}×", share(row.efficiency), row.kind,
            ]
            for row in comparison.scaling.rows
        ]  # fmt: skip
        heads = ["run", "devices", "step", "speed-up", "efficiency", "scaling"]
        lines += [*_folded("Scaling", _table(heads, rows)), ""]
    return "\n".join([*lines, _sign(comparison.perfscope_version)]) + "\n"


def of_check(check: Check) -> str:
    """A job against its budget."""
    broken = len(check.broken)
    verdict = (
        f"the budget holds ({plural(len(check.rows), 'check')})"
        if check.held
        else f"{broken} of {len(check.rows)} broken"
    )
    lines = [f"### {'✅' if check.held else '❌'} PerfScope: {verdict}", "", escaped(check.headline), ""]
    shown = sorted(check.rows, key=lambda row: row.status in (HELD, SKIPPED))
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
    for lead, sentence in (
        ("Why", words.because(difference)),
        ("What was changed", words.changed(difference)),
        *(("Predicted", words.prediction(tried)) for tried in difference.tried),
        *(("Mind", note) for note in difference.notes),
    ):
        if sentence:
            lines.append(f"- **{lead}:** {escaped(sentence)}")
    metrics = [
        [
            words.LABELS.get(change.name, change.name), words.metric_value(change.before, change.unit),
            words.metric_value(change.after, change.unit), words.relative(change.before, change.after),
        ]
        for change in difference.metrics
    ]  # fmt: skip
    lines += ["", *_table(["", "before", "after", "change"], metrics[:6])]
    rows = [
        [words.row_name(row.name), duration(row.before_us), duration(row.after_us), words.signed(row.delta_us),
         words.verdict_word(row.real)]
        for row in difference.rows if row.before_us > 0 or row.after_us > 0
    ]  # fmt: skip
    if rows:
        lines += ["", *_folded("Where the time goes", _table(["", "before", "after", "change", "verdict"], rows))]
    lines += _worked("Kernels", difference.kernels) + _worked("Operators", difference.operators)
    lines += _communicated(difference)
    if difference.findings:
        found = [f"- {finding.status}: {escaped(finding.title)}" for finding in difference.findings]
        lines += ["", *_folded("Findings", found)]
    return [*lines, "", f"<sub>{escaped(words.certainty(difference))}</sub>"]


def _worked(title: str, changes: Sequence[WorkChange]) -> list[str]:
    """The kernels or operators whose change is more than noise."""
    rows = [
        [change.name[:80], duration(change.before_us), duration(change.after_us), words.signed(change.delta_us)]
        for change in changes
        if change.real
    ]
    if not rows:
        return []
    return ["", *_folded(f"{title} that changed", _table(["", "before", "after", "change"], rows[:_MOST_ROWS]))]


def _communicated(difference: Difference) -> list[str]:
    rows = [
        [f"{change.kind} in {change.group}", byte_size(change.bytes), words.signed(change.delta_us), change.status]
        for change in difference.collectives
        if change.real
    ]
    if not rows:
        return []
    return ["", *_folded("Collectives that changed", _table(["", "size", "change a step", "in"], rows[:_MOST_ROWS]))]


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
