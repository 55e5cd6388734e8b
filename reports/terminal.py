"""The verdict for the terminal: what limits the job, which rank, and what to type, in colours where there are any."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable

from perfscope.reports.page import advice, crash, gaps, hang, overview, roles, run_history, tiles
from perfscope.reports.paint import PLAIN, Paint
from perfscope.results.attribution import attributed_ranks
from perfscope.results.categories import IDLE, TimeCategory
from perfscope.results.notes import ended
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import TimeBreakdown
from perfscope.text import duration, of_recording, plural, printable

ALL_RANKS_UP_TO = 8
"""Of more ranks only the extremes are shown."""

FINDINGS_SHOWN = 3

_BAR = len(Paint(coloured=True).stack(()))
"""Columns of a bar."""

_UNBROKEN = "\N{NO-BREAK SPACE}"

_MARK = f"■{_UNBROKEN}"
"""Before a category's name, in its colour: as text some colours could not be read."""

_VISIBLE_SHARE = 0.01
"""Smaller categories are left out of a rank's line, and ranks that differ by less are no extremes."""


def verdict(summary: Summary, paint: Paint = PLAIN) -> str:
    """A short verdict, at most ``paint.width`` columns wide; lines to be typed are never broken."""
    width = paint.width
    blocks = [
        [paint.faint(line) for line in _wrapped(" · ".join(overview.identity(summary)), width)],
        _headline(summary, paint),
        _wrapped(overview.certainty(summary), width),
        _failed_or_stuck(summary, width),
        _roles(summary, width),
        _numbers(summary, paint),
        _wrapped(run_history.comparison(summary), width),
        _wrapped(run_history.goodput_reading(summary), width),
        _wrapped(run_history.cost_reading(summary), width),
        _breakdowns(summary, paint),
        _findings(summary, paint),
        cost_lines(summary, width),
        _missing(summary, width),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def extremes(rows: Iterable[TimeBreakdown], stragglers: Iterable[int]) -> list[tuple[TimeBreakdown, str]]:
    """The ranks that stand for many, by rank, each with what it is the extreme of."""
    rows = list(rows)
    labels: dict[int, list[str]] = {}
    for rank in list(stragglers)[:2]:
        labels.setdefault(rank, []).append("straggler")
    measures: dict[str, Callable[[TimeBreakdown], float]] = {
        "slowest step": lambda row: row.step_time_us,
        "most compute": lambda row: row.compute_us,
        "least compute": lambda row: -row.compute_us,
        "most waiting": lambda row: row.exposed_comm_wait_us,
        "most idle": lambda row: row.step_time_us * row.share(*IDLE),
    }
    for label, measure in measures.items():
        lowest, highest = min(rows, key=measure), max(rows, key=measure)
        if measure(highest) - measure(lowest) >= _VISIBLE_SHARE * highest.step_time_us:
            labels.setdefault(highest.rank, []).append(label)
    if not labels:
        labels[rows[0].rank] = ["all ranks are similar"]
    return [(row, ", ".join(labels[row.rank])) for row in rows if row.rank in labels]


def _headline(summary: Summary, paint: Paint) -> list[str]:
    first, lead = summary.verdict.first_action, summary.verdict.lead
    tone = "good" if summary.verdict.healthy else "bad"
    return [
        *(paint.tone(line, tone) for line in _wrapped(summary.verdict.headline, paint.width)),
        *(paint.bold(line) for line in _wrapped(f"{lead}: {first}" if first and lead else first or "", paint.width)),
    ]


def _failed_or_stuck(summary: Summary, width: int) -> list[str]:
    """Of a job that failed, who failed in consequence; of one that stands still, who is missing, and where ranks are in
    the code.
    """
    lines = (
        *(crash.terminal_lines(summary.crash) if summary.crash is not None else ()),
        *(hang.terminal_lines(summary.hang) if summary.hang is not None else ()),
    )
    return [part for line in lines for part in _wrapped(line, width, indent=4 if line.startswith(" ") else 0)]


def _roles(summary: Summary, width: int) -> list[str]:
    """Of several roles: who is busy, and who waits for whom."""
    lines = roles.terminal_lines(summary.roles) if summary.roles is not None else []
    return [part for line in lines for part in _wrapped(line, width, indent=4 if line.startswith(" ") else 0)]


def _numbers(summary: Summary, paint: Paint) -> list[str]:
    lines, shown = [], tiles.tiles(summary)
    widest = max((len(tile.value) for tile in shown), default=0)
    for tile in shown:
        text = f"{tile.label + ':':<23}{tile.value:<{widest}}  {tile.detail}"
        first, *others = _wrapped(text, paint.width, indent=25 + widest)
        lines += [first[:23] + paint.bold(first[23 : 23 + widest]) + first[23 + widest :], *others]
    return lines


def _breakdowns(summary: Summary, paint: Paint) -> list[str]:
    """One line per rank: the time breakdown of its mean step."""
    rows = summary.time_breakdown
    if not rows:
        return []
    shown = [(row, "") for row in rows]
    heading = "Time breakdown per rank, mean per step"
    if len(rows) > ALL_RANKS_UP_TO:
        shown = extremes(rows, attributed_ranks(summary.stragglers))
        heading += f" ({len(shown)} of {plural(len(rows), 'rank')})"
    heading = of_recording(heading) if summary.is_one_window else heading
    digits = max(len(str(row.rank)) for row, _ in shown)
    lines = _wrapped(f"{heading}:", paint.width)
    for row, label in shown:
        start = f"  rank {row.rank:>{digits}}  {duration(row.step_time_us):>8}  "
        bar = paint.stack((category.id, row.share(category.id)) for category in TimeCategory)
        shares = {category: row.share(category.id) for category in TimeCategory}
        taken = {
            category: share
            for category, share in shares.items()
            if share >= _VISIBLE_SHARE or (category is TimeCategory.COMPUTE and share > 0)
        }
        mark = _MARK * paint.coloured
        parts = ", ".join(f"{mark}{category.short}{_UNBROKEN}{_whole(share)}" for category, share in taken.items())
        blank = " " * (len(start) + _BAR * paint.coloured)
        text = "\n".join(_wrapped(blank + parts + (f"  ({label})" if label else ""), paint.width, indent=len(blank)))
        for category in taken if mark else ():
            # Only now, because colours take no columns.
            text = text.replace(_MARK, paint.named(_MARK, category.id).replace(_UNBROKEN, " "), 1)
        lines += (start + bar + text.replace(_UNBROKEN, " ")[len(blank) :]).split("\n")
    return lines


def _whole(share: float) -> str:
    """A share in whole percent; what is there is not called 0%."""
    return "<1%" if 0 < share < 0.005 else f"{100 * share:.0f}%"


def _findings(summary: Summary, paint: Paint) -> list[str]:
    """The first findings, each with its speedup, what to type, and what that costs."""
    cards, width = advice.cards(summary), paint.width
    lines: list[str] = []
    for card in cards[:FINDINGS_SHOWN]:
        finding, action = card.finding, card.finding.action
        if lines:
            lines.append("")
        title = _wrapped(f"{card.number}. {finding.title} [{finding.severity}]", width, indent=3)
        lines += [paint.bold(line) for line in title]
        lines += _wrapped(f"   {card.speedup.full} {finding.confidence.capitalize()} confidence.", width, indent=3)
        values = (action.old, action.new) if action.new not in (None, action.old) else ()
        change = " -> ".join(value for value in values if value is not None)
        if action.setting:
            lines += _wrapped(f"   {action.setting}{': ' + change if change else ''}", width, indent=3)
        for block in card.how:
            # A line to type stays whole; a sentence may be broken.
            written = (
                _wrapped(f"     {block.text}", width, indent=5)
                if not block.language
                else [f"       {paint.code(printable(line))}" for line in block.text.splitlines()]
            )
            lines += written
        if action.costs:
            lines += _wrapped(f"     Costs: {action.costs}", width, indent=5)
    if len(cards) > FINDINGS_SHOWN:
        lines += ["", f"{plural(len(cards) - FINDINGS_SHOWN, 'more finding')} in the report."]
    return lines


def cost_lines(summary: Summary, width: int = 100) -> list[str]:
    """What each finding saves, by its number, and all of them together; empty where no price was given, or nothing is
    saved. The cost itself is one of the first screen's numbers.
    """
    cost = summary.cost
    if cost is None:
        return []
    rows = [
        f"  finding {row.finding + 1} saves {advice.saving(row, cost)}"
        for row in cost.savings
        if row.finding is not None
    ]
    if cost.plan is not None:
        rows.append(f"  all replayed changes together save {advice.saving(cost.plan, cost)}; savings overlap")
    if rows:
        rows.insert(0, f"Savings, at {advice.amount(cost.price_per_device_hour, cost)} per device-hour:")
    return [line for row in rows for line in _wrapped(row, width, indent=2)]


def _missing(summary: Summary, width: int) -> list[str]:
    """What could not be analyzed, and how many notes the report has."""
    failures = summary.job.failures
    lines: list[str] = []
    for failure in failures[:FINDINGS_SHOWN]:
        who = "" if failure.rank is None else f"rank {failure.rank}: "
        lines += _wrapped(f"Not analyzed: {who}{failure.path}: {failure.reason}", width, indent=2)
    if len(failures) > FINDINGS_SHOWN:
        lines.append(f"… and {plural(len(failures) - FINDINGS_SHOWN, 'more file')} not analyzed.")
    if summary.job.missing_ranks:
        lines += _wrapped(gaps.missing(summary.job), width, indent=2)
    damage = [note.text for note in summary.notes if note.about == "reading"]
    for text in damage[:FINDINGS_SHOWN]:
        lines += _wrapped(text, width, indent=2)
    if len(damage) > FINDINGS_SHOWN:
        lines.append(f"… and {plural(len(damage) - FINDINGS_SHOWN, 'more note')} on reading the traces.")
    if summary.job.exit_code:
        lines += _wrapped(ended(summary.job.exit_code).text, width, indent=2)
    if summary.notes:
        lines += _wrapped(
            f"The report has {plural(len(summary.notes), 'note')} on what is missing or uncertain.", width
        )
    return lines


def _wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """Printable text broken at ``width``; leading spaces stay."""
    return textwrap.wrap(
        printable(text),
        max(width, 40),
        subsequent_indent=" " * min(indent, max(width, 40) // 2),
        break_on_hyphens=False,
    )
