"""The critical path as a picture: its time by rank and part of the account, and what it shows."""

from __future__ import annotations

import math
from typing import Any, Final

from perfscope.reports.categories import BY_NAME
from perfscope.reports.format import duration, share, unit_for
from perfscope.summary import Summary

RANKS_SHOWN: Final = 8
"""Ranks in the picture, those that hold most of the path; the others are one row."""


def path_chart(summary: Summary) -> dict[str, Any] | None:
    """Time of each rank's parts on the path; None where the path is not known."""
    total = _by_rank(summary)
    if not total:
        return None
    unit = unit_for(math.fsum(us for parts in total.values() for us in parts.values()))
    ordered = sorted(total, key=lambda rank: -math.fsum(total[rank].values()))
    rows = [(f"rank {rank}", total[rank]) for rank in ordered[:RANKS_SHOWN]]
    if ordered[RANKS_SHOWN:]:
        rest: dict[str, float] = {}
        for rank in ordered[RANKS_SHOWN:]:
            for name, us in total[rank].items():
                rest[name] = rest.get(name, 0.0) + us
        rows.append((f"{len(ordered) - RANKS_SHOWN:,} others", rest))
    names = [name for name in BY_NAME if any(name in parts for _, parts in rows)]
    return {
        "unit": unit.name,
        "rows": [label for label, _ in rows],
        "values": {name: [float(f"{parts.get(name, 0.0) / unit.size:.4g}") for _, parts in rows] for name in names},
        "total": float(f"{math.fsum(us for _, parts in rows for us in parts.values()) / unit.size:.4g}"),
    }


def path_reading(summary: Summary) -> str:
    """What the picture shows here."""
    total = _by_rank(summary)
    if not total:
        return ""
    length = math.fsum(us for parts in total.values() for us in parts.values())
    if length <= 0:
        return ""
    rank = max(total, key=lambda rank: math.fsum(total[rank].values()))
    held = math.fsum(total[rank].values()) / length
    name = max(total[rank], key=total[rank].__getitem__)
    label = BY_NAME[name].phrase if name in BY_NAME else name
    text = f"Here the path takes {duration(length)}"
    if len(summary.job.ranks) > 1:
        text += f", {share(held)} of it on rank {rank}"
    return f"{text}; the longest part is {label} with {share(total[rank][name] / length)}."


def _by_rank(summary: Summary) -> dict[int, dict[str, float]]:
    total: dict[int, dict[str, float]] = {}
    for row in summary.critical_path or ():
        parts = total.setdefault(row.rank, {})
        parts[row.category] = parts.get(row.category, 0.0) + row.us
    return total
