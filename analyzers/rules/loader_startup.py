"""Loader stalls that come now and then: at the start of epochs, or when batches take unequally long.

Workers that keep up on average need no more of them. Workers that are started anew for every epoch keep all ranks
waiting for the first batches: ``persistent_workers=True``. Batches of unequal cost are evened out by more batches
loaded ahead: ``prefetch_factor``. Workers that are too slow stall the step at regular distances, one round of workers
after another: that is ``dataloader_workers``' business. Source: torch ``utils/data/dataloader.py``; tuning guide.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import framework
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, ceiling
from perfscope.metadata import DataLoaderRecord

RULE: Final = "loader-stalls"
SHARE: Final = 0.05
"""Share of the recorded time that stalls must take."""
CLEAR: Final = 0.02
"""Share of the step that a typical step may wait: above, loading is slow, not uneven."""
STALL: Final = 0.25
"""Share of the step from which a step's wait is a stall."""
RARE: Final = 0.25
"""Share of the steps that may stall at most."""
SHORT_EPOCH: Final = 8
"""Batches an epoch must have for its start to be told from any other step."""
_DEFAULT_PREFETCH: Final = 2


@dataclass(frozen=True)
class Stalls:
    """Steps in which most ranks wait for batches, among many in which none does."""

    steps: tuple[int, ...]
    wait_us: tuple[float, ...]
    """Of each of them, median over the ranks."""
    epoch_starts: bool
    loader: DataLoaderRecord


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: no such stalls, or nothing recorded about the loader."""
    stalls = find_stalls(facts)
    if stalls is None:
        return None
    recorded = sum(stalls.wait_us) / facts.steps
    lost = _lost_us(facts, stalls)
    share = lost / facts.step_time_us
    when = "the start of an epoch" if stalls.epoch_starts else "now and then"
    return Finding(
        rule=RULE,
        title=f"All ranks wait for batches {'at ' if stalls.epoch_starts else ''}{when}: "
        f"{recorded / facts.step_time_us:.0%} of the recorded time, none of it in a typical step",
        severity=Severity.of_share(share),
        evidence=(
            Evidence(what="steps that stalled", value=len(stalls.steps), unit="", ranks=facts.ranks),
            Evidence(what="longest stall", value=max(stalls.wait_us), unit="us", ranks=facts.ranks),
            Evidence(what="lost per step, over the whole run" if stalls.epoch_starts else "lost per step",
                     value=lost, unit="us", ranks=facts.ranks),
        ),
        action=_action(facts, stalls),
        confidence=Confidence.LOW if facts.few_steps or len(stalls.steps) == 1 else Confidence.MEDIUM,
        obtained=Obtained.BOUNDED,
        ceiling=ceiling(facts.step_time_us, lost),
    )  # fmt: skip


def find_stalls(facts: JobFacts) -> Stalls | None:
    """Rare stalls of most ranks; None where loading is slow throughout, keeps up, or stalls one rank only."""
    loader = facts.run.dataloaders[0] if facts.run and facts.run.dataloaders else None
    per_rank = [steps.loading_us for steps in facts.per_step.values()]
    if loader is None or loader.num_workers == 0 or not per_rank or not facts.steps:
        return None
    waits = [median(step) for step in zip(*per_rank, strict=True)]
    step = facts.step_time_us
    hit = [index for index, wait in enumerate(waits) if wait >= STALL * step]
    total = sum(waits[index] for index in hit)
    if median(waits) > CLEAR * step or total < SHARE * step * len(waits) or len(hit) > RARE * len(waits):
        return None
    steps = tuple(facts.step_numbers[index] for index in hit)
    starts = _at_epoch_starts(steps, loader)
    # Workers that are too slow stall once in a round of all workers: rarer than that is another reason.
    if not starts and len(hit) >= len(waits) // loader.num_workers:
        return None
    return Stalls(steps, tuple(waits[index] for index in hit), starts, loader)


def _at_epoch_starts(steps: tuple[int, ...], loader: DataLoaderRecord) -> bool:
    """Do all stalls lie where the loader began anew, or just behind? Steps are counted from 0, a batch each."""
    length = loader.batches_per_epoch
    if not length or length < SHORT_EPOCH or loader.persistent_workers:
        return False
    return all(step % length <= 1 for step in steps)


def _lost_us(facts: JobFacts, stalls: Stalls) -> float:
    """Per step of the whole run: an epoch's start counts once an epoch, however many were recorded."""
    if stalls.epoch_starts and stalls.loader.batches_per_epoch:
        return sum(stalls.wait_us) / len(stalls.wait_us) / stalls.loader.batches_per_epoch
    return sum(stalls.wait_us) / facts.steps


def _action(facts: JobFacts, stalls: Stalls) -> Action:
    used, loader = framework(facts), stalls.loader
    if stalls.epoch_starts:
        return Action(
            setting="DataLoader(persistent_workers=…)",
            old="False",
            new="True",
            how="--dataloader_persistent_workers True"
            if used == "transformers"
            else f"DataLoader(dataset, …, num_workers={loader.num_workers}, persistent_workers=True)",
            costs="Workers keep their memory between epochs, and their copy of the dataset: what the training process "
            "changes in it later does not reach them.",
        )
    old = loader.prefetch_factor or _DEFAULT_PREFETCH
    # The slow batch has to be begun that much earlier, in steps that do not stall.
    ahead = max(stalls.wait_us) / (facts.step_time_us - sum(stalls.wait_us) / facts.steps)
    new = old + ceil(ahead / loader.num_workers)
    return Action(
        setting="DataLoader(prefetch_factor=…)",
        old=str(old),
        new=str(new),
        how=f"--dataloader_prefetch_factor {new}"
        if used == "transformers"
        else f"DataLoader(dataset, …, num_workers={loader.num_workers}, prefetch_factor={new})",
        costs=f"Memory of the host for {(new - old) * loader.num_workers} more batches a rank.",
    )
