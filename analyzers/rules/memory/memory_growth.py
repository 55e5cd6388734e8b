"""Memory that grows from step to step: fires where a memory snapshot shows a place in the code that never lets go.

Every step's begin is compared: what holds more at each of them, and nothing less, will fill the device sooner or later.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Obtained, Severity
from perfscope.results.memory.snapshots import GrowthRow
from perfscope.text import byte_size, plural

RULE: Final = "memory-growth"


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no snapshot, too few steps in it, or nothing that grows."""
    rows = job.summary.snapshots.growth if job.summary.snapshots is not None else ()
    if not rows:
        return None
    first = rows[0]
    mine = [row for row in rows if (row.rank, row.device) == (first.rank, first.device)]
    total = sum(row.bytes_per_step for row in mine)
    who = f"Rank {first.rank}" if first.rank is not None else f"Device {first.device}"
    ranks = () if first.rank is None else (first.rank,)
    return Finding(
        rule=RULE,
        title=f"{who}'s memory grows by {byte_size(total)} per step, in {first.where}",
        severity=Severity.INFO,
        evidence=(
            *(Evidence(f"growth per step in {row.where}", row.bytes_per_step, "bytes", ranks) for row in mine[:5]),
            Evidence("steps over which it grew", first.steps, ranks=ranks),
            *_left(job, first, total),
        ),
        action=let_go(first),
        confidence=Confidence.MEDIUM,
        obtained=Obtained.MEASURED,
    )


def let_go(row: GrowthRow) -> Action:
    """What to do where memory grows."""
    return Action(
        setting=row.call,
        old=None,
        new=None,
        how=f"Look at what keeps the memory that each step asks for in {row.call or row.where}.\nUsual causes are a "
        "loss or output that is added up or put into a list with its graph (keep loss.detach() or loss.item()), caches "
        "without a bound, hooks that are registered anew, and retain_graph=True.",
    )


def _left(job: RuleContext, row: GrowthRow, per_step: int) -> tuple[Evidence, ...]:
    """Steps until the device is full, where its memory is known."""
    capacity = next((each.capacity_bytes for each in job.summary.memory if each.rank == row.rank), None)
    devices = job.summary.snapshots.devices if job.summary.snapshots is not None else ()
    peak = next(each.peak_bytes for each in devices if (each.rank, each.device) == (row.rank, row.device))
    if capacity is None or capacity <= peak:
        return ()
    steps = (capacity - peak) // per_step
    return (Evidence(f"until {byte_size(capacity)} are full: {plural(steps, 'more step')}", steps),)
