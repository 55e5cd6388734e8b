"""The time breakdown per rank: legend, table, and what they show in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import median
from typing import Final

from perfscope.frozen import dataclass
from perfscope.reports import tables
from perfscope.reports.tables import EACH_SHOWN, OUTLYING_SHOWN, Filled, HtmlTable
from perfscope.results.attribution import attributed_ranks, causes, named, who
from perfscope.results.categories import TimeCategory
from perfscope.results.summary import Summary
from perfscope.results.time_breakdown import TimeBreakdown, largest_loss, shares
from perfscope.text import duration, percent, plural

_DIFFERENT: Final = 0.05
"""Share of the step that a rank must spend otherwise than the typical one to be called different."""

_TRIFLE: Final = 0.005
"""Share of the step below which host time with a name is not worth a line."""


@dataclass(frozen=True)
class LegendEntry:
    """One category in the legend, with its share of all ranks' time."""

    category: TimeCategory
    share: str
    fraction: float


@dataclass(frozen=True)
class LegendGroup:
    """The categories of one group."""

    name: str
    share: str
    entries: tuple[LegendEntry, ...]


def legend(rows: Sequence[TimeBreakdown]) -> tuple[LegendGroup, ...]:
    """The ten categories in their groups, each with its share of all ranks' time."""
    taken = shares(rows)
    groups = []
    for name, members in groupby(TimeCategory, key=lambda category: category.group):
        entries = tuple(LegendEntry(member, percent(taken[member.id]), taken[member.id]) for member in members)
        groups.append(LegendGroup(name, percent(sum(entry.fraction for entry in entries)), entries))
    return tuple(groups)


def breakdown_table(rows: Sequence[TimeBreakdown]) -> HtmlTable:
    """The time breakdown in numbers, one row per rank, all times in one unit and with the same decimals."""
    return tables.table(
        "time-breakdown",
        "Time breakdown in numbers",
        [tables.ranks("Rank", [row.rank for row in rows]), *_times(rows)],
        "Means per step. The categories from compute to unknown idle time add up to the step; those that no rank "
        "spends time in are left out.",
    )


def outlying_table(summary: Summary) -> HtmlTable | None:
    """Of many ranks the stragglers and those that differ from the typical rank, and that rank; None for few ranks."""
    rows = summary.time_breakdown
    if len(rows) <= EACH_SHOWN:
        return None
    medians = _medians(rows)
    typical = min(rows, key=lambda row: _distance(row, medians))
    stragglers = attributed_ranks(summary.stragglers)
    middle = typical.categories()
    different = [
        row for row in rows if row.rank in stragglers or _distance(row, middle) > _DIFFERENT * row.step_time_us
    ]
    different.sort(key=lambda row: (row.rank not in stragglers, -_distance(row, middle)))
    shown = different[:OUTLYING_SHOWN]
    names = [f"rank {row.rank}" + (", straggler" if row.rank in stragglers else "") for row in shown]
    if typical not in different:
        rest = plural(len(rows) - len(different), "other rank")
        names, shown = [*names, f"{rest}, like rank {typical.rank}"], [*shown, typical]
    reading = f"{plural(len(different), 'rank differs', 'ranks differ')} by more than {_DIFFERENT:.0%} of the step"
    reading += f"; {OUTLYING_SHOWN} are shown." if len(different) > OUTLYING_SHOWN else "."
    columns = [tables.words("Ranks", names), *_times(shown)]
    return tables.table("outlying", "Ranks that differ", columns, reading)


def _medians(rows: Sequence[TimeBreakdown]) -> dict[str, float]:
    return {category.id: median(row.categories()[category.id] for row in rows) for category in TimeCategory}


def _distance(row: TimeBreakdown, middle: Mapping[str, float]) -> float:
    """µs of the step that a rank spends otherwise."""
    return sum(abs(us - middle[name]) for name, us in row.categories().items()) / 2


def _times(rows: Sequence[TimeBreakdown]) -> list[Filled]:
    """The columns after the rank's name, without those that are 0 on every rank."""
    largest = max((row.step_time_us for row in rows), default=0.0)
    columns = []
    if len({row.host for row in rows}) > 1:
        columns.append(tables.words("Host", [row.host for row in rows]))
    columns.append(
        tables.durations("Step", [row.step_time_us for row in rows], definition="step_time", largest=largest)
    )
    for category in TimeCategory:
        values = [row.categories()[category.id] for row in rows]
        if not any(values):
            continue
        filled = tables.durations(category.short.capitalize(), values, definition=category.id, largest=largest)
        columns.append(_bounded(filled, rows, category.id))
    for label, values, definition in (
        ("Communication", [row.comm_us for row in rows], "comm"),
        ("Overlapped", [row.hidden_comm_us for row in rows], "hidden_comm"),
    ):
        if any(values):
            columns.append(tables.durations(label, values, definition=definition, largest=largest))
    return columns


def named_host_table(rows: Sequence[TimeBreakdown]) -> HtmlTable | None:
    """The parts of the host time that have a name and are no trifle; None where there are none."""
    named = [
        (row.rank, name, us)
        for row in rows
        for name, us in row.named_host_us.items()
        if us >= _TRIFLE * row.step_time_us
    ]
    if not named:
        return None
    columns = [
        tables.ranks("Rank", [rank for rank, _, _ in named]),
        tables.words("Host work", [name for _, name, _ in named]),
        tables.durations("Per step", [us for _, _, us in named], definition="idle_host"),
    ]
    return tables.table("named-host", "Named host time", columns)


def breakdown_reading(summary: Summary) -> str:
    """What the chart of the time breakdown shows."""
    rows = summary.time_breakdown
    if not rows:
        return ""
    taken = shares(rows)
    loss = largest_loss(rows)
    whole = "all ranks' time" if len(rows) > 1 else "the step"
    sentences = [f"Compute takes {percent(taken['compute'])} of {whole}"]
    if loss is None:
        return sentences[0] + "; no other category takes time."
    category, lost = loss
    sentences[0] += f"; the largest other category is {category.phrase} ({percent(lost)})."
    if len(rows) > 1:
        sentences.append(_spread(rows, category))
    waited_for = named(summary.stragglers)
    if category.id == "exposed_comm_wait" and waited_for:
        sentences.append(f"They wait for {' and '.join(f'{who(row)} ({causes(row)})' for row in waited_for)}.")
    return " ".join(sentences)


def _spread(rows: Sequence[TimeBreakdown], category: TimeCategory) -> str:
    """The ranks with the most and the least of a category."""
    by_loss = sorted(rows, key=lambda row: row.categories()[category.id])
    least, most = by_loss[0], by_loss[-1]
    low, high = least.categories()[category.id], most.categories()[category.id]
    if high - low <= 0.02 * max(row.step_time_us for row in rows):
        span = duration(low) if duration(low) == duration(high) else f"{duration(low)} to {duration(high)}"
        return f"It is similar on all ranks ({span} per step)."
    return (
        f"Most on rank {most.rank} ({duration(high)}, {percent(most.share(category.id))} of its step), "
        f"least on rank {least.rank} ({duration(low)})."
    )


def _bounded(filled: Filled, rows: Sequence[TimeBreakdown], name: str) -> Filled:
    """Mark waits and transfers that are only bounds, because not every rank is recorded, or known."""
    signs = {"exposed_comm_wait": "≥", "exposed_comm_transfer": "≤"}
    if name not in signs or not any(row.wait_is_bound for row in rows):
        return filled
    reason = "A bound: of some collectives not every rank is recorded, or known."
    cells = tuple(
        replace(cell, text=f"{signs[name]} {cell.text}", reason=reason)
        if row.wait_is_bound and not cell.absent
        else cell
        for cell, row in zip(filled.cells, rows, strict=True)
    )
    return replace(filled, cells=cells)
