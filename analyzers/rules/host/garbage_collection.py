"""Planned garbage collection: fires when the interpreter's collections delay steps.

Each process starts a collection by its own count of objects, so ranks pause one after another, and all wait each time.
Collections at the same step on all ranks cost the time of one, not of N. Seen at 12.6 % of the throughput
in arXiv 2505.05713.
"""

from __future__ import annotations

from statistics import mean
from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Confidence, Evidence, Finding, code
from perfscope.results.rows import FEW_STEPS, StragglerRow

RULE: Final = "garbage-collection"
SHARE: Final = 0.02
"""Least share of the step: the noise floor, because the pauses are recorded."""
_ON_ALL: Final = "Collect garbage on all ranks at the same step, every 500 steps, instead of when Python starts it."
_OWN: Final = " It runs in every step: if the script calls gc.collect() itself, call it in fewer."
_ALIKE: Final = 0.5
"""Part of the mean collection that the shortest of calls of the script takes at least."""
EXPLAINED: Final = 0.5
"""Share of the straggler cost that collections must reach to be its cause."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no collections recorded, or they delay nothing."""
    paused = paused_us(job)
    if paused < SHARE * job.step_time_us or job.steps == 0:
        return None
    step = job.predict({"host.gc": "0"}) if job.predict is not None else None
    whatif = {"host.gc": "0"} if step is not None else {}
    lost = next((row for row in job.summary.stragglers if explains(job, row)), None)
    saved = job.step_time_us - step.mid if step is not None else min(lost.lost_us, paused) if lost else paused
    if saved < SHARE * job.step_time_us:
        return None
    ranks = tuple(rank for rank in job.ranks if rank in job.per_step and any(job.per_step[rank].collecting_us))
    return job.finding(
        RULE,
        f"Python's garbage collection pauses {_who(ranks, job)}: {job.share(saved):.0%} of the step",
        max(paused, saved),
        evidence=_evidence(job, ranks, paused, lost),
        action=Action(
            setting="garbage collection",
            old="automatic",
            new=None,
            how=_how(job),
            costs="Cyclic garbage takes memory until the next planned collection.",
        ),
        confidence=Confidence.LOW if job.info.few_steps else Confidence.HIGH,
        predicted=None if lost is None or whatif else lost.step_without(job.step_time_us),
        whatif=whatif,
        severity_us=saved,
    )


def explains(job: RuleContext, row: StragglerRow) -> bool:
    """Are recorded collections the cause of this straggler?"""
    return row.cause == "host" and paused_us(job) >= max(EXPLAINED * row.lost_us, SHARE * job.step_time_us)


def paused_us(job: RuleContext) -> float:
    """The longest collection of any rank in each step, mean over the steps: the longest delay of a step."""
    per_rank = [steps.collecting_us for steps in job.per_step.values()]
    return mean(max(step) for step in zip(*per_rank, strict=True)) if per_rank and per_rank[0] else 0.0


def _who(ranks: tuple[int, ...], job: RuleContext) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "all ranks" if len(ranks) == len(job.ranks) else f"{len(ranks)} of {len(job.ranks)} ranks"


def _evidence(
    job: RuleContext, ranks: tuple[int, ...], paused: float, lost: StragglerRow | None
) -> tuple[Evidence, ...]:
    pauses = [pause for rank in ranks for pause in job.per_step[rank].collecting_us if pause]
    return (
        Evidence("garbage collection per step, longest of the ranks", paused, "us", ranks),
        Evidence("longest pause in one step of one rank", max(pauses), "us", ranks),
        Evidence("steps with a collection, over all ranks", len(pauses), ranks=ranks),
        *([Evidence("straggler cost, replayed", lost.lost_us, "us", lost.ranks)] if lost is not None else []),
    )


def _in_every_step(job: RuleContext) -> bool:
    """Does any rank collect in each of several steps, for about as long? Python collects for now and then much longer,
    by its own count of objects.
    """
    return any(
        len(each.collecting_us) >= FEW_STEPS and min(each.collecting_us) >= _ALIKE * mean(each.collecting_us) > 0
        for each in job.per_step.values()
    )


def _how(job: RuleContext) -> str:
    if job.framework == "megatron":
        return code("shell", "--manual-gc --manual-gc-interval 500")
    return "\n".join(
        (
            f"{_ON_ALL}{_OWN if _in_every_step(job) else ''}",
            "Before the loop, once model, optimizer and loaders are built:",
            code("python", "import gc\ngc.collect()\ngc.freeze()\ngc.disable()"),
            "In the loop, on all ranks at the same step:",
            code("python", "if step % 500 == 0:\n    gc.collect()"),
        )
    )
