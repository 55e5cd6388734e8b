"""Step times over the whole run, captured or not: the picture, the outliers, and what it shows."""

from __future__ import annotations

from typing import Any

from perfscope.reports import tables
from perfscope.reports.format import duration, known, plural, ranks_named, share, significant, unit_for
from perfscope.reports.tables import Cell, Table
from perfscope.summary import Summary
from perfscope.summary_history import History, RankHistory


def history_chart(summary: Summary) -> dict[str, Any] | None:
    """Median and longest step of each stretch of the run, and the outliers; None below two stretches."""
    history = summary.history
    if history is None or len(history.bins) < 2:
        return None
    unit = unit_for(max(bin_.max_us for bin_ in history.bins))

    def scaled(values: list[float]) -> list[float]:
        return [float(f"{value / unit.size:.4g}") for value in values]

    return {
        "unit": unit.name,
        "first": [bin_.first_step for bin_ in history.bins],
        "last": [bin_.last_step for bin_ in history.bins],
        "median": scaled([bin_.median_us for bin_ in history.bins]),
        "longest": scaled([bin_.max_us for bin_ in history.bins]),
        "outliers": [
            {"step": row.step, "time": scaled([row.us])[0], "rank": row.rank, "stage": row.stage}
            for row in history.outliers
        ],
        "recorded": [min(summary.job.steps), max(summary.job.steps)] if summary.job.steps else None,
    }


def history_reading(summary: Summary) -> str:
    """What the picture shows here."""
    history = summary.history
    if history is None or len(history.bins) < 2:
        return ""
    typical = slowest_rank(history).median_us
    text = f"Here {plural(max(row.steps for row in history.ranks), 'step')} with a median of {duration(typical)}"
    moved = drift(history)
    if moved:
        text += f"; {moved}"
    text += ". "
    if not history.outliers:
        return f"{text}No step took far longer than those around it."
    worst = history.outliers[0]
    text += f"{plural(len(history.outliers), 'step')} took at least 1.5 times as long as those around "
    text += f"{'it' if len(history.outliers) == 1 else 'them'}; the longest is step {worst.step:,} with "
    return f"{text}{duration(worst.us)}, in {worst.stage} on rank {worst.rank}."


def slowest_rank(history: History) -> RankHistory:
    """The rank whose steps took longest in the mean: its figures stand for the job's."""
    return max(history.ranks, key=lambda row: row.mean_us)


def drift(history: History) -> str:
    """How the steps' length moved from the run's beginning to its end, as a phrase; empty where it hardly did."""
    moved = [row.trend for row in history.ranks if row.trend is not None and known(row.trend)]
    if not moved:
        return ""
    change = max(moved, key=abs)
    if abs(change) < 0.03:
        return "steady from the run's beginning to its end"
    return f"the last tenth of the run was {share(abs(change))} {'slower' if change > 0 else 'faster'} than the first"


def outlier_table(summary: Summary) -> Table | None:
    """The steps that took far longer than those around them; None without."""
    history = summary.history
    if history is None or not history.outliers:
        return None
    rows = history.outliers
    ratios = [Cell(text=f"{significant(row.ratio)}×", order=row.ratio) for row in rows]
    columns = [
        tables.numbers("Step", [Cell(text=f"{row.step:,}", order=row.step) for row in rows]),
        tables.durations("Length", [row.us for row in rows], definition="step_time"),
        tables.numbers("to those around it", ratios),
        tables.words("In", [row.stage for row in rows]),
        tables.ranks("Rank", [row.rank for row in rows]),
        tables.words("Seen on", [ranks_named(row.ranks) for row in rows]),
    ]
    return tables.table("outliers", "Outlying steps", columns, "The longest first, at most 50.")
