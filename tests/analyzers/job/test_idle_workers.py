"""Loader workers that say themselves how long they take for a batch: are they busy all the time?"""

from __future__ import annotations

from pathlib import Path

import pytest

import perfscope
from perfscope.recording.metadata import DataLoaderMetadata, RunMetadata, save
from perfscope.recording.paths import run_file, trace_file
from tests.generator import MS, JobSpec, LoaderSpec, simulate


@pytest.mark.parametrize(
    ("fetch_ms", "batch_ms"),
    [
        (58, 60),  # they are: what they deliver is their pace
        (1, 1),  # batches lie there, and something else makes the training thread take them late
    ],
)
def test_the_time_of_a_batch(tmp_path: Path, fetch_ms: int, batch_ms: float) -> None:
    job = simulate(JobSpec(ranks=2, steps=5, loader=LoaderSpec(workers=1, load_ns=60 * MS), end_sync=True))
    loader = DataLoaderMetadata(num_workers=1, seen_batches=5, fetched_batches=10, fetch_ns=10 * fetch_ms * MS)
    for rank, trace in enumerate(job.write(tmp_path / "traces")):
        trace.rename(trace_file(tmp_path, rank, 0))
        save(RunMetadata(rank=rank, world_size=2, strategies=("ddp",), dataloaders=(loader,)), run_file(tmp_path, rank))
    (tmp_path / "traces").rmdir()
    rows = perfscope.analyze(tmp_path).dataloader
    assert [row.batch_us for row in rows] == pytest.approx([1e3 * batch_ms] * 2, rel=0.05)
