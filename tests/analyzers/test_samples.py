"""Samples of a step: of ranks whose batches differ, and of batches that differ from step to step."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.compare.metrics import samples_per_second
from perfscope.analyzers.samples import positions_per_sample, samples_per_batch, samples_per_step
from perfscope.recording.metadata import DataLoaderMetadata, RunMetadata, save
from perfscope.recording.paths import run_file, trace_file
from perfscope.results.summary import Summary
from tests.analyzers.measured import measured
from tests.generator import MS, JobSpec, LoaderSpec, simulate


def analyzed(folder: Path, runs: dict[int, dict[str, Any]], microbatches: int = 1) -> Summary:
    """Two simulated ranks that draw a batch for each micro-batch, with this metadata."""
    loader = LoaderSpec(workers=1, load_ns=5 * MS)
    job = simulate(JobSpec(ranks=2, steps=5, microbatches=microbatches, loader=loader, end_sync=True))
    for rank, trace in enumerate(job.write(folder / "traces")):
        trace.rename(trace_file(folder, rank, 0))
        if rank in runs:
            save(RunMetadata(rank=rank, world_size=2, **{"strategies": ("ddp",), **runs[rank]}), run_file(folder, rank))
    (folder / "traces").rmdir()
    return measured(folder)


def test_ranks_have_batches_of_their_own(tmp_path: Path) -> None:
    summary = analyzed(tmp_path, {0: {"batch_shape": (16, 8)}, 1: {"batch_shape": (32, 8)}})
    assert summary.job.samples_per_step == 48
    assert summary.job.samples_per_rank == 24
    assert samples_per_second(summary) == pytest.approx(48e6 / summary.job.step_us)


def test_accumulated_batches_count(tmp_path: Path) -> None:
    summary = analyzed(tmp_path, {0: {"batch_shape": (4,)}, 1: {"batch_shape": (4,)}}, microbatches=3)
    assert summary.job.samples_per_step == pytest.approx(2 * 3 * 4)


def test_steps_on_batches_that_the_loop_kept_have_no_known_samples(tmp_path: Path) -> None:
    # itertools.cycle(loader): after the epoch its own copies of the batches come again, and nothing draws any.
    run = {"batch_shape": (16, 8)}
    assert analyzed(tmp_path, {0: run, 1: run}).job.samples_per_step == 32
    for rank in (0, 1):
        path = trace_file(tmp_path, rank, 0)
        trace = json.loads(gzip.decompress(path.read_bytes()))
        drawn = [event for event in trace["traceEvents"] if event["name"].startswith("enumerate(DataLoader)")]
        trace["traceEvents"] = [event for event in trace["traceEvents"] if event not in drawn[2:]]
        path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    summary = measured(tmp_path)
    assert summary.job.batches_per_step is not None
    assert summary.job.batches_per_step < 1
    assert summary.job.samples_per_step is None
    assert samples_per_second(summary) is None


def test_a_rank_without_metadata_is_as_the_others(tmp_path: Path) -> None:
    assert analyzed(tmp_path, {1: {"batch_shape": (5, 8)}}).job.samples_per_step == 10


def test_ranks_that_share_samples_have_none_of_their_own(tmp_path: Path) -> None:
    run = {"batch_shape": (16, 8), "strategies": ("ddp", "tensor")}
    summary = analyzed(tmp_path, {0: run, 1: run})
    assert summary.job.samples_per_step is None
    assert samples_per_second(summary) is None
    assert samples_per_step([4.0], 8, ("pipeline",)) is None
    assert samples_per_step([], 8, ("ddp",)) is None


def test_batches_that_captures_saw_count_more_than_the_first() -> None:
    used = DataLoaderMetadata(batches=9, seen_batches=4, seen_samples=50)
    evaluation = DataLoaderMetadata(batches=30, seen_batches=30, seen_samples=3000)  # beside the training: longer
    assert samples_per_batch(RunMetadata(batch_shape=(40, 8), dataloaders=(used, evaluation))) == 12.5
    assert samples_per_batch(RunMetadata(batch_shape=(40, 8), dataloaders=(DataLoaderMetadata(batches=9),))) == 40
    assert samples_per_batch(RunMetadata()) is None


def test_lengths_of_samples_are_those_of_all_ranks() -> None:
    def run(samples: int, positions: int) -> RunMetadata:
        loader = DataLoaderMetadata(seen_batches=2, seen_samples=samples, seen_positions=positions)
        return RunMetadata(batch_shape=(8, 58), dataloaders=(loader,))

    assert positions_per_sample([run(16, 16 * 60), run(16, 16 * 180)]) == 120
    assert positions_per_sample([RunMetadata(batch_shape=(8, 58)), RunMetadata(batch_shape=(4, 58))]) == 58
    assert positions_per_sample([RunMetadata(batch_shape=(8, 58)), RunMetadata(batch_shape=(8, 60))]) is None
    assert positions_per_sample([RunMetadata(batch_shape=(8, 3, 224, 224)), RunMetadata()]) is None


def test_a_job_whose_ranks_are_not_known_has_no_samples_of_a_rank(tmp_path: Path) -> None:
    job = analyzed(tmp_path, {0: {"batch_shape": (16, 8)}}).job
    assert replace(job, samples_per_step=None, world_size=None, ranks=()).samples_per_rank is None
    assert replace(job, world_size=None, ranks=()).samples_per_rank is None
