"""An optimizer of many small kernels: fires when those take much of the step.

Plain loops over parameters run some ten kernels for each of them. However little a kernel computes, it takes as long as
the shortest one (up to what an empty one takes), the device needs time from one to the next, and the host time to
launch it; ``foreach`` and fused implementations pay that once for many parameters. Without them the step is replayed,
else what they take is a bound: their arithmetic stays. Source: torch.optim, "Algorithms" (foreach, fused). Where
devices wait for launches and no replay tells what the optimizer's cost, the rule ``launch-bound`` names the optimizer.
On CPUs such an optimizer goes from one small operator to the next, which torch's does unless it is fused.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rank.loop_phases import IN_OPTIMIZER
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.host import launch_bound
from perfscope.results.findings import Action, Confidence, Evidence, Finding

RULE: Final = "optimizer-kernels"
SHARE: Final = 0.05
"""Least share of the step that could be saved."""
_EMPTY_US: Final = 5.0
"""What a kernel that computes nothing takes on any device, at most: here it is for a bound."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: the optimizer's step is not marked, has few kernels, or devices wait for launches."""
    if not job.on_devices:
        return _on_cpus(job)
    kernels = [row for row in job.summary.kernels if row.category == "compute"]
    count, of_all = launch_bound.optimizer_kernels(job), sum(row.count_per_step for row in kernels)
    if not count or not of_all:
        return None
    shortest_us = min(row.min_us for row in kernels)
    between_us = min(job.typical_us("idle_dependency") / of_all, shortest_us)
    most_us = count * (min(shortest_us, _EMPTY_US) + between_us)
    replayed = launch_bound.without_loops(job)
    if replayed is None and most_us < SHARE * job.step_time_us:
        return None
    if replayed is None and launch_bound.evaluate(job) is not None:
        return None
    saved_us = most_us if replayed is None else max(replayed[1], most_us)
    return job.finding(
        RULE,
        f"The optimizer runs {count:,.0f} kernels per step: at least {job.share(most_us):.0%} of the step, whatever "
        "they compute"
        if replayed is None
        else f"The optimizer runs {count:,.0f} kernels per step, one after the other: {job.share(replayed[1]):.0%} of "
        "the step goes into running and launching so many",
        saved_us,
        evidence=(
            Evidence("kernels launched by the optimizer per step", count, ranks=job.ranks),
            Evidence("shortest kernel", shortest_us, "us"),
            Evidence("device idle between kernels, mean", between_us, "us", job.ranks),
        ),
        action=launch_bound.fused_optimizer(job) or _ANOTHER,
        confidence=job.confidence(Confidence.MEDIUM),
        predicted=None if replayed is None else replayed[0],
        whatif={} if replayed is None else launch_bound.NO_LOOPS,
    )


def _on_cpus(job: RuleContext) -> Finding | None:
    loop = next((row for row in job.loops if row.part == IN_OPTIMIZER), None)
    replayed = job.replayed(launch_bound.NO_LOOPS, SHARE) if loop is not None else None
    if loop is None or replayed is None:
        return None
    prediction, saved_us = replayed
    return job.finding(
        RULE,
        f"The optimizer runs {loop.count:,.0f} small operators per step, one after the other, in "
        f"{job.share(loop.us):.0%} of the step",
        saved_us,
        evidence=(
            Evidence("operators of the optimizer's loops per step", loop.count, ranks=job.ranks),
            Evidence("time in them, and from one to the next", loop.us, "us", job.ranks),
        ),
        action=launch_bound.fused_optimizer(job) or _ANOTHER,
        confidence=job.confidence(Confidence.MEDIUM),
        predicted=prediction,
        whatif=launch_bound.NO_LOOPS,
    )


_ANOTHER: Final = Action(
    setting="optimizer", old=None, new=None,
    how="Use an implementation that updates many parameters at once (torch.optim's foreach=True or fused=True, "
    "torch._foreach_* functions), or torch.compile(optimizer.step).",
)  # fmt: skip
