"""What the charts of communication across ranks show, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from perfscope.reports import tables
from perfscope.reports.figures.communication import last_arrivals
from perfscope.reports.tables import HtmlTable
from perfscope.results.communication.inspector import InspectorRow
from perfscope.results.summary import Summary
from perfscope.text import duration, known, percent, plural

_FEWEST_ARRIVALS: Final = 16
"""Fewer collectives than this do not tell whether a rank arrives last more often than the others."""
_SURE: Final = 4.0
"""Standard deviations above an even share from which a rank is the last more often than by chance: that of independent
collectives is once in 30,000 recordings."""
INSPECTED_SHOWN: Final = 40
"""Rows of the table of NCCL Inspector on the page; the machine-readable result has more."""


def arrivals_reading(summary: Summary) -> str:
    """What the chart of last arrivals shows."""
    made = last_arrivals(summary)
    if made is None:
        return ""
    together = [math.fsum(each) for each in zip(*made.shares.values(), strict=True)]
    most = max(range(len(together)), key=together.__getitem__)
    even = 1 / len(together)
    text = f"Rank {made.ranks[most]} arrives last in {percent(together[most])} of the collectives"
    text += f"; evenly spread it would be {percent(even)}."
    if together[most] >= 2 * even:
        return f"{text} The other ranks wait for it."
    deviations = (together[most] - even) / math.sqrt(even * (1 - even) / made.counted)
    if made.counted < _FEWEST_ARRIVALS and deviations > 1:
        return f"{text} {plural(made.counted, 'collective')} are too few to tell whether a rank stands out."
    return f"{text} {'The other ranks often wait for it.' if deviations > _SURE else 'No rank stands out.'}"


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
            why = "not every rank was recorded" if summary.job.may_lack_ranks else "who waits for whom is not recorded"
            return f"{text}. How much of the rest is waiting is not known: {why}."
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


def inspector_table(rows: Sequence[InspectorRow]) -> HtmlTable:
    """What NCCL Inspector logged, by communicator, kind and size."""
    shown = rows[:INSPECTED_SHOWN]
    unlogged = "The plugin does not log it."
    columns = [
        tables.words("Kind", [row.kind.replace("_", "-") for row in shown]),
        tables.words("Communicator", [row.group for row in shown]),
        tables.column("Ranks", [row.size for row in shown], "{:,}".format),
        tables.sizes("Size", [row.bytes for row in shown]),
        tables.column("Operations", [int(row.count) for row in shown], "{:,}".format, definition="inspector_count"),
        tables.column("of all ranks", [int(row.matched) for row in shown], "{:,}".format, definition="inspector_all"),
        tables.durations("Wait", [row.wait_us for row in shown], definition="inspector_wait", reason=_NOT_TOGETHER),
        tables.durations("Transfer", [row.transfer_us for row in shown], definition="inspector_transfer"),
        tables.durations("Longest", [row.longest_us for row in shown]),
        tables.column("Bus", [row.busbw_gbps for row in shown], "{:,.3g}".format, unit="GB/s", definition="busbw"),
        tables.words("Algorithm", [row.algorithm for row in shown], reason=unlogged),
        tables.words("Protocol", [row.protocol for row in shown], reason=unlogged),
        tables.words("Clock", [row.timing for row in shown], definition="inspector_timing"),
    ]
    together, every = sum(int(row.matched) for row in rows), sum(int(row.count) for row in rows)
    reading = f"{plural(every, 'operation')}, {together:,} of them logged by all of their ranks."
    return tables.table("inspector", "Logged by NCCL Inspector", columns, reading)


_NOT_TOGETHER: Final = "No operation was logged by all ranks."
