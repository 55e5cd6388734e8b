"""Sampling: fires when every epoch repeats the first one's order, or when all ranks are given the same samples.

Both cost no time: they cost what is learned from it. A DistributedSampler shuffles by its seed and epoch, and the epoch
is 0 until the script calls ``set_epoch`` (torch ``utils/data/distributed.py``). Without such a sampler every rank draws
the whole dataset, in the same order where all seeds are equal.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules.frameworks import framework
from perfscope.findings import Action, Confidence, Evidence, Finding, Obtained, Severity
from perfscope.metadata import DataLoaderRecord, RunMetadata

RULE: Final = "sampler"
EPOCHS: Final = 1.25
"""Epochs that must have passed for a sampler whose epoch is 0 to have been left so: more than one, for steps that draw
no batch."""
DIVIDED: Final = ("ddp", "fsdp", "zero1", "zero2", "zero3")
"""Strategies under which every rank needs samples of its own; with tensor or pipeline parallelism some share them."""
COMPARED: Final = 2
"""Batches that must be equal on all ranks: one may be by chance, where a batch begins with a small label."""


def evaluate(facts: JobFacts) -> Finding | None:
    """The finding, or None: samples differ and orders change, or nothing tells."""
    return _same_samples(facts) or _same_order(facts)


def _same_samples(facts: JobFacts) -> Finding | None:
    first = {rank: run.dataloaders[0] for rank, run in facts.runs.items() if run.dataloaders}
    if len(first) < 2 or len(first) < len(facts.ranks) or not _every_rank_needs_its_own(facts):
        return None
    prints = {loader.fingerprints for loader in first.values()}
    same = prints.pop() if len(prints) == 1 else ()
    # Batches that are all alike are made up for a test of speed: nobody trains on them.
    if len(same) < COMPARED or len(set(same)) < len(same):
        return None
    loader = next(iter(first.values()))
    return Finding(
        rule=RULE,
        title=f"All {len(first)} ranks are given the same samples, so they train as one",
        severity=Severity.INFO,
        evidence=(
            Evidence(what="batches compared, equal on all ranks", value=len(same), unit="", ranks=tuple(sorted(first))),
        ),
        action=Action(
            setting="DataLoader(sampler=…)",
            old=loader.sampler or None,
            new="DistributedSampler",
            how=_HOWS.get(framework(facts), _DIVIDE),
            costs="None in time: a step takes as long, and an epoch has as many times fewer of them as there are "
            "ranks. Learning rates that were tuned without it have to be looked at again.",
        ),
        confidence=Confidence.HIGH,
        obtained=Obtained.MEASURED,
    )


def _every_rank_needs_its_own(facts: JobFacts) -> bool:
    shared = any(group.role in ("tensor", "pipeline", "context") for group in facts.groups)
    return bool(facts.strategies) and set(facts.strategies) <= set(DIVIDED) and not shared


def _same_order(facts: JobFacts) -> Finding | None:
    found = [
        (rank, loader, epochs)
        for rank, run in sorted(facts.runs.items())
        for loader in run.dataloaders
        if loader.shuffle and loader.sampler_epoch == 0 and (epochs := _epochs(run, loader)) >= EPOCHS
    ]
    if not found:
        return None
    _, loader, epochs = found[0]
    return Finding(
        rule=RULE,
        title=f"{loader.sampler} is never told the epoch, so every epoch repeats the order of the first",
        severity=Severity.INFO,
        evidence=(
            Evidence(
                what="epochs that had passed when its epoch was still 0",
                value=epochs,
                unit="",
                ranks=tuple(dict.fromkeys(rank for rank, _, _ in found)),
            ),
            Evidence(what="batches of one epoch", value=loader.batches_per_epoch or 0, unit=""),
        ),
        action=Action(
            setting="sampler.set_epoch",
            old="not called",
            new=None,
            how="for epoch in range(epochs):\n    sampler.set_epoch(epoch)\n    for batch in loader: …",
        ),
        confidence=Confidence.HIGH,
        obtained=Obtained.MEASURED,
    )


def _epochs(run: RunMetadata, loader: DataLoaderRecord) -> float:
    """Epochs of a loader that had passed at the end of the last capture, as many batches a step as were seen drawn."""
    if not loader.batches_per_epoch or not run.captures:
        return 0.0
    captured = sum(capture.last_step - capture.first_step + 1 for capture in run.captures)
    drawn = min(loader.batches / captured, 1.0) if captured > 0 else 0.0
    return max(capture.last_step for capture in run.captures) * drawn / loader.batches_per_epoch


_DIVIDE: Final = (
    "sampler = DistributedSampler(dataset, shuffle=True)\nloader = DataLoader(dataset, …, sampler=sampler)\n"
    "and sampler.set_epoch(epoch) before each epoch"
)
_HOWS: Final = {
    "lightning": "Trainer(use_distributed_sampler=True), the default; a sampler of your own has to divide the samples.",
    "accelerate": "loader = accelerator.prepare(loader)",
}
