"""Step times over the whole run, captured or not: the outliers, and what they show."""

from __future__ import annotations

from perfscope.reports import tables
from perfscope.reports.tables import HtmlTable
from perfscope.results.history import History, RankHistory
from perfscope.results.summary import Summary
from perfscope.text import count_per_step, duration, factor, known, percent, plural, ranks_in_words


def history_reading(summary: Summary) -> str:
    """What the chart shows."""
    history = summary.history
    if history is None or len(history.bins) < 2:
        return ""
    typical = slowest_rank(history).median_us
    text = f"{plural(max(row.steps for row in history.ranks), 'step')} with a median of {duration(typical)}"
    trend = drift(history)
    if trend:
        text += f"; {trend}"
    if not history.outliers:
        return f"{text}. No step is an outlier."
    worst = history.outliers[0]
    return (
        f"{text}. {plural(len(history.outliers), 'outlier')}, at least 1.5x the steps around it; the longest is "
        f"step {worst.step:,} with {duration(worst.us)}, in {worst.stage} on rank {worst.rank}."
    )


def slowest_rank(history: History) -> RankHistory:
    """The rank with the longest mean step: its times are shown for the job."""
    return max(history.ranks, key=lambda row: row.mean_us)


def drift(history: History) -> str:
    """How the step time changed over the run, as a phrase; empty where the trend is not known."""
    trends = [row.trend for row in history.ranks if row.trend is not None and known(row.trend)]
    if not trends:
        return ""
    change = max(trends, key=abs)
    if abs(change) < 0.03:
        return "the step time was steady over the run"
    return f"the last tenth of the run was {percent(abs(change))} {'slower' if change > 0 else 'faster'} than the first"


def stages_table(summary: Summary) -> HtmlTable | None:
    """What was measured of each rank's steps where no trace tells more; None where there is one."""
    history = summary.history
    if history is None or summary.time_breakdown:
        return None
    rows = history.ranks
    largest = max(row.mean_us for row in rows)
    stages = dict.fromkeys(stage for row in rows for stage in row.stages_us)
    columns = [
        tables.ranks("Rank", [row.rank for row in rows]),
        tables.column("Steps", [row.steps for row in rows], count_per_step),
        tables.durations("Mean step", [row.mean_us for row in rows], definition="step_time", largest=largest),
        *(
            tables.durations(stage.capitalize(), [row.stages_us.get(stage) for row in rows], largest=largest)
            for stage in stages
        ),
    ]
    made = tables.table("stages", "Stages of the mean step", columns, "The stages add up to the mean step.")
    return tables.collapsed(made)


def outlier_table(summary: Summary) -> HtmlTable | None:
    """The steps that took far longer than those around them; None where there are none."""
    history = summary.history
    if history is None or not history.outliers:
        return None
    rows = history.outliers
    columns = [
        tables.column("Step", [row.step for row in rows], count_per_step),
        tables.durations("Step time", [row.us for row in rows], definition="step_time"),
        tables.column("vs. steps around it", [row.ratio for row in rows], factor),
        tables.words("Stage", [row.stage for row in rows]),
        tables.ranks("Rank", [row.rank for row in rows]),
        tables.words("Seen on", [ranks_in_words(row.ranks) for row in rows]),
    ]
    return tables.table("outliers", "Outlier steps", columns, "The longest first, at most 50.")
