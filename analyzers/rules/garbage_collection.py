"""Planned garbage collection: fires when the interpreter's collections hold up steps.

Each process starts a collection by its own count of objects, so ranks pause one after another and all wait each time.
Collections at the same step on all ranks cost once what they cost N times otherwise. Seen at 12.6 % of the throughput
in arXiv 2505.05713.
"""

from __future__ import annotations

from statistics import mean
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import framework
from perfscope.analyzers.straggling.lost import without
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling
from perfscope.summary import StragglerRow

RULE: Final = "garbage-collection"
SHARE: Final = 0.02
"""Share of the step from which the rule fires: the noise floor, because the pauses are recorded and need no guess."""
EXPLAINED: Final = 0.5
"""Share of a straggler's lost time that collections must reach to be its cause."""


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: no collections recorded, or they hold up nothing."""
    paused = _paused_us(facts)
    if paused < SHARE * facts.step_time_us or facts.steps == 0:
        return None
    played = facts.predict({"host.gc": "0"}) if facts.predict is not None else None
    whatif = {"host.gc": "0"} if played is not None else {}
    lost = next((row for row in facts.stragglers if explains(facts, row)), None)
    saved = (
        facts.step_time_us - played.mid / 1e3 if played is not None else min(lost.lost_us, paused) if lost else paused
    )
    if saved < SHARE * facts.step_time_us:
        return None
    share = saved / facts.step_time_us
    ranks = tuple(rank for rank in facts.ranks if rank in facts.per_step and any(facts.per_step[rank].collecting_us))
    return Finding(
        rule=RULE,
        title=f"Python's garbage collection pauses {_who(ranks, facts)} and holds up {share:.0%} of the step",
        severity=Severity.of_share(share),
        evidence=_evidence(facts, ranks, paused, lost),
        action=Action(
            setting="garbage collection",
            old="automatic",
            new=None,
            how=_how(facts),
            costs="Memory held by cyclic garbage until the next planned collection.",
        ),
        confidence=Confidence.LOW if facts.few_steps else Confidence.HIGH,
        obtained=Obtained.BOUNDED if lost is None else Obtained.REPLAYED,
        ceiling=ceiling(facts.step_time_us, max(paused, saved)),
        predicted_step_ns=None if lost is None or whatif else without(facts.step_time_us, lost),
        whatif=whatif,
    )


def explains(facts: JobFacts, row: StragglerRow) -> bool:
    """Are recorded collections what a straggler loses its time with?"""
    return row.cause == "host" and _paused_us(facts) >= max(EXPLAINED * row.lost_us, SHARE * facts.step_time_us)


def _paused_us(facts: JobFacts) -> float:
    """The longest collection of any rank in each step, mean over the steps: what they can hold a step up at most."""
    per_rank = [steps.collecting_us for steps in facts.per_step.values()]
    return mean(max(step) for step in zip(*per_rank, strict=True)) if per_rank and per_rank[0] else 0.0


def _who(ranks: tuple[int, ...], facts: JobFacts) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "all ranks" if len(ranks) == len(facts.ranks) else f"{len(ranks)} of {len(facts.ranks)} ranks"


def _evidence(
    facts: JobFacts, ranks: tuple[int, ...], paused: float, lost: StragglerRow | None
) -> tuple[Evidence, ...]:
    pauses = [pause for rank in ranks for pause in facts.per_step[rank].collecting_us if pause]
    rows = [
        Evidence(what="collecting, per step, on the rank that does most", value=paused, unit="us", ranks=ranks),
        Evidence(what="longest in one step of one rank", value=max(pauses), unit="us", ranks=ranks),
        Evidence(what="steps of ranks with a collection", value=len(pauses), unit="", ranks=ranks),
    ]
    if lost is not None:
        rows.append(Evidence(what="step time lost to it, by replay", value=lost.lost_us, unit="us", ranks=lost.ranks))
    return tuple(rows)


def _how(facts: JobFacts) -> str:
    if framework(facts) == "megatron":
        return "--manual-gc --manual-gc-interval 500"
    return (
        "Before the loop, once model, optimizer and loaders are built:\n"
        "  gc.collect(); gc.freeze(); gc.disable()\n"
        "In the loop, on all ranks at the same step:\n"
        "  if step % 500 == 0: gc.collect()"
    )
