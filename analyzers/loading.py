"""The data loader rows: time in ``__next__``, the part that blocked, and what one batch costs to load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.rank import RankPartial
from perfscope.analyzers.timeline import Row
from perfscope.metadata import RunMetadata
from perfscope.summary import DataLoaderRow
from perfscope.trace import Int64

STARVED: Final = 0.05
"""Share of the step blocked on workers from which they are taken to be working without pause."""


def dataloader_rows(result: Comparison, runs: Mapping[int, RunMetadata]) -> tuple[DataLoaderRow, ...]:
    """One row for each rank that drew a batch in the used steps."""
    rows = []
    for rank, partial in sorted(result.partials.items()):
        used = partial.steps.indices_of(result.steps)
        batches = int(partial.loading.batches[used].sum())
        if batches == 0:
            continue
        blocking_us = float(result.totals[rank][:, Row.DATALOADER].mean()) / 1e3
        workers = _workers(partial, runs.get(rank))
        rows.append(
            DataLoaderRow(
                rank=rank,
                wait_us=float(partial.loading.waited_ns[used].mean()) / 1e3,
                blocking_us=blocking_us,
                batch_us=_batch_us(partial, used, batches, workers, blocking_us, result.mean_step_ns(rank) / 1e3),
                num_workers=workers,
            )
        )
    return tuple(rows)


def _workers(partial: RankPartial, run: RunMetadata | None) -> int | None:
    """Workers of the loader that the recorded steps drew from; from the iterator's name where nothing else tells."""
    if run is not None and run.dataloaders:
        return run.dataloaders[0].num_workers
    return 0 if partial.loading.single_process else None


def _batch_us(
    partial: RankPartial, used: Int64, batches: int, workers: int | None, blocking_us: float, step_us: float
) -> float | None:
    """Time to load one batch on one worker.

    Without workers the training process loads it itself, and ``__next__`` is that time. Workers that the step waits for
    work without pause: together they finish the batches of a step in a step, so one takes workers x step / batches.
    Workers that keep up say nothing of their speed.
    """
    if workers == 0:
        return float(partial.loading.waited_ns[used].sum()) / batches / 1e3
    if workers is not None and blocking_us >= STARVED * step_us:
        return workers * step_us * len(used) / batches
    return None
