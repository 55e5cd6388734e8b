"""Stragglers that the machine may have made for as long as it was recorded: on CPUs other programs use a core, or half
of one that is shared, for tenths of a second.

All operators of such a rank take longer alike, for the same work. A rank that does something of its own, sleeps, or
waits for cores that it does not share with the others is slow by that; and where unprofiled steps show that its thread
runs longer in them, too, it is slow in these as well. In doubt is also a rank that was late in the first steps alone,
right behind the profiler's start.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.replay.stragglers.profiling_effects import runs_longer_unprofiled
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.ranks.imbalanced_work import SPREAD, flops_spread
from perfscope.analyzers.rules.ranks.paused_in import asleep, paused_in
from perfscope.analyzers.rules.ranks.remedies import WAITS, slow_operator, waits_longer_us, work_over_peers
from perfscope.results.rows import StragglerRow
from perfscope.text import duration

LONG_US: Final = 0.75e6
"""Recorded time in which other programs come and go."""
_RUNNING: Final = frozenset({"compute", "host"})
_MORE_WORK: Final = 1.05
"""FLOPs over the peers' from which a rank has work of its own."""

_DOUBT: Final = (
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
    return not (runs_longer_unprofiled(row, job.ranks, job.runs) or _has_a_reason(job, row))


def doubt(job: RuleContext) -> str:
    """That in words."""
    return _DOUBT.format(took=duration(job.steps * job.step_time_us))


def _has_a_reason(job: RuleContext, row: StragglerRow) -> bool:
    operator = slow_operator(job, row)
    if operator is not None and operator.is_own_work:
        return True
    if row.scope == "job":
        return bool(paused_in(job, row)) or (flops_spread(job) or 0.0) >= SPREAD
    if _waits_longer(job, row) and _has_cores_of_its_own(job, row):
        return True
    return (work_over_peers(job, row) or 1.0) >= _MORE_WORK or bool(paused_in(job, row)) or asleep(job, row)


def _waits_longer(job: RuleContext, row: StragglerRow) -> bool:
    return waits_longer_us(job, row) >= WAITS * row.lost_us


def _has_cores_of_its_own(job: RuleContext, row: StragglerRow) -> bool:
    """May a rank run on other cores than the others on its host? On cores that all share it is now this rank that waits
    for one, and now another.
    """
    hosts = {rank: (run.host, run.cpu.cores if run.cpu is not None else "") for rank, run in job.runs.items()}
    mine = hosts.get(row.rank, ("", ""))
    return any(host == mine[0] and cores != mine[1] for host, cores in hosts.values())
