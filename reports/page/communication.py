"""Charts of communication across ranks: who arrives last in each group, and how much of it compute overlaps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from perfscope.reports.page.numbers import rounded, scaled
from perfscope.results.rows import CollectiveRow, CostRow
from perfscope.results.summary import Summary
from perfscope.text import duration, known, percent, unit_for

GROUPS_SHOWN: Final = 4
"""Groups in the chart of last arrivals, those that communicate most; the others are added up."""

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
    series = [
        {"name": name, "share": [rounded(counted[name].get(rank, 0.0) / total) for rank in ranks]} for name in shown
    ]
    if rest:
        added = [rounded(math.fsum(counted[name].get(rank, 0.0) for name in rest) / total) for rank in ranks]
        series.append({"name": _OTHERS, "share": added})
    return {"ranks": ranks, "series": series}


def arrivals_reading(summary: Summary) -> str:
    """What the chart of last arrivals shows."""
    made = arrivals_chart(summary)
    if made is None:
        return ""
    together = [math.fsum(one["share"][at] for one in made["series"]) for at in range(len(made["ranks"]))]
    most = max(range(len(together)), key=together.__getitem__)
    even = 1 / len(together)
    text = f"Rank {made['ranks'][most]} arrives last in {percent(together[most])} of the collectives"
    if together[most] >= 2 * even:
        return f"{text}; evenly spread it would be {percent(even)}. The other ranks wait for it."
    return f"{text}; evenly spread it would be {percent(even)}. No rank stands out."


def overlap_chart(summary: Summary) -> dict[str, Any] | None:
    """Each rank's communication per step: overlapped by compute, waiting, transfer; None without communication."""
    rows = [row for row in summary.time_breakdown if row.comm_us > 0]
    if not rows:
        return None
    unit = unit_for(max(row.comm_us for row in rows))
    return {
        "unit": unit.name,
        "ranks": [row.rank for row in rows],
        "hidden": scaled((row.hidden_comm_us for row in rows), unit),
        "wait": scaled((row.exposed_comm_wait_us for row in rows), unit),
        "transfer": scaled((row.exposed_comm_transfer_us for row in rows), unit),
    }


def overlap_reading(summary: Summary) -> str:
    """What the chart of overlap shows."""
    rows = [row for row in summary.time_breakdown if row.comm_us > 0]
    if not rows:
        return ""
    total = math.fsum(row.comm_us for row in rows)
    overlapped = math.fsum(row.hidden_comm_us for row in rows)
    wait = math.fsum(row.exposed_comm_wait_us for row in rows)
    mean = total / len(rows)
    text = f"Communication takes {duration(mean)} per step{' on average' if len(rows) > 1 else ''}; "
    text += f"{percent(overlapped / total)} of it is overlapped by compute"
    exposed = total - overlapped
    if exposed > 0.01 * total:
        bound = any(row.wait_is_bound for row in rows)
        if bound and wait < 0.01 * exposed:
            return f"{text}. How much of the rest is waiting is not known: not every rank was recorded."
        text += f". Of the exposed rest, {'at least ' if bound else ''}{percent(wait / exposed)} is waiting for late "
        text += "ranks, which a faster network does not shorten"
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


def bandwidth_reading(summary: Summary) -> str:
    """What the chart of bandwidth against size shows."""
    rated = [row for row in summary.collectives if known(row.busbw_gbps) and row.bytes]
    if not rated:
        return ""
    best = max(rated, key=lambda row: row.busbw_gbps or 0.0)
    return f"The highest is {best.busbw_gbps:.3g} GB/s, by {best.kind.replace('_', '-')}."


def bandwidth_chart(collectives: Sequence[CollectiveRow], models: Sequence[CostRow]) -> dict[str, Any] | None:
    """Bus bandwidth against size by group and kind, with the fitted curve; None below two sizes: no curve to see."""
    rated = [
        row for row in collectives if known(row.busbw_gbps) and known(row.algbw_gbps) and row.algbw_gbps and row.bytes
    ]
    if len({row.bytes for row in rated}) < 2:
        return None
    fits = {(model.group, model.kind): model for model in models}
    series = []
    for key in sorted({(row.group, row.kind) for row in rated}):
        mine = sorted((row for row in rated if (row.group, row.kind) == key), key=lambda row: row.bytes or 0)
        curve = _curve(fits[key], mine) if key in fits and len({row.bytes for row in mine}) > 1 else None
        series.append(
            {
                "name": f"{key[1].replace('_', '-')}, group {key[0]}" if key[0] else key[1].replace("_", "-"),
                "bytes": [row.bytes for row in mine],
                "busbw": [rounded(row.busbw_gbps) for row in mine],
                "curve": curve,
                "limit": rounded(fits[key].busbw_gbps) if curve else None,
            }
        )
    return {"series": series}


def _curve(model: CostRow, rows: Sequence[CollectiveRow]) -> dict[str, list[float | None]] | None:
    """The bus bandwidth that the cost model gives between the smallest and the largest size."""
    factor = (rows[0].busbw_gbps or 0.0) / (rows[0].algbw_gbps or 1.0)
    low, high = rows[0].bytes or 1, rows[-1].bytes or 1
    if not known(model.busbw_gbps) or not model.busbw_gbps or not factor:
        return None
    sizes = [low * (high / low) ** (index / 40) for index in range(41)]
    # 1 GB/s moves 1000 bytes a µs.
    times = [model.alpha_us + size * factor / (model.busbw_gbps * 1e3) for size in sizes]
    rates = [rounded(size * factor / time / 1e3) if time > 0 else None for size, time in zip(sizes, times, strict=True)]
    return {"bytes": [rounded(size) for size in sizes], "busbw": rates}
