"""Who the others wait for: a rank, a host, a pipeline stage, or ranks in turn; names them and the cause.

Source: arXiv 2505.05713 (stragglers in large training jobs): worker faults are rare, uneven work comes first.
"""

from __future__ import annotations

from statistics import median
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules import garbage_collection, imbalanced_work
from perfscope.analyzers.straggling.lost import without
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

MORE_WORK: Final = 0.05
"""Relative difference in FLOPs from which a rank has other work than its peers."""

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
    "communication": "Transfers that leave it take longer than the same transfers elsewhere: compare its links and "
    "network adapters with the others' (nvidia-smi topo -m, ibstat, ethtool -S), and its place in the fabric.",
}

_IN_TURN: Final = (
    "Pauses strike one rank after another and each time all wait. Python's garbage collector does that, since every "
    "process starts it by its own count of objects: call gc.disable() before the loop and gc.collect() on all ranks at "
    "the same step, say every 500. If it is off already, look for other work that each process does at its own time "
    "(logging, checkpoints, evaluation)."
)

_WHOLE_HOST: Final = (
    "All its ranks are slow alike, so the cause is the machine's, not one process's: compare its clocks, power caps "
    "and temperature (nvidia-smi -q -d PERFORMANCE,CLOCK,POWER), its CPU governor, and what else runs there; take it "
    "out of the job to see."
)

_WHOLE_STAGE: Final = (
    "All ranks of this pipeline stage are slow although they compute as much as the other stages: compare its devices' "
    "clocks and its kernels' efficiency with those of another stage; if it cannot be helped, give it fewer layers."
)

_MORE_WORK: Final = (
    "It is given {work:.2f} times the work of its peers, step after step, so nothing is wrong with its device: spread "
    "samples evenly (a DistributedSampler, shards of equal size, batches of equal length), and experts' tokens."
)

_SLOW_ON_CPU: Final = (
    "Its operators take longer than its peers': look for other processes on its cores, its CPU frequency and its "
    "number of threads (OMP_NUM_THREADS), then the amount of work (sequence lengths, experts) it is given."
)


def evaluate(facts: JobFacts) -> Finding | None:
    """The worst straggler that costs enough and clearly more than the next; None otherwise.

    Those whose cause has a rule of its own are left to it.
    """
    mine = [row for row in facts.stragglers if not _has_its_own_rule(facts, row)]
    if not mine:
        return None
    worst = mine[0]
    following = mine[1].lost_us if len(mine) > 1 else 0.0
    if worst.lost_us < SHARE * facts.step_time_us:
        return None
    much = worst.lost_us >= BEYOND_NOISE * facts.step_time_us
    if not (much or worst.share_of_steps >= STEADY or worst.lost_us >= OVER_NEXT * following):
        return None
    share = worst.lost_us / facts.step_time_us
    return Finding(
        rule=RULE,
        title=f"{_who(worst)} the others wait {share:.0%} of the step, by {_whose(worst)} {_cause(worst)}",
        severity=Severity.of_share(share),
        evidence=_evidence(facts, worst),
        action=Action(
            setting=_setting(worst),
            old=None,
            new=None,
            how=_remedy(facts, worst),
        ),
        confidence=Confidence(worst.confidence),
        obtained=Obtained.REPLAYED,
        ceiling=ceiling(facts.step_time_us, worst.lost_us),
        predicted_step_ns=without(facts.step_time_us, worst),
        whatif=_whatif(facts, worst),
    )


def _has_its_own_rule(facts: JobFacts, row: StragglerRow) -> bool:
    return garbage_collection.explains(facts, row) or imbalanced_work.explains(facts, row)


def _whatif(facts: JobFacts, worst: StragglerRow) -> dict[str, str]:
    """The same as settings, where ranks at their peers' pace are what was played.

    They are not for a stage, all of whose ranks are slow.
    """
    settings = {f"rank.{rank}": "peers" for rank in worst.ranks}
    played = facts.predict(settings) if facts.predict is not None and worst.scope in ("rank", "ranks", "host") else None
    if played is None:
        return {}
    saved_us = facts.step_time_us - played.mid / 1e3
    return settings if abs(saved_us - worst.lost_us) <= 0.2 * worst.lost_us else {}


def _who(row: StragglerRow) -> str:
    """The culprit as the title's subject, with its verb."""
    ranks = ranks_in_words(row.ranks)
    if row.scope == "host":
        return f"Host {row.host} ({ranks}) makes" if row.host else f"One host's {ranks} make"
    if row.scope == "ranks":
        return f"{ranks.capitalize()} make"
    if row.scope == "stage":
        return f"One pipeline stage ({ranks}) makes"
    if row.scope == "job":
        return f"Now one, now another of {ranks} makes"
    return f"Rank {row.rank} makes"


def _whose(row: StragglerRow) -> str:
    return "their" if row.scope == "ranks" or (row.scope == "host" and not row.host) else "its"


def _setting(row: StragglerRow) -> str:
    if row.scope in ("ranks", "stage", "job"):
        return ranks_in_words(row.ranks)
    where = f" on {row.host}" if row.host else ""
    return f"rank {row.rank}{where}" if row.scope == "rank" else f"host {row.host}".rstrip()


def ranks_in_words(ranks: tuple[int, ...]) -> str:
    """``rank 3``, ``ranks 0-3, 8``."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    told = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {told}" if len(ranks) == 1 else f"ranks {told}"


def _remedy(facts: JobFacts, worst: StragglerRow) -> str:
    if worst.scope == "job":
        return _IN_TURN if worst.cause == "host" else _REMEDIES[worst.cause]
    if worst.scope == "host" and worst.cause != "communication":
        return _WHOLE_HOST
    if worst.scope == "stage":
        return _WHOLE_STAGE
    work = _work_over_peers(facts, worst)
    if work is not None and abs(work - 1) >= MORE_WORK:
        return _MORE_WORK.format(work=work) if work > 1 else _REMEDIES[worst.cause]
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
    mine = worst.ranks or (worst.rank,)
    others = tuple(rank for rank in facts.ranks if rank not in mine) or facts.ranks
    work = _work_over_peers(facts, worst)
    return (
        Evidence(what="step time lost to it, by replay", value=worst.lost_us, unit="us", ranks=mine),
        Evidence(
            what="share of steps in which it costs the most",
            value=worst.share_of_steps,
            unit="share",
            ranks=mine,
        ),
        Evidence(
            what="exposed wait of the others (mean)",
            value=_mean_wait(facts, others),
            unit="us",
            ranks=others,
        ),
        Evidence(what="its own exposed wait", value=_mean_wait(facts, mine), unit="us", ranks=mine),
        *([Evidence(what="its model FLOPs, over its peers'", value=work, unit="ratio", ranks=mine)] if work else []),
    )


def _work_over_peers(facts: JobFacts, worst: StragglerRow) -> float | None:
    """Model FLOPs of a rank that computes for longer, over the other ranks' median; None where shapes do not tell, and
    where ranks of several pipeline stages are no peers.
    """
    if worst.scope != "rank" or worst.cause != "compute" or facts.pipeline is not None:
        return None
    sums = {rank: sum(steps.flops) for rank, steps in facts.per_step.items() if steps.flops is not None}
    others = [flops for rank, flops in sums.items() if rank != worst.rank]
    return sums[worst.rank] / median(others) if worst.rank in sums and others and median(others) else None


def _mean_wait(facts: JobFacts, ranks: tuple[int, ...]) -> float:
    waits = [row.exposed_comm_wait_us for row in facts.accounting if row.rank in ranks]
    return sum(waits) / len(waits) if waits else 0.0
