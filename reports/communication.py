"""Pictures of communication across ranks: who arrives last in each group, and how much of it computation hides."""

from __future__ import annotations

import math
from typing import Any, Final

from perfscope.reports.format import duration, plural, share, unit_for
from perfscope.summary import Summary

GROUPS_SHOWN: Final = 4
"""Groups in the picture of arrivals, those that communicate most; the others are added up."""

_OTHERS: Final = "other groups"


def arrivals_chart(summary: Summary) -> dict[str, Any] | None:
    """Share of the collectives to which each rank came last, by group; None with fewer than two ranks to compare."""
    counted = _last_arrivals(summary)
    ranks = sorted({rank for group in counted.values() for rank in group} | _members(summary))
    total = math.fsum(value for group in counted.values() for value in group.values())
    if len(ranks) < 2 or not total:
        return None
    names = sorted(counted, key=lambda name: -math.fsum(counted[name].values()))
    shown, rest = names[:GROUPS_SHOWN], names[GROUPS_SHOWN:]
    series = [{"name": name, "share": [counted[name].get(rank, 0.0) / total for rank in ranks]} for name in shown]
    if rest:
        added = [math.fsum(counted[name].get(rank, 0.0) for name in rest) / total for rank in ranks]
        series.append({"name": _OTHERS, "share": added})
    for one in series:
        one["share"] = [float(f"{value:.4g}") for value in one["share"]]
    return {"ranks": ranks, "series": series}


def arrivals_reading(summary: Summary) -> str:
    """What the picture of arrivals shows here."""
    made = arrivals_chart(summary)
    if made is None:
        return ""
    together = [math.fsum(one["share"][at] for one in made["series"]) for at in range(len(made["ranks"]))]
    most = max(range(len(together)), key=together.__getitem__)
    even = 1 / len(together)
    text = f"Here rank {made['ranks'][most]} comes last to {share(together[most])} of the collectives"
    if together[most] >= 2 * even:
        return f"{text}, where an even spread would be {share(even)}: the others wait for it."
    return f"{text}, less than twice the {share(even)} of an even spread: no rank stands out."


def overlap_chart(summary: Summary) -> dict[str, Any] | None:
    """Each rank's communication per step: hidden under computation, waiting, transfer; None without communication."""
    rows = [row for row in summary.accounting if row.comm_us > 0]
    if not rows:
        return None
    unit = unit_for(max(row.comm_us for row in rows))

    def scaled(values: list[float]) -> list[float]:
        return [float(f"{value / unit.size:.4g}") for value in values]

    return {
        "unit": unit.name,
        "ranks": [row.rank for row in rows],
        "hidden": scaled([row.hidden_comm_us for row in rows]),
        "wait": scaled([row.exposed_comm_wait_us for row in rows]),
        "transfer": scaled([row.exposed_comm_transfer_us for row in rows]),
    }


def overlap_reading(summary: Summary) -> str:
    """What the picture of overlap shows here."""
    rows = [row for row in summary.accounting if row.comm_us > 0]
    if not rows:
        return ""
    total = math.fsum(row.comm_us for row in rows)
    hidden = math.fsum(row.hidden_comm_us for row in rows)
    wait = math.fsum(row.exposed_comm_wait_us for row in rows)
    mean = total / len(rows)
    text = f"Here {plural(len(rows), 'rank')} communicate{'s' if len(rows) == 1 else ''} for {duration(mean)} a step"
    text += f"{' in the mean' if len(rows) > 1 else ''}: computation hides {share(hidden / total)}"
    exposed = total - hidden
    if exposed > 0.01 * total:
        bound = any(row.wait_is_bound for row in rows)
        if bound and wait < 0.01 * exposed:
            return f"{text}; how much of the rest is waiting cannot be told, as not every participant was recorded."
        text += f"; of what it does not hide, {'at least ' if bound else ''}{share(wait / exposed)} is waiting for "
        text += "late ranks, which no faster network shortens"
    return f"{text}."


def _last_arrivals(summary: Summary) -> dict[str, dict[int, float]]:
    """Group -> rank -> collectives to which it came last; of many groups, those of one role are taken together."""
    roles: dict[str | None, str] = {}
    if len({row.group for row in summary.collectives}) > GROUPS_SHOWN:
        roles = {row.name: f"{row.role} groups" for row in summary.groups if row.role != "unknown"}
    counted: dict[str, dict[int, float]] = {}
    for row in summary.collectives:
        group = counted.setdefault(roles.get(row.group, row.group or "unnamed"), {})
        for rank, part in row.last_arriver.items():
            group[rank] = group.get(rank, 0.0) + part * row.count
    return counted


def _members(summary: Summary) -> set[int]:
    present = set(summary.job.ranks)
    return {rank for row in summary.collectives if row.last_arriver for rank in row.ranks} & present
