"""What the charts of communication across ranks show, in words."""

from __future__ import annotations

import math

from perfscope.reports.figures.communication import last_arrivals
from perfscope.results.summary import Summary
from perfscope.text import duration, known, percent


def arrivals_reading(summary: Summary) -> str:
    """What the chart of last arrivals shows."""
    made = last_arrivals(summary)
    if made is None:
        return ""
    together = [math.fsum(each) for each in zip(*made.shares.values(), strict=True)]
    most = max(range(len(together)), key=together.__getitem__)
    even = 1 / len(together)
    text = f"Rank {made.ranks[most]} arrives last in {percent(together[most])} of the collectives"
    if together[most] >= 2 * even:
        return f"{text}; evenly spread it would be {percent(even)}. The other ranks wait for it."
    return f"{text}; evenly spread it would be {percent(even)}. No rank stands out."


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


def bandwidth_reading(summary: Summary) -> str:
    """What the chart of bandwidth against size shows."""
    rated = [row for row in summary.collectives if known(row.busbw_gbps) and row.bytes]
    if not rated:
        return ""
    best = max(rated, key=lambda row: row.busbw_gbps or 0.0)
    return f"The highest is {best.busbw_gbps:.3g} GB/s, by {best.kind.replace('_', '-')}."
