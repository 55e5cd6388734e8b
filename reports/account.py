"""The account per rank: the table with every number, the legend, and what the picture shows in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from perfscope.reports import tables
from perfscope.reports.categories import CATEGORIES, Category, largest_loss, row_share, shares
from perfscope.reports.format import duration, share
from perfscope.reports.tables import Filled, Table
from perfscope.summary import AccountRow, Summary

HEATMAP_ABOVE = 64
"""More ranks than this are drawn as a heat map: bars would be thinner than their gaps."""


@dataclass(frozen=True)
class LegendEntry:
    """One row of the account in the legend, with its part of all ranks' time."""

    category: Category
    share: str
    fraction: float


@dataclass(frozen=True)
class LegendGroup:
    """Rows that belong together."""

    name: str
    share: str
    entries: tuple[LegendEntry, ...]


def legend(rows: Sequence[AccountRow]) -> tuple[LegendGroup, ...]:
    """The ten rows in their groups, each with its share of all ranks' time."""
    taken = shares(rows)
    groups = []
    for name, members in groupby(CATEGORIES, key=lambda category: category.group):
        entries = tuple(LegendEntry(member, share(taken[member.name]), taken[member.name]) for member in members)
        groups.append(LegendGroup(name, share(sum(entry.fraction for entry in entries)), entries))
    return tuple(groups)


def account_table(rows: Sequence[AccountRow]) -> Table:
    """Every number of the account, one rank a row, all times in one unit and with the same decimals."""
    largest = max((row.step_time_us for row in rows), default=0.0)
    columns = [tables.ranks("Rank", [row.rank for row in rows])]
    if len({row.host for row in rows}) > 1:
        columns.append(tables.words("Host", [row.host for row in rows]))
    columns.append(
        tables.durations("Step", [row.step_time_us for row in rows], definition="step_time", largest=largest)
    )
    for category in CATEGORIES:
        values = [row.rows()[category.name] for row in rows]
        filled = tables.durations(category.label, values, definition=category.name, largest=largest)
        columns.append(_bounded(filled, rows, category.name))
    columns.append(tables.durations("Communication", [row.comm_us for row in rows], definition="comm", largest=largest))
    columns.append(
        tables.durations(
            "of it hidden", [row.hidden_comm_us for row in rows], definition="hidden_comm", largest=largest
        )
    )
    return tables.table(
        "account-table",
        "Every number of the account",
        columns,
        "Means per step. The ten rows from compute to unknown add up to the step.",
    )


def named_host_table(rows: Sequence[AccountRow]) -> Table | None:
    """The parts of other host work that have a name; None where there is none."""
    named = [(row.rank, name, us) for row in rows for name, us in row.named_host_us.items()]
    if not named:
        return None
    columns = [
        tables.ranks("Rank", [rank for rank, _, _ in named]),
        tables.words("What", [name for _, name, _ in named]),
        tables.durations("Per step", [us for _, _, us in named], definition="idle_host"),
    ]
    return tables.table("named-host", "Other host work that has a name", columns)


def account_reading(summary: Summary) -> str:
    """What the picture of the account shows here."""
    rows = summary.accounting
    if not rows:
        return ""
    taken = shares(rows)
    loss = largest_loss(rows)
    sentences = [f"Here {share(taken['compute'])} of all ranks' time goes to computing"]
    if loss is None:
        return sentences[0] + " and nothing is lost."
    category, lost = loss
    sentences[0] += f"; the largest loss is {category.phrase} with {share(lost)}."
    if len(rows) > 1:
        sentences.append(_spread(rows, category))
    blamed = summary.stragglers[:1]
    if category.name == "exposed_comm_wait" and blamed:
        sentences.append(f"They wait for rank {blamed[0].rank}: the cause is {blamed[0].cause}.")
    return " ".join(sentences)


def _spread(rows: Sequence[AccountRow], category: Category) -> str:
    """Whom a loss hits most and least."""
    by_loss = sorted(rows, key=lambda row: row.rows()[category.name])
    least, most = by_loss[0], by_loss[-1]
    low, high = least.rows()[category.name], most.rows()[category.name]
    if high - low <= 0.02 * max(row.step_time_us for row in rows):
        span = duration(low) if duration(low) == duration(high) else f"{duration(low)} to {duration(high)}"
        return f"It is much the same on every rank ({span} a step)."
    return (
        f"Most on rank {most.rank} ({duration(high)}, {share(row_share(most, category.name))} of its step), "
        f"least on rank {least.rank} ({duration(low)})."
    )


def _bounded(filled: Filled, rows: Sequence[AccountRow], name: str) -> Filled:
    """Mark waits and transfers that are only bounds, because not every participant was recorded."""
    signs = {"exposed_comm_wait": "≥", "exposed_comm_transfer": "≤"}
    if name not in signs or not any(row.wait_is_bound for row in rows):
        return filled
    reason = "A bound: not every participant of the collectives is in the recording."
    cells = tuple(
        replace(cell, text=f"{signs[name]} {cell.text}", reason=reason)
        if row.wait_is_bound and not cell.absent
        else cell
        for cell, row in zip(filled.cells, rows, strict=True)
    )
    return replace(filled, cells=cells)
