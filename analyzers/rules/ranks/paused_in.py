"""Where ranks pause that the others wait for: what the place is called, and what the recording rules out there."""

from __future__ import annotations

from statistics import median
from typing import Final

from perfscope.analyzers.losses import host_work
from perfscope.analyzers.rank.loop_phases import INSIDE, LOOP
from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.rows import StragglerRow

MOSTLY: Final = 0.5
"""Part of a straggler's cost from which what it pauses in is named, and from which a thread is said to sleep there."""

_USUALLY: Final = "logging, evaluation, checkpointing"
_BEFORE_FORWARD: Final = f"{LOOP}optimizer and forward"
"""Where loops without a data loader get their batches."""
ANYWHERE: Final = f"outside operators ({_USUALLY})"
"""Where ranks pause, where that has no name."""


def most_over_others(job: RuleContext, worst: StragglerRow) -> tuple[str, float]:
    """The named host work in which these ranks spend the most time over the others, and how much, µs; 0 for none."""
    mine = worst.members
    others = tuple(rank for rank in job.ranks if rank not in mine) or job.ranks
    named = _named(job)
    over = {
        name: median(named[rank].get(name, 0.0) for rank in mine)
        - median(named[rank].get(name, 0.0) for rank in others)
        for name in {name for rank in mine for name in named[rank]}
    }
    name = max(sorted(over), key=lambda name: over[name], default="")
    return name, over.get(name, 0.0)


def paused_in(job: RuleContext, worst: StragglerRow) -> str:
    """What has a name of that for which the ranks pause, where it is most of their cost; empty otherwise."""
    if worst.cause != "host":
        return ""
    name, us = _in_turn(job, worst) if worst.scope == "job" else most_over_others(job, worst)
    return name if us >= MOSTLY * worst.lost_us else ""


def _in_turn(job: RuleContext, worst: StragglerRow) -> tuple[str, float]:
    """The same of ranks that pause in turn: each makes the others wait for its own pauses. 0 where what takes most of
    their named time is not most of it.
    """
    named = _named(job)
    sums: dict[str, float] = {}
    for rank in worst.members:
        for name, us in named[rank].items():
            sums[name] = sums.get(name, 0.0) + us
    name = max(sorted(sums), key=lambda name: sums[name], default="")
    return (name, sums[name]) if name and sums[name] >= MOSTLY * sum(sums.values()) else ("", 0.0)


def _named(job: RuleContext) -> dict[int, dict[str, float]]:
    return {row.rank: dict(row.named_host_us) for row in job.summary.time_breakdown}


def where(job: RuleContext, name: str) -> str:
    """Where ranks pause, and in what they usually do there."""
    if name in INSIDE:
        return f"in {name}, outside its operators (hooks, conversions, waiting for a file or a lock)"
    if name.startswith(LOOP):
        batch = "getting the batch, " if name == _BEFORE_FORWARD and not job.summary.dataloader else ""
        return f"in {name} ({batch}{_USUALLY})"
    return f"outside operators, mostly in {host_work(name)}" if name else ANYWHERE


def asleep(job: RuleContext, worst: StragglerRow) -> bool:
    """Do the threads of these ranks sleep for most of what the ranks cost, and not compute?"""
    slept = [job.slept_us.get(rank, 0.0) for rank in worst.members]
    total = sum(slept) if worst.scope == "job" else min(slept, default=0.0)
    return total >= MOSTLY * worst.lost_us


def may_collect(job: RuleContext) -> bool:
    """May garbage collection be behind a pause? What PerfScope records names every collection."""
    return not job.runs
