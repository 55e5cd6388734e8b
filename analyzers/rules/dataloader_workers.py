"""DataLoader ``num_workers``: fires when the device waits for batches; recommends a number, not "more".

The smallest number of workers w with batch time / w <= step without the stall, and at most the cores each rank can
have. Sources: PyTorch performance tuning guide; Lightning issue 18591 on why "as many as possible" is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import framework
from perfscope.analyzers.rules.loader_startup import find_stalls
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling
from perfscope.summary import DataLoaderRow

RULE: Final = "dataloader-workers"
SHARE: Final = 0.05
"""Share of the step lost to data loading from which the rule fires."""


@dataclass(frozen=True)
class _Need:
    """Workers that end the stall, and the step they allow (µs)."""

    workers: int
    cores: int | None
    """Workers a rank can have without sharing cores; None when not known."""
    step_us: float


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None where loading hardly blocks, only on a rank that the others wait for, or now and then."""
    starved = [row for row in facts.dataloader if row.blocking_us >= SHARE * facts.step_time_us]
    if not starved or _is_one_straggler(facts, starved) or find_stalls(facts) is not None:
        return None
    worst = max(starved, key=lambda row: row.blocking_us)
    stall_us = median(row.blocking_us for row in starved)
    without_us = facts.step_time_us - stall_us
    need = _need(facts, worst, without_us)
    recoverable = facts.step_time_us - (need.step_us if need else without_us)
    if recoverable <= 0:
        return None
    return Finding(
        rule=RULE,
        title=f"Data loading blocks {stall_us / facts.step_time_us:.0%} of the step on {_ranks(starved, facts)}",
        severity=Severity.of_share(stall_us / facts.step_time_us),
        evidence=_evidence(facts, worst, stall_us, tuple(row.rank for row in starved), need),
        action=_action(framework(facts), worst, need),
        confidence=_confidence(facts, worst),
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, recoverable),
        whatif={"dataloader.num_workers": str(need.workers)} if need and need.workers != worst.num_workers else {},
    )


def _is_one_straggler(facts: JobFacts, starved: list[DataLoaderRow]) -> bool:
    """Only ranks already named as stragglers starve while most others do not: that finding says it better."""
    named = {row.rank for row in facts.stragglers if row.cause == "dataloader"}
    return 2 * len(starved) <= len(facts.ranks) and {row.rank for row in starved} <= named


def _need(facts: JobFacts, row: DataLoaderRow, without_us: float) -> _Need | None:
    """None where the time to load a batch is not known, or nothing else fills the step."""
    if row.batch_us is None or without_us <= 0:
        return None
    batches = _batches_per_step(row)
    load_us = row.batch_us * batches
    workers = max(ceil(load_us / without_us), 1)
    run = facts.runs.get(row.rank)
    cores = max(run.cpu_count // run.local_world_size, 1) if run and run.cpu_count else None
    allowed = min(workers, cores) if cores else workers
    return _Need(allowed, cores, max(without_us, load_us / allowed))


def _batches_per_step(row: DataLoaderRow) -> float:
    """Batches drawn per step: more than one under gradient accumulation."""
    if row.num_workers == 0 and row.batch_us:
        return max(row.wait_us / row.batch_us, 1.0)
    return 1.0


def _evidence(
    facts: JobFacts, row: DataLoaderRow, stall_us: float, ranks: tuple[int, ...], need: _Need | None
) -> tuple[Evidence, ...]:
    rows = [
        Evidence(what="time per step blocked on the data loader (median)", value=stall_us, unit="us", ranks=ranks),
        Evidence(what="step time", value=facts.step_time_us, unit="us", ranks=facts.ranks),
    ]
    if row.batch_us is not None:
        rows.append(
            Evidence(what="time to load one batch on one worker", value=row.batch_us, unit="us", ranks=(row.rank,))
        )
    if need and need.cores is not None:
        rows.append(Evidence(what="cores per rank on the host", value=need.cores, unit="", ranks=(row.rank,)))
    return tuple(rows)


_LOADER: Final = "DataLoader(dataset, …, num_workers={workers}, persistent_workers=True)"
_ARGUMENTS: Final = {
    "transformers": "--dataloader_num_workers {workers} --dataloader_persistent_workers True",
    "megatron": "--num-workers {workers}",
}
"""How frameworks that make the loader themselves are told."""


def _action(used: str, row: DataLoaderRow, need: _Need | None) -> Action:
    old = None if row.num_workers is None else str(row.num_workers)
    if need is None:
        return Action(
            setting="DataLoader(num_workers=…)",
            old=old,
            new=None,
            how="The time to load a batch cannot be told from this recording. Record with perfscope run, which notes "
            "the number of workers; then the number that ends the stall can be given.",
        )
    if row.num_workers is not None and need.workers <= row.num_workers:
        return Action(
            setting="DataLoader(num_workers=…)",
            old=old,
            new=old,
            how=f"The {need.cores} cores that each rank has are the limit, not the number of workers. Make a batch "
            "cheaper to load (decode or tokenize ahead of time, faster storage), or give each rank more cores.",
        )
    limited = (
        f" {need.workers} is all the cores allow ({need.cores} a rank); loading still limits the step, so make a batch "
        "cheaper too."
        if need.cores == need.workers and need.step_us > 0 and (row.batch_us or 0) / need.workers > need.step_us * 0.999
        else ""
    )
    return Action(
        setting="DataLoader(num_workers=…)",
        old=old,
        new=str(need.workers),
        how=_ARGUMENTS.get(used, _LOADER).format(workers=need.workers) + f".{limited}",
    )


def _confidence(facts: JobFacts, row: DataLoaderRow) -> Confidence:
    if facts.few_steps:
        return Confidence.LOW
    return Confidence.HIGH if row.num_workers == 0 and not facts.missing_ranks else Confidence.MEDIUM


def _ranks(starved: list[DataLoaderRow], facts: JobFacts) -> str:
    if len(starved) == len(facts.ranks):
        return "every rank" if len(starved) > 1 else f"rank {starved[0].rank}"
    shown = ", ".join(str(row.rank) for row in starved[:4])
    return f"rank{'s' if len(starved) > 1 else ''} {shown}{' …' if len(starved) > 4 else ''}"
