"""Stragglers that the machine may have made for as long as it was recorded: on CPUs other programs use a core, or half
of one that is shared, for tenths of a second.

All operators of such a rank take longer alike, for the same work. A rank that does something of its own, sleeps, or
waits for a core is slow by that, and where unprofiled steps show that its thread runs longer in them, too, it is slow
in these as well. Nor is a rank slow that was late in the first steps alone, right behind the profiler's start.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.replay.stragglers.profiling_effects import ENOUGH_STEPS
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.ranks.imbalanced_work import SPREAD, flops_spread
from perfscope.analyzers.rules.ranks.paused_in import asleep, paused_in
from perfscope.analyzers.rules.ranks.remedies import WAITS, slow_operator, waits_longer_us, work_over_peers
from perfscope.results.rows import StragglerRow
from perfscope.text import duration

LONG_US: Final = 0.75e6
"""Recorded time from which a machine's moods are over."""
_RUNNING: Final = frozenset({"compute", "host"})
_MORE_WORK: Final = 1.05
"""FLOPs over the peers' from which a rank has work of its own."""

DOUBT: Final = (
    "The recording is {took} long. On CPUs another program may have used a core meanwhile, which nothing in it shows: "
    "record more steps (perfscope run --active 50) before you look for a cause."
)


_FIRST: Final = 2
_OF_STEPS: Final = 1 / 3
"""So many first steps at most, and such a share of all of them, may be late because the profiler has just started."""

AT_THE_START: Final = (
    "Only the first of the recorded steps show it, right behind the profiler's start: record again (perfscope run "
    "--warmup 5) before you look for a cause."
)


def is_at_the_start(job: RuleContext, row: StragglerRow) -> bool:
    """Does a rank delay the job in the first of the recorded steps alone?"""
    late, used = row.longest_steps or row.steps, job.info.steps
    few = 0 < len(late) <= min(_FIRST, _OF_STEPS * len(used))
    return few and row.scope == "rank" and {row.cause, *row.causes} <= _RUNNING and late == used[: len(late)]


def may_be_the_machine(job: RuleContext, row: StragglerRow) -> bool:
    """May the ranks of a job on CPUs have been slow for as long as it was recorded, by nothing that they do?"""
    if job.on_devices or job.steps * job.step_time_us >= LONG_US:
        return False
    if not {row.cause, *row.causes} <= _RUNNING or row.scope not in ("rank", "ranks", "job"):
        return False
    return not (_runs_longer_in_other_steps(job, row) or _has_a_reason(job, row))


def doubt(job: RuleContext) -> str:
    """That in words."""
    return DOUBT.format(took=duration(job.steps * job.step_time_us))


def _runs_longer_in_other_steps(job: RuleContext, row: StragglerRow) -> bool:
    """Were unprofiled steps compared? Who runs longer in the recorded steps alone is no straggler."""
    compared = [job.runs[rank].steps.unprofiled_thread_ns for rank in job.ranks if rank in job.runs]
    return row.scope != "job" and len(compared) == len(job.ranks) and min(map(len, compared)) >= ENOUGH_STEPS


def _has_a_reason(job: RuleContext, row: StragglerRow) -> bool:
    operator = slow_operator(job, row)
    if operator is not None and operator.is_own_work:
        return True
    if row.scope == "job":
        return bool(paused_in(job, row)) or (flops_spread(job) or 0.0) >= SPREAD
    if (work_over_peers(job, row) or 1.0) >= _MORE_WORK or waits_longer_us(job, row) >= WAITS * row.lost_us:
        return True
    return bool(paused_in(job, row)) or asleep(job, row)
