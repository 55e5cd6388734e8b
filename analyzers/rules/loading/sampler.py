"""Sampling: fires when every epoch repeats the first one's order, or when all ranks get the same samples.

Neither costs time; both change what the model learns. A DistributedSampler shuffles by its seed and epoch; the epoch
is 0 until the script calls ``set_epoch`` (torch ``utils/data/distributed.py``). Without such a sampler every rank draws
from the whole dataset, in the same order if all seeds are equal.
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.typed import call
from perfscope.recording.metadata import DataLoaderMetadata, RunMetadata
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Obtained, Severity, code

RULE: Final = "sampler"
EPOCHS: Final = 1.25
"""Least epochs that have passed while the sampler's epoch is 0: more than one, because a step may draw no batch."""
DIVIDED: Final = ("ddp", "fsdp", "zero1", "zero2", "zero3")
"""Strategies under which every rank needs samples of its own; with tensor or pipeline parallelism some share them."""
COMPARED: Final = 2
"""Least batches that are equal on all ranks: one may be by chance, where a batch starts with a small label."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: samples differ and orders change, or neither is recorded."""
    return _same_samples(job) or _same_order(job)


def _same_samples(job: RuleContext) -> Finding | None:
    first = {rank: run.dataloaders[0] for rank, run in job.runs.items() if run.dataloaders}
    if len(first) < 2 or len(first) < len(job.ranks) or not _every_rank_needs_its_own(job):
        return None
    prints = {loader.fingerprints for loader in first.values()}
    same = prints.pop() if len(prints) == 1 else ()
    # Batches that are all equal are synthetic, for a test of speed.
    if len(same) < COMPARED or len(set(same)) < len(same):
        return None
    loader = next(iter(first.values()))
    evidence = (Evidence("compared batches, equal on all ranks", len(same), ranks=tuple(sorted(first))),)
    if loader.shuffle is not None and not loader.iterable:
        return _divided_in_vain(loader, evidence)
    return Finding(
        rule=RULE,
        title=f"All {len(first)} ranks get the same samples, so they train as one",
        severity=Severity.INFO,
        evidence=evidence,
        action=Action(
            setting="IterableDataset.__iter__" if loader.iterable else "DataLoader(sampler=…)",
            old=None if loader.iterable else loader.sampler or None,
            new=None if loader.iterable else "DistributedSampler",
            how=_how(job.framework, loader),
            costs="No time per step; an epoch has as many times fewer steps as there are ranks. Tune the learning rate "
            "again.",
        ),
        confidence=Confidence.HIGH,
        obtained=Obtained.MEASURED,
    )


def _divided_in_vain(loader: DataLoaderMetadata, evidence: tuple[Evidence, ...]) -> Finding:
    """Batches that are equal though a sampler divides the samples: made of equal random numbers, or it takes all ranks
    for one.
    """
    return Finding(
        rule=RULE,
        title=f"{loader.sampler} divides the samples, yet batches begin alike on all ranks",
        severity=Severity.INFO,
        evidence=evidence,
        action=Action(
            setting="seeds of the ranks",
            old=None,
            new=None,
            how="If samples are random (augmented or made up), give each rank a seed of its own, from which those of "
            "its workers follow:\n"
            + code("python", "torch.manual_seed(1234 + torch.distributed.get_rank())  # once the model is made")
            + "\nElse check the sampler's rank and num_replicas: they are those of torch.distributed by default.",
        ),
        confidence=Confidence.MEDIUM,
        obtained=Obtained.MEASURED,
    )


def _how(framework: str, loader: DataLoaderMetadata) -> str:
    if loader.iterable:
        return _HOWS["accelerate"] if framework == "accelerate" else _DIVIDE_STREAM
    return _HOWS.get(framework, _DIVIDE)


def _every_rank_needs_its_own(job: RuleContext) -> bool:
    shared = any(group.role in ("tensor", "pipeline", "context") for group in job.summary.groups)
    return bool(job.info.strategies) and set(job.info.strategies) <= set(DIVIDED) and not shared


def _same_order(job: RuleContext) -> Finding | None:
    repeated = [
        (rank, loader, epochs)
        for rank, run in sorted(job.runs.items())
        for loader in run.dataloaders
        if loader.shuffle and loader.sampler_epoch == 0 and (epochs := _epochs(run, loader)) >= EPOCHS
    ]
    if not repeated:
        return None
    _, loader, epochs = repeated[0]
    return Finding(
        rule=RULE,
        title=f"{loader.sampler}.set_epoch is never called, so every epoch repeats the order of the first",
        severity=Severity.INFO,
        evidence=(
            Evidence(
                "epochs that have passed while the sampler's epoch is 0",
                epochs,
                ranks=tuple(dict.fromkeys(rank for rank, _, _ in repeated)),
            ),
            Evidence("batches per epoch", loader.batches_per_epoch or 0),
        ),
        action=Action(
            setting="sampler.set_epoch",
            old="not called",
            new=None,
            how="At the start of every epoch:\n"
            + code(
                "python",
                "for epoch in range(epochs):\n    sampler.set_epoch(epoch)\n    for batch in loader:\n        ...",
            ),
        ),
        confidence=Confidence.HIGH,
        obtained=Obtained.MEASURED,
    )


def _epochs(run: RunMetadata, loader: DataLoaderMetadata) -> float:
    """Epochs of a loader that have passed at the end of the last capture, at the recorded batches per step."""
    if not loader.batches_per_epoch or not run.captures:
        return 0.0
    captured = sum(capture.last_step - capture.first_step + 1 for capture in run.captures)
    drawn = min(loader.batches / captured, 1.0) if captured > 0 else 0.0
    return max(capture.last_step for capture in run.captures) * drawn / loader.batches_per_epoch


_DIVIDE: Final = (
    code(
        "python",
        "from torch.utils.data.distributed import DistributedSampler\n"
        "sampler = DistributedSampler(dataset, shuffle=True)\n"
        "loader = DataLoader(dataset, sampler=sampler)  # your other arguments stay, but for shuffle",
    )
    + "\nAnd sampler.set_epoch(epoch) before each epoch."
)
_DIVIDE_STREAM: Final = (
    "A sampler cannot divide an iterable dataset. Give each rank, and each worker, its own part in __iter__:\n"
    + code(
        "python",
        "def __iter__(self):\n"
        "    info = torch.utils.data.get_worker_info()\n"
        "    workers, worker = (info.num_workers, info.id) if info else (1, 0)\n"
        "    part = torch.distributed.get_rank() * workers + worker\n"
        "    parts = torch.distributed.get_world_size() * workers\n"
        "    yield from itertools.islice(self.samples(), part, None, parts)  # what it yields now",
    )
    + "\nOf Hugging Face datasets: datasets.distributed.split_dataset_by_node."
)
_HOWS: Final = {
    "lightning": call("trainer = Trainer", use_distributed_sampler=True)
    + "\nThat is the default; your own sampler has to divide the samples.",
    "fabric": code("python", "loader = fabric.setup_dataloaders(loader)"),
    "accelerate": code("python", "loader = accelerator.prepare(loader)"),
}
