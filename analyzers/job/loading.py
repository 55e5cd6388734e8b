"""The data loader rows: time in ``__next__``, the part that blocked the step, and the time to load one batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.deliveries import deliveries
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.recording.metadata import RunMetadata
from perfscope.results.categories import TimeCategory
from perfscope.results.rows import DataLoaderRow
from perfscope.trace.trace import Int64

_IDLE: Final = 2.0
"""Times their own time for a batch between two of a worker's batches from which workers are not always busy: a thread
that waits for a core takes its batches late, though they are there."""

STARVED: Final = 0.05
"""Share of the step blocked on workers from which the workers are taken to be always busy."""


def dataloader_rows(result: AlignedJob, runs: Mapping[int, RunMetadata]) -> tuple[DataLoaderRow, ...]:
    """One row for each rank that took a batch in the used steps."""
    rows = []
    for rank, partial in sorted(result.partials.items()):
        if not result.batches_per_step[rank]:
            continue
        used = partial.steps.indices_of(result.steps)
        blocking_us = float(result.totals[rank][:, TimeCategory.DATALOADER].mean()) / 1e3
        sampler_us = float(partial.loading.sampled_ns[used].mean()) / 1e3
        # Those of the loader that the recorded steps took batches from; else by the iterator's name.
        loaders = runs[rank].dataloaders if rank in runs else ()
        workers = loaders[0].num_workers if loaders else 0 if partial.loading.single_process else None
        rows.append(
            DataLoaderRow(
                rank=rank,
                wait_us=float(partial.loading.waited_ns[used].mean()) / 1e3,
                blocking_us=blocking_us,
                batch_us=_batch_us(
                    partial,
                    used,
                    workers,
                    blocking_us - sampler_us >= STARVED * result.mean_step_ns(rank) / 1e3,
                    loaders[0].fetched_ns if loaders else None,
                    result.taking_at_most_ns[rank],
                    result.workers_in_turn,
                ),
                num_workers=workers,
                batches_per_step=result.batches_per_step[rank],
                sampler_us=sampler_us,
            )
        )
    return tuple(rows)


def _batch_us(
    partial: RankPartial,
    used: Int64,
    workers: int | None,
    blocked: bool,
    fetched_ns: float | None,
    taking_ns: float,
    in_turn: int | None,
) -> float | None:
    """Time to load one batch on one worker.

    Without workers the training process loads it, and ``__next__`` is that time, but for the sampler's. Workers that
    are always busy deliver one batch each in that time. Others do not show how fast they are, unless they were asked
    (``fetched_ns``).
    """
    batches = int(partial.loading.batches[used].sum())
    if workers == 0:
        return float((partial.loading.waited_ns - partial.loading.sampled_ns)[used].sum()) / batches / 1e3
    found = deliveries(partial, workers, fetched_ns, taking_ns, in_turn)
    if found.workers is None or not blocked:
        return None if fetched_ns is None else fetched_ns / 1e3
    steps, every_ns = partial.steps, found.batch_ns
    if every_ns is None:
        every_ns = float((steps.end_ns[used] - steps.start_ns[used]).sum()) / batches
    busy_ns = found.workers * every_ns
    if fetched_ns is not None and busy_ns > _IDLE * fetched_ns:
        return fetched_ns / 1e3
    return busy_ns / 1e3
