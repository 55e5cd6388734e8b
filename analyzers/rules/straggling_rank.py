"""A rank that the others wait for, step after step; names the rank, its host and the cause.

Source: arXiv 2505.05713 (stragglers in large training jobs): worker faults are rare, uneven work comes first.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling
from perfscope.summary import StragglerRow

RULE: Final = "straggling-rank"
SHARE: Final = 0.05
"""Share of the step lost to one rank from which the rule fires."""
OVER_NEXT: Final = 3.0
"""How much more than the next worst rank it must cost, where it is neither steady nor costs much: ranks that take turns
at that are noise. Two healthy ranks on a busy host were seen at 2.5."""
STEADY: Final = 0.8
"""Share of the steps in which it costs the most from which it is steady."""
BEYOND_NOISE: Final = 0.15
"""Share of the step from which a loss is no noise, whatever the other ranks cost."""

_REMEDIES: Final = {
    "compute": "Its kernels or operators take longer than its peers': compare clocks, power and throttle reasons of "
    "the device (nvidia-smi -q -d PERFORMANCE,CLOCK), then the amount of work (sequence lengths, experts) it is given.",
    "dataloader": "It waits for its batches longer than its peers: look at its storage and its samples; give its "
    "DataLoader more workers, or spread expensive samples evenly over the ranks.",
    "launch": "Its host launches more slowly than its peers': look for other processes on its cores, CPU frequency and "
    "NUMA binding of that process (numactl, taskset).",
    "host": "Its Python thread spends time outside operators that its peers do not: look for work done on this rank "
    "only (logging, evaluation, checkpointing), garbage collection, or other processes on its cores.",
    "sync": "It blocks on the device where its peers do not: look for .item(), printing of tensors or synchronize() on "
    "this rank only.",
    "copy": "Its host-device copies take longer than its peers': look at pinned memory and at the PCIe link of its "
    "device.",
    "communication": "Its communication takes longer than its peers': compare its links (nvidia-smi topo -m, ibstat) "
    "with theirs.",
}

_SLOW_ON_CPU: Final = (
    "Its operators take longer than its peers': look for other processes on its cores, its CPU frequency and its "
    "number of threads (OMP_NUM_THREADS), then the amount of work (sequence lengths, experts) it is given."
)


def evaluate(facts: JobFacts) -> Finding | None:
    """The worst straggler that costs enough and clearly more than the next; None otherwise."""
    if not facts.stragglers:
        return None
    worst = facts.stragglers[0]
    following = facts.stragglers[1].lost_us if len(facts.stragglers) > 1 else 0.0
    if worst.lost_us < SHARE * facts.step_time_us:
        return None
    much = worst.lost_us >= BEYOND_NOISE * facts.step_time_us
    if not (much or worst.share_of_steps >= STEADY or worst.lost_us >= OVER_NEXT * following):
        return None
    share = worst.lost_us / facts.step_time_us
    return Finding(
        rule=RULE,
        title=f"Rank {worst.rank} makes the others wait {share:.0%} of the step, by its {_cause(worst)}",
        severity=Severity.of_share(share),
        evidence=_evidence(facts, worst),
        action=Action(
            setting=f"rank {worst.rank}{f' on {worst.host}' if worst.host else ''}",
            old=None,
            new=None,
            how=_remedy(facts, worst),
        ),
        confidence=Confidence(worst.confidence),
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, worst.lost_us),
    )


def _remedy(facts: JobFacts, worst: StragglerRow) -> str:
    run = facts.runs.get(worst.rank)
    if worst.cause == "compute" and run is not None and run.device.type == "cpu":
        return _SLOW_ON_CPU
    return _REMEDIES[worst.cause]


def _cause(row: StragglerRow) -> str:
    return {
        "compute": "slower computation",
        "dataloader": "slower data loading",
        "launch": "slower launching",
        "host": "host work outside operators",
        "sync": "blocking on its device",
        "copy": "slower copies",
        "communication": "slower communication",
    }[row.cause]


def _evidence(facts: JobFacts, worst: StragglerRow) -> tuple[Evidence, ...]:
    others = tuple(rank for rank in facts.ranks if rank != worst.rank)
    return (
        Evidence(what="step time lost to it", value=worst.lost_us, unit="us", ranks=(worst.rank,)),
        Evidence(
            what="share of steps in which it costs the most",
            value=worst.share_of_steps,
            unit="share",
            ranks=(worst.rank,),
        ),
        Evidence(
            what="exposed wait of the others (mean)",
            value=_mean_wait(facts, others),
            unit="us",
            ranks=others,
        ),
        Evidence(what="its own exposed wait", value=_mean_wait(facts, (worst.rank,)), unit="us", ranks=(worst.rank,)),
    )


def _mean_wait(facts: JobFacts, ranks: tuple[int, ...]) -> float:
    waits = [row.exposed_comm_wait_us for row in facts.accounting if row.rank in ranks]
    return sum(waits) / len(waits) if waits else 0.0
