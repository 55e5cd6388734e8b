"""Uneven work: fires when ranks in turn compute longer than the others, because they have more to compute.

Sequences of different length, or tokens that choose one expert, make one micro-batch longer than another: forward and
backward grow together, and the slow rank changes. With shapes the FLOPs show it; without, forward and the rest of
compute must correlate. A rank that is slow with the same work is a straggler, not uneven work; so are a few ranks that
are slow in turn while the others never are, unless FLOPs show that they have more. Where another rank is the slowest
between each two collectives, as where every layer's experts get tokens of their own, compute between these shows it,
and whole steps need not.
Source: arXiv 2505.05713 (forward and backward times that correlate tell uneven sequences from slow workers).
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np

from perfscope.analyzers.replay.stragglers.chance import are_few
from perfscope.analyzers.rules.context import RuleContext
from perfscope.results.findings import Action, Confidence, Evidence, Finding
from perfscope.results.rows import StragglerRow
from perfscope.text import ranks_in_words
from perfscope.trace.trace import Float64

RULE: Final = "uneven-work"
SHARE: Final = 0.05
"""Least straggler cost, as a share of the step."""
CORRELATED: Final = 0.9
"""Least correlation of compute and work."""
_HARDLY: Final = 0.25
"""Part of the others' wait below which a rank hardly waits."""
SPREAD: Final = 0.03
"""Least relative standard deviation of the work: a correlation of noise means nothing."""
AGREES: Final = 0.2
"""Part of a straggler's cost by which the what-if may differ that is named for it."""

_LONGER: Final = 1.1
"""Of what most ranks compute in a step, from which one computes clearly longer."""
_MOST: Final = 3
"""Ranks from which some of them are most."""

_OF_A_LAYER: Final = 4
"""All-to-alls in a step that a layer with experts has: to them and back, in the forward and in the backward."""
_MIXED: Final = ("data", "world", "unknown")
"""Roles of groups that may exchange tokens beside what they are for."""

_PLACEMENT: Final = (
    "Experts that always get more can be placed on different ranks. If there are none, look for what else differs "
    "between ranks from one collective to the next."
)
_DIVIDED: Final = (
    "The same rank has more each time: look at how samples are divided among the ranks (shards of files, a sampler, "
    "samples sorted by length), and give each rank its share of the long ones."
)
_COLLECTIVES: Final = (
    "Work differs between ranks from one collective to the next. Compare there, on all ranks, what depends on the "
    "data: sizes of inputs (sequence lengths, packed samples), and branches that only some ranks take."
)


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: no ranks are slow in turn by compute, or they are slow with the same work."""
    costly = [row for row in job.summary.stragglers if row.lost_us >= SHARE * job.step_time_us]
    row = next((row for row in costly if explains(job, row)), None)
    if row is None or (row is not costly[0] and not row.within_steps):
        return None
    by_flops, correlation = _follows(job)
    if correlation < CORRELATED or (row.within_steps and exchanges_tokens(job)):
        return _within_steps(job, row)
    return job.finding(
        RULE,
        f"Uneven work: ranks wait {job.share(row.lost_us):.0%} of the step, " + _for_whom(job, row),
        row.lost_us,
        evidence=_evidence(job, row, by_flops=by_flops, correlation=correlation),
        action=_of_batches(job)
        or Action(
            setting="tokens of each rank's batch",
            old=None,
            new=None,
            how=_how(job) if _has_most(job) is None else f"{_DIVIDED}\n{_how(job)}",
            costs="Samples that are sorted or bucketed by length are no longer drawn independently.",
        ),
        confidence=Confidence.LOW if job.info.few_steps else Confidence.HIGH if by_flops else Confidence.MEDIUM,
        predicted=row.step_without(job.step_time_us),
    )


def _of_batches(job: RuleContext) -> Action | None:
    """What to change where ranks take more and fewer batches in the same step, and compute as much longer; else None.

    Example: 3, 4 and 5 micro-batches of 20 ms each in one step.
    """
    steps = list(job.per_step.values())
    if not all(rank.batches and min(rank.batches) for rank in steps):
        return None
    batches = np.array([rank.batches for rank in steps], dtype=np.float64)
    if _correlation(batches, np.array([rank.compute_us for rank in steps], dtype=np.float64)) < CORRELATED:
        return None
    least, most = int(batches.min()), int(batches.max())
    return Action(
        setting="batches of each rank per step",
        old=f"{least} to {most}",
        new="as many on all",
        how="Take as many batches on all ranks in a step, with as much work in each (a fixed number of micro-batches, "
        f"samples packed to one length): they take {least} to {most} now, and wait for those with more.",
        costs=None,
    )


def _within_steps(job: RuleContext, row: StragglerRow) -> Finding:
    """Of work that differs from one collective to the next: over whole steps nothing need follow it."""
    experts, always = exchanges_tokens(job), _always_longer(job)
    for_whom = "at each collective for another one"
    if always:
        for_whom = (
            f"mostly for {ranks_in_words(always)}, which {'compute' if always[1:] else 'computes'} longer each time"
        )
    return job.finding(
        RULE,
        f"Uneven work costs {job.share(row.lost_us):.0%} of the step: ranks wait {for_whom}",
        row.lost_us,
        evidence=(Evidence("straggler cost, replayed", row.lost_us, "us", row.ranks),),
        action=Action(
            setting="tokens of each rank's experts" if experts else "work of each rank between collectives",
            old=None,
            new=None,
            how=f"{of_experts(job)} {_PLACEMENT}" if experts else _COLLECTIVES,
            costs="Tokens beyond an expert's capacity are dropped, and a higher weight of the balancing loss may cost "
            "quality."
            if experts
            else None,
        ),
        confidence=Confidence.LOW if job.info.few_steps else Confidence.MEDIUM,
        predicted=row.step_without(job.step_time_us),
        whatif=_whatif(job, row),
    )


def _always_longer(job: RuleContext) -> tuple[int, ...]:
    """Ranks that compute clearly longer than most in each step, fewer than half of them: work of the same ones is more,
    wherever in the step.
    """
    compute = np.array([each.compute_us for each in job.per_step.values()])
    if compute.ndim < 2 or len(compute) < _MOST or not compute.size:
        return ()
    longer = (compute >= _LONGER * np.median(compute, axis=0)).all(axis=1)
    ranks = tuple(rank for rank, is_longer in zip(job.per_step, longer.tolist(), strict=True) if is_longer)
    return ranks if 2 * len(ranks) < len(compute) else ()


def _whatif(job: RuleContext, row: StragglerRow) -> dict[str, str]:
    """The same as a setting, where it brings what this costs: where nothing else differs between the ranks."""
    settings = {"ranks.work": "even"}
    others = {rank for other in job.summary.stragglers if other is not row for rank in other.members}
    step = job.predict(settings) if job.predict is not None and not others.intersection(row.ranks) else None
    if step is None or abs(job.step_time_us - step.mid - row.lost_us) > AGREES * row.lost_us:
        return {}
    return settings


def exchanges_tokens(job: RuleContext) -> bool:
    """Do ranks send tokens to one another's experts, as far as is known? All-to-alls of what is known to be another
    thing do not count.
    """
    if (job.settings("megatron").get("expert_model_parallel_size") or 1) > 1:
        return True
    often: Counter[str] = Counter()
    for row in job.summary.collectives:
        if row.kind == "all_to_all":
            often[row.group] += row.count
    return any(
        group.role == "expert" or (group.role in _MIXED and "indices" not in group.role_from)
        for group in job.summary.groups
        if often[group.name] >= _OF_A_LAYER * len(job.info.steps)
    )


def _for_whom(job: RuleContext, row: StragglerRow) -> str:
    if len(job.info.steps) < 2:
        return "in one step, for those that had more of it"
    most = _has_most(job)
    if most is not None:
        return f"mostly for rank {most[0]}, which has {most[1]:.2f} times the mean in each step"
    rank = mostly_for(job, row)
    return "in turn for one another" if rank is None else f"mostly for rank {rank}"


def _has_most(job: RuleContext) -> tuple[int, float] | None:
    """The rank with the most FLOPs in each step, and how much that is over the ranks' mean; None where these change."""
    flops = {rank: each.flops for rank, each in job.per_step.items() if each.flops is not None}
    if len(flops) < len(job.per_step) or not flops:
        return None
    work = np.array([*flops.values()], dtype=np.float64)
    first = set(work.argmax(axis=0).tolist())
    over = float((work.max(axis=0) / np.maximum(work.mean(axis=0), 1.0)).mean())
    return (list(flops)[first.pop()], over) if len(first) == 1 and over - 1 >= SPREAD else None


def mostly_for(job: RuleContext, row: StragglerRow) -> int | None:
    """Of ranks that are slow in turn, the one that the others mostly wait for, since it hardly waits itself; None where
    each waits for the others.
    """
    waits = {each.rank: each.exposed_comm_wait_us for each in job.summary.time_breakdown if each.rank in row.ranks}
    if len(waits) < 2:
        return None
    rank = min(waits, key=lambda rank: waits[rank])
    others = [us for other, us in waits.items() if other != rank]
    return rank if waits[rank] < _HARDLY * min(others) else None


def explains(job: RuleContext, row: StragglerRow) -> bool:
    """Do the ranks of this straggler take turns, each slow where it has more to compute?"""
    if row.pattern != "rotating" or row.cause != "compute":
        return False
    by_flops, correlation = _follows(job)
    return row.within_steps or (correlation >= CORRELATED and (by_flops or not only_few(job, row)))


def only_few(job: RuleContext, row: StragglerRow) -> bool:
    """Are few ranks slow in turn, and the others never? Work that varies is longer on each now and then."""
    return row.scope == "job" and are_few(len(row.ranks), len(job.ranks), len(row.steps) or len(job.info.steps))


def flops_spread(job: RuleContext) -> float | None:
    """Relative standard deviation of the ranks' FLOPs, without each step's mean; None where they are not known."""
    flops = [rank.flops for rank in job.per_step.values()]
    if not flops or any(each is None for each in flops):
        return None
    work: Float64 = np.array(flops, dtype=np.float64)
    return float((work - work.mean(axis=0)).std() / work.mean()) if work.any() else None


def _follows(job: RuleContext) -> tuple[bool, float]:
    """(whether by FLOPs, the correlation of compute and work over all steps of all ranks); 0 where neither is recorded.

    By FLOPs where shapes are recorded: equal ones mean even work, whatever forward and backward take. On CPUs compute
    may follow them but for what threads wait for a core, some of it elsewhere: now one waits for longer, now another.
    """
    steps = list(job.per_step.values())
    compute = np.array([rank.compute_us for rank in steps], dtype=np.float64)
    if steps and all(rank.flops is not None for rank in steps):
        flops: Float64 = np.array([rank.flops for rank in steps], dtype=np.float64)
        waited = np.array([job.core_us.get(rank, (0.0,) * len(job.info.steps)) for rank in job.per_step])
        return True, max(_correlation(flops, each) for each in (compute, np.maximum(compute - waited, 0.0)))
    if steps and all(rank.forward_us is not None for rank in steps):
        forward: Float64 = np.array([rank.forward_us for rank in steps], dtype=np.float64)
        return False, _correlation(forward, compute - forward)
    return False, 0.0


def _correlation(work: Float64, taken: Float64) -> float:
    """Pearson's, without each step's mean over the ranks: what all ranks have in common delays none."""
    middle = float(work.mean())
    work, taken = work - work.mean(axis=0), taken - taken.mean(axis=0)
    spread, other = float(work.std()), float(taken.std())
    if middle <= 0 or spread < SPREAD * middle or other == 0:
        return 0.0
    return float((work * taken).mean()) / (spread * other)


def _evidence(job: RuleContext, row: StragglerRow, *, by_flops: bool, correlation: float) -> tuple[Evidence, ...]:
    steps = job.per_step.values()
    work = np.array([rank.flops if by_flops else rank.forward_us for rank in steps], dtype=np.float64)
    what = "model FLOPs" if by_flops else "forward time"
    return (
        Evidence("straggler cost, replayed", row.lost_us, "us", row.ranks),
        Evidence(
            f"{what} of the rank with most, over the ranks' mean (mean over steps)",
            float((work.max(axis=0) / work.mean(axis=0)).mean()),
            "ratio",
            row.ranks,
        ),
        Evidence(
            f"correlation of {what} with {'compute' if by_flops else 'the rest of compute'}",
            correlation,
            ranks=job.ranks,
        ),
        Evidence("ranks that had the most in some step", len(set(work.argmax(axis=0).tolist()))),
    )


def _how(job: RuleContext) -> str:
    """What to type, in the terms of the framework in use."""
    used = job.framework
    lengths = {
        "transformers": "--group_by_length True (--train_sampling_strategy group_by_length in newer releases), or pack "
        "samples to one length",
        "megatron": "samples packed to --seq-length (--reset-position-ids --reset-attention-mask keep them apart)",
    }.get(
        used,
        "pack samples to one length, or draw batches by tokens from buckets of similar length, on all ranks",
    )
    lines = [f"Sequences of different length: {lengths}."]
    experts = job.settings("megatron").get("expert_model_parallel_size") or 1
    if used != "megatron" or experts > 1:
        lines.append(of_experts(job))
    return "\n".join(lines)


def of_experts(job: RuleContext) -> str:
    """What balances the tokens of experts, in the terms of the framework in use."""
    remedy = (
        "--moe-router-load-balancing-type aux_loss with a higher --moe-aux-loss-coeff, or "
        "--moe-expert-capacity-factor 1.25"
        if job.framework == "megatron"
        else "a higher weight of the router's load balancing loss, or a capacity factor"
    )
    return f"Experts that get more tokens than others: {remedy}."
