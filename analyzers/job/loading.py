"""The data loader rows: time in ``__next__``, the part that blocked the step, and the time to load one batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.recording.metadata import RunMetadata
from perfscope.results.categories import TimeCategory
from perfscope.results.rows import DataLoaderRow
from perfscope.trace.trace import Int64

STARVED: Final = 0.05
"""Share of the step blocked on workers from which the workers are taken to be always busy."""


def dataloader_rows(result: AlignedJob, runs: Mapping[int, RunMetadata]) -> tuple[DataLoaderRow, ...]:
    """One row for each rank that took a batch in the used steps."""
    rows = []
    for rank, partial in sorted(result.partials.items()):
        used = partial.steps.indices_of(result.steps)
        batches = int(partial.loading.batches[used].sum())
        if batches == 0:
            continue
        blocking_us = float(result.totals[rank][:, TimeCategory.DATALOADER].mean()) / 1e3
        # Those of the loader that the recorded steps took batches from; else by the iterator's name.
        loaders = runs[rank].dataloaders if rank in runs else ()
        workers = loaders[0].num_workers if loaders else 0 if partial.loading.single_process else None
        rows.append(
            DataLoaderRow(
                rank=rank,
                wait_us=float(partial.loading.waited_ns[used].mean()) / 1e3,
                blocking_us=blocking_us,
                batch_us=_batch_us(partial, used, batches, workers, blocking_us, result.mean_step_ns(rank) / 1e3),
                num_workers=workers,
                batches_per_step=batches / len(used),
            )
        )
    return tuple(rows)


def _batch_us(
    partial: RankPartial, used: Int64, batches: int, workers: int | None, blocking_us: float, step_us: float
) -> float | None:
    """Time to load one batch on one worker.

    Without workers the training process loads it, and ``__next__`` is that time. Workers that the step waits for are
    always busy: together they finish the batches of a step in a step, so that one takes workers x step / batches.
    Workers that are fast enough do not show how fast they are.
    """
    if workers == 0:
        return float(partial.loading.waited_ns[used].sum()) / batches / 1e3
    if workers is not None and blocking_us >= STARVED * step_us:
        return workers * step_us * len(used) / batches
    return None
