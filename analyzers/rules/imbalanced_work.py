"""Uneven work: fires when ranks take turns at computing more than the others, because they are given more to compute.

Sequences of different length, or tokens that choose one expert, make one micro-batch longer than another: forward and
backward grow together, and the hot rank moves. With shapes the FLOPs tell; without, forward and the rest of the
computation must rise and fall together. A rank that is slow with the same work is a straggler and not named here.
Source: arXiv 2505.05713 (forward and backward times that correlate tell uneven sequences from slow workers).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import framework, settings_of
from perfscope.analyzers.straggling.lost import without
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling
from perfscope.summary import StragglerRow
from perfscope.trace import Float64

RULE: Final = "uneven-work"
SHARE: Final = 0.05
"""Share of the step lost from which the rule fires."""
CORRELATED: Final = 0.9
"""Correlation from which computation follows the work."""
SPREAD: Final = 0.03
"""Relative standard deviation that the work must have: a correlation of noise means nothing."""


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: nobody is slow in turn by computation, or with the same work as the others."""
    row = next((row for row in facts.stragglers if row.lost_us >= SHARE * facts.step_time_us), None)
    if row is None or not explains(facts, row):
        return None
    by_flops, correlation = _follows(facts)
    share = row.lost_us / facts.step_time_us
    return Finding(
        rule=RULE,
        title=f"Uneven work makes all wait {share:.0%} of the step, now for one rank, now for another",
        severity=Severity.of_share(share),
        evidence=_evidence(facts, row, by_flops=by_flops, correlation=correlation),
        action=Action(
            setting="tokens of each rank's batch",
            old=None,
            new=None,
            how=_how(facts),
            costs="Samples are no longer drawn independently where they are sorted or bucketed by length.",
        ),
        confidence=Confidence.LOW if facts.few_steps else Confidence.HIGH if by_flops else Confidence.MEDIUM,
        obtained=Obtained.REPLAYED,
        ceiling=ceiling(facts.step_time_us, row.lost_us),
        predicted_step_ns=without(facts.step_time_us, row),
    )


def explains(facts: JobFacts, row: StragglerRow) -> bool:
    """Do the ranks of this straggler take turns, each slow where it has more to compute?"""
    return row.pattern == "rotating" and row.cause == "compute" and _follows(facts)[1] >= CORRELATED


def _follows(facts: JobFacts) -> tuple[bool, float]:
    """(whether by FLOPs, how computation correlates with the work over all steps of all ranks); 0 where nothing tells.

    By FLOPs where shapes are recorded: equal ones then say that the work is even, whatever forward and backward do.
    """
    steps = list(facts.per_step.values())
    compute = np.array([rank.compute_us for rank in steps], dtype=np.float64)
    if steps and all(rank.flops is not None for rank in steps):
        return True, _correlation(np.array([rank.flops for rank in steps], dtype=np.float64), compute)
    if steps and all(rank.forward_us is not None for rank in steps):
        forward: Float64 = np.array([rank.forward_us for rank in steps], dtype=np.float64)
        return False, _correlation(forward, compute - forward)
    return False, 0.0


def _correlation(work: Float64, taken: Float64) -> float:
    """Pearson's, each step's mean over the ranks taken off: what all ranks have in common holds up nobody."""
    middle = float(work.mean())
    work, taken = work - work.mean(axis=0), taken - taken.mean(axis=0)
    spread, other = float(work.std()), float(taken.std())
    if middle <= 0 or spread < SPREAD * middle or other == 0:
        return 0.0
    return float((work * taken).mean()) / (spread * other)


def _evidence(facts: JobFacts, row: StragglerRow, *, by_flops: bool, correlation: float) -> tuple[Evidence, ...]:
    steps = facts.per_step.values()
    work = np.array([rank.flops if by_flops else rank.forward_us for rank in steps], dtype=np.float64)
    what = "model FLOPs" if by_flops else "forward time"
    return (
        Evidence(what="step time lost to it, by replay", value=row.lost_us, unit="us", ranks=row.ranks),
        Evidence(
            what=f"{what} of the rank with most, over the ranks' mean (mean over steps)",
            value=float((work.max(axis=0) / work.mean(axis=0)).mean()),
            unit="ratio",
            ranks=row.ranks,
        ),
        Evidence(
            what=f"correlation of {what} with {'computation' if by_flops else 'the rest of the computation'}",
            value=correlation,
            unit="",
            ranks=facts.ranks,
        ),
        Evidence(what="ranks that were the one with most", value=len(set(work.argmax(axis=0).tolist())), unit=""),
    )


def _how(facts: JobFacts) -> str:
    """What to type, in the terms of the framework in use."""
    used = framework(facts)
    lengths = {
        "transformers": "--group_by_length True (--train_sampling_strategy group_by_length in newer releases), or pack "
        "samples to one length",
        "megatron": "samples packed to --seq-length (--reset-position-ids --reset-attention-mask keep them apart)",
    }.get(used, "pack samples to one length, or draw batches by tokens from buckets of like length, on all ranks alike")
    lines = [f"Sequences of different length: {lengths}."]
    experts = settings_of(facts, "megatron").get("expert_model_parallel_size") or 1
    if used != "megatron" or experts > 1:
        cure = (
            "--moe-router-load-balancing-type aux_loss with a higher --moe-aux-loss-coeff, or "
            "--moe-expert-capacity-factor 1.25"
            if used == "megatron"
            else "a higher weight of the router's balancing loss, or a capacity factor"
        )
        lines.append(f"Experts that get more tokens than others: {cure}.")
    return "\n".join(lines)
