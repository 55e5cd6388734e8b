"""How many samples a step takes: what throughput is made of, for pages, comparisons and jobs that still run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from perfscope.recording.metadata import RunMetadata

ONE_BATCH_PER_RANK: Final = frozenset({"single", "ddp", "fsdp", "zero1", "zero2", "zero3"})
"""Strategies in which every rank has samples of its own. Ranks of tensor and pipeline parallelism share theirs."""


def samples_per_batch(run: RunMetadata) -> float | None:
    """Samples of a batch of this rank: the mean of those that captures saw of the loader that the training draws from,
    else of the first; None where unknown.
    """
    if run.dataloaders and (seen := run.dataloaders[0]).seen_batches:
        return seen.seen_samples / seen.seen_batches
    return float(run.batch_shape[0]) if run.batch_shape else None


def positions_per_sample(runs: Collection[RunMetadata]) -> float | None:
    """Mean length of the samples of these ranks, whose batches begin with a tensor of two dimensions, (samples,
    positions): of the batches that captures saw, else of the first ones, where these are alike on all ranks; None where
    unknown.
    """
    seen = [run.dataloaders[0] for run in runs if run.dataloaders]
    samples = sum(loader.seen_samples for loader in seen if loader.seen_positions)
    if samples:
        return sum(loader.seen_positions for loader in seen) / samples
    lengths = {run.batch_shape[1] for run in runs if run.batch_shape is not None and len(run.batch_shape) == 2}
    return float(lengths.pop()) if len(lengths) == 1 else None


def samples_per_step(known: Collection[float], ranks: int | None, strategies: Collection[str]) -> float | None:
    """Samples of a step of so many ranks, of some of which they are known: the others are taken as their mean.

    None where ranks share samples, and where nothing is known.
    """
    if not known or not ranks or not set(strategies) <= ONE_BATCH_PER_RANK:
        return None
    return sum(known) / len(known) * ranks
