"""DataLoader ``num_workers``: fires when the device waits for batches; recommends a number, not "more".

The smallest number of workers w with batch time / w <= step without the stall. Workers that wait (for disks, for the
network) may be more than cores; where the recording does not tell that they wait, they are at most the cores each rank
can have. Where training and loading together need all cores as it is, the finding says so and asks for no workers.
Sources: PyTorch performance tuning guide; Lightning issue 18591 on why "as many as possible" is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Final

from perfscope.analyzers.cores import Demand, cores_of, demands, needed_ns
from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import framework
from perfscope.analyzers.rules.loader_startup import find_stalls
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling
from perfscope.summary import DataLoaderRow

RULE: Final = "dataloader-workers"
SHARE: Final = 0.05
"""Share of the step lost to data loading from which the rule fires."""
LEAST_WON: Final = 1 / 3
"""Share of the stall that workers must end; where enough of them win less, cores are the limit."""
OTHERS: Final = 1.25
"""Time that the training's work took over its CPU time, from which other processes are on its cores: what they will do
is not sure."""


@dataclass(frozen=True)
class _Need:
    """Workers that end the stall, and the step they allow (µs)."""

    workers: int
    cores: int | None
    """Workers a rank can have without sharing cores; None when not known."""
    step_us: float
    demand: Demand | None = None
    """CPU time of training and loading; None where it was not recorded."""
    crowded: bool = False
    """Training and loading need all cores: no number of workers helps."""


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None where loading hardly blocks, only on a rank that the others wait for, or now and then."""
    starved = [row for row in facts.dataloader if row.blocking_us >= SHARE * facts.step_time_us]
    if not starved or _is_one_straggler(facts, starved) or find_stalls(facts) is not None:
        return None
    worst = max(starved, key=lambda row: row.blocking_us)
    stall_us = median(row.blocking_us for row in starved)
    without_us = facts.step_time_us - stall_us
    need = _need(facts, worst, without_us)
    # Where the cores are the limit, the stall ends when loading costs nothing.
    recoverable = facts.step_time_us - (need.step_us if need and not need.crowded else without_us)
    if recoverable <= 0:
        return None
    new = need and not need.crowded and need.workers != worst.num_workers
    return Finding(
        rule=RULE,
        title=f"Data loading blocks {stall_us / facts.step_time_us:.0%} of the step on {_ranks(starved, facts)}"
        + (", and the cores are the limit" if need and need.crowded else ""),
        severity=Severity.of_share(stall_us / facts.step_time_us),
        evidence=_evidence(facts, worst, stall_us, tuple(row.rank for row in starved), need),
        action=_action(framework(facts), worst, need),
        confidence=_confidence(facts, worst, need),
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, recoverable),
        whatif={"dataloader.num_workers": str(need.workers)} if need and new else {},
    )


def _is_one_straggler(facts: JobFacts, starved: list[DataLoaderRow]) -> bool:
    """Only ranks already named as stragglers starve while most others do not: that finding says it better."""
    named = {row.rank for row in facts.stragglers if row.cause == "dataloader"}
    return 2 * len(starved) <= len(facts.ranks) and {row.rank for row in starved} <= named


def _need(facts: JobFacts, row: DataLoaderRow, without_us: float) -> _Need | None:
    """None where the time to load a batch is not known, or nothing else fills the step."""
    if row.batch_us is None or without_us <= 0:
        return None
    load_us = row.batch_us * _batches_per_step(row)
    known = cores_of(facts.runs, row.rank) if row.rank in facts.runs else None
    cores = max(int(known), 1) if known else None
    batches = {other.rank: _batches_per_step(other) for other in facts.dataloader}
    needs = demands(facts.runs, batches)
    demand = needs.get(row.rank)
    if demand is None:
        workers = max(ceil(load_us / without_us), 1)
        allowed = min(workers, cores) if cores else workers
        return _Need(allowed, cores, max(without_us, load_us / allowed))
    # No step is shorter than the CPU time that it needs over the cores, which others may keep busy as well.
    least_us = max(without_us, min(needed_ns(needs, row.rank, batches) * demand.stretch / 1e3, facts.step_time_us))
    workers = max(ceil(load_us / least_us), 1)
    step_us = _expected_us(facts, workers, max(least_us, load_us / workers))
    won_us = facts.step_time_us - step_us
    crowded = won_us < max(SHARE * facts.step_time_us, LEAST_WON * (facts.step_time_us - without_us))
    return _Need(workers, cores, step_us, demand, crowded and workers > (row.num_workers or 0))


def _expected_us(facts: JobFacts, workers: int, least_us: float) -> float:
    """The step with so many workers, as it is played where it can be: they take cores from the training."""
    played = facts.predict({"dataloader.num_workers": str(workers)}) if facts.predict is not None else None
    return max(least_us, played.mid / 1e3) if played is not None else least_us


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
    if need and need.demand is not None:
        of_batch, of_step = need.demand.batch_ns / 1e3, need.demand.training_ns / 1e3
        rows.append(Evidence(what="CPU time to load one batch", value=of_batch, unit="us", ranks=(row.rank,)))
        rows.append(Evidence(what="CPU time of a step besides", value=of_step, unit="us", ranks=(row.rank,)))
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
    if need.crowded or (row.num_workers is not None and need.workers <= row.num_workers):
        return Action(
            setting="DataLoader(num_workers=…)",
            old=old,
            new=old,
            how=f"{_limit(need)}, not the number of workers. Make a batch cheaper to load (decode or tokenize ahead "
            "of time, faster storage), or give each rank more cores.",
        )
    limited = (
        f" {need.workers} is all the cores allow ({need.cores} a rank); loading still limits the step, so make a batch "
        "cheaper too."
        if need.demand is None
        and need.cores == need.workers
        and need.step_us > 0
        and (row.batch_us or 0) / need.workers > need.step_us * 0.999
        else ""
    )
    return Action(
        setting="DataLoader(num_workers=…)",
        old=old,
        new=str(need.workers),
        how=_ARGUMENTS.get(used, _LOADER).format(workers=need.workers) + f".{limited}",
    )


def _limit(need: _Need) -> str:
    """What keeps more workers from helping; only computing on all cores, or their number, leads here."""
    if need.cores is None:
        return "The time to load a batch is the limit"
    return (
        f"The {need.cores} cores that each rank has are the limit"
        if need.cores > 1
        else ("The one core that each rank has is the limit")
    )


def _confidence(facts: JobFacts, row: DataLoaderRow, need: _Need | None) -> Confidence:
    if facts.few_steps:
        return Confidence.LOW
    if need and need.demand and need.demand.stretch > OTHERS:
        return Confidence.MEDIUM
    return Confidence.HIGH if row.num_workers == 0 and not facts.missing_ranks else Confidence.MEDIUM


def _ranks(starved: list[DataLoaderRow], facts: JobFacts) -> str:
    if len(starved) == len(facts.ranks):
        return "every rank" if len(starved) > 1 else f"rank {starved[0].rank}"
    shown = ", ".join(str(row.rank) for row in starved[:4])
    return f"rank{'s' if len(starved) > 1 else ''} {shown}{' …' if len(starved) > 4 else ''}"
