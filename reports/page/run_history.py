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
    where = f", in {worst.stage}" + (f" on rank {worst.rank}" if worst.rank is not None else "")
    text += (
        f". {plural(len(history.outliers), 'outlier')}, at least 1.5x the steps around it; the longest is "
        f"step {worst.step:,} with {duration(worst.us)}{where}."
    )
    if history.long_steps is None:
        return text
    again = history.long_steps.in_words()
    return f"{text} {again[0].upper()}{again[1:]}."


def slowest_rank(history: History) -> RankHistory:
    """The rank with the longest mean step: its times are shown for the job."""
    return max(history.ranks, key=lambda row: row.mean_us)


def drift(history: History) -> str:
    """How the step time changed over the run, as a phrase; empty where the trend is not known."""
    if history.change is not None:
        return history.change.in_words()
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


def straggler_table(summary: Summary) -> HtmlTable | None:
    """The ranks that delayed the run; None where there are none."""
    history = summary.history
    if history is None or not history.stragglers:
        return None
    rows = history.stragglers
    columns = [
        tables.words("Rank", [ranks_in_words(row.ranks) for row in rows]),
        tables.words("Host", [", ".join(row.hosts) for row in rows]),
        tables.words("Pattern", [row.pattern for row in rows]),
        tables.words("Stage", [row.stage for row in rows]),
        tables.durations("Longer than peers", [row.excess_us for row in rows]),
        tables.column("Of the steps", [row.share_of_steps for row in rows], percent),
        tables.words("Steps", [f"{row.first_step:,} to {row.last_step:,}" for row in rows]),
        tables.durations("Cost per step", [row.cost_us for row in rows]),
        tables.column("Of the time", [row.cost_share for row in rows], percent),
    ]
    caption = "By what each rank did itself in each step, without its waiting for others. The costliest first."
    return tables.table("run-stragglers", "Stragglers of the run", columns, caption)


def comparison(summary: Summary) -> str:
    """What comparing the ranks over the run shows; empty where that was not possible."""
    history = summary.history
    if history is None or not history.compared:
        return ""
    if not history.stragglers:
        long = history.long_steps
        if long is not None and long.rank is not None:
            return "Beside the steps that take longer, no rank delays the others: all take as long for what they do."
        same = "all take as long for what they do themselves"
        if long is not None:
            same += ", in the steps that take longer, too"
        return f"No rank delays the others over the run: {same}."
    found = "; ".join(row.in_words() for row in history.stragglers)
    return f"Over the whole run {found}."


def goodput_table(summary: Summary) -> HtmlTable | None:
    """Where the wall time of the run went; None where that is not known."""
    goodput = summary.history.goodput if summary.history is not None else None
    if goodput is None or not goodput.wall_us > 0:
        return None
    parts = {"training": goodput.training_us, **goodput.parts()}
    columns = [
        tables.words("Part", [name.capitalize() for name in parts]),
        tables.durations("Time", list(parts.values())),
        tables.column("Of the run", [us / goodput.wall_us for us in parts.values()], percent),
    ]
    caption = f"From the start of the command to the end of its last step, on rank {goodput.rank}."
    return tables.table("goodput", "Where the time of the run went", columns, caption)


def goodput_reading(summary: Summary) -> str:
    """The share of the run that trained; empty where that is not known."""
    goodput = summary.history.goodput if summary.history is not None else None
    return goodput.in_words() if goodput is not None and goodput.wall_us > 0 else ""


def cost_reading(summary: Summary) -> str:
    """What recording costs each step; empty where that is not known."""
    cost = summary.history.recording_cost if summary.history is not None else None
    return cost.in_words() if cost is not None else ""


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
        tables.words("Rank", ["" if row.rank is None else str(row.rank) for row in rows]),
        tables.words("Seen on", [ranks_in_words(row.ranks) for row in rows]),
    ]
    return tables.table("outliers", "Outlier steps", columns, "The longest first, at most 50.")
