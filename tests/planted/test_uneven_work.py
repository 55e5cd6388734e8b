"""Work that differs between ranks or stages, recorded without shapes: against the same job with it spread evenly."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.results.summary import Summary
from tests.analyzers.measured import advised
from tests.generator import ExtraLayers, Job, JobSpec, ModelSpec, SlowCompute, simulate, step_time_ns
from tests.planted.jobs import data_parallel, pipeline

pytestmark = pytest.mark.scale

DDP = replace(data_parallel(8, "ddp"), ranks_per_host=8, steps=8)
STAGES = replace(pipeline(8), ranks_per_host=8, model=ModelSpec(layers=8, tokens=2048))


def without_shapes(spec: JobSpec, folder: Path) -> tuple[Job, Summary]:
    """The job, analyzed from traces of which the operators' shapes were taken out."""
    job = simulate(spec)
    job.write(folder)
    for path in folder.glob("*.json.gz"):
        document = json.loads(gzip.decompress(path.read_bytes()))
        for event in document["traceEvents"]:
            for name in ("Input Dims", "Input type", "Concrete Inputs"):
                event.get("args", {}).pop(name, None)
        path.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    summary = advised(folder)
    assert summary.utilisation.mfu is None
    return job, summary


@pytest.mark.parametrize("seed", [5, 6])
def test_ranks_whose_work_varies_cost_what_an_even_spread_saves(seed: int, tmp_path: Path) -> None:
    """Most of eight ranks are over 2 % above the median in every step, and the slowest is another one in each."""
    rng = random.Random(seed)
    work = {(rank, step): 1 + 0.8 * rng.random() ** 2 for rank in range(8) for step in DDP.recorded_steps}
    uneven = tuple(SlowCompute(ranks=(rank,), steps=(step,), factor=by) for (rank, step), by in work.items())
    even = tuple(
        SlowCompute(steps=(step,), factor=sum(work[rank, step] for rank in range(8)) / 8) for step in DDP.recorded_steps
    )
    job, summary = without_shapes(replace(DDP, causes=uneven), tmp_path)
    cost = (job.truth.step_time_ns - step_time_ns(replace(DDP, causes=even))) / 1e3
    assert cost > 0.15 * summary.job.step_time_us
    (row,) = summary.stragglers
    assert (row.scope, row.ranks, row.cause, row.pattern) == ("job", tuple(range(8)), "compute", "rotating")
    assert row.lost_us == pytest.approx(cost, rel=0.05)
    assert summary.findings[0].rule == "uneven-work"  # forward and backward vary together
    assert not summary.verdict.healthy


def test_noise_is_not_work_that_varies(tmp_path: Path) -> None:
    _, summary = without_shapes(replace(DDP, noise=0.05), tmp_path)
    assert not summary.stragglers
    assert summary.verdict.healthy


def test_a_stage_that_takes_longer_for_the_same_kernels_is_named_without_shapes(tmp_path: Path) -> None:
    slow = SlowCompute(ranks=STAGES.ranks_of_stage(2), factor=1.6)
    job, summary = without_shapes(replace(STAGES, causes=(slow,)), tmp_path)
    (row,) = summary.stragglers
    assert (row.scope, row.ranks, row.cause) == ("stage", STAGES.ranks_of_stage(2), "compute")
    assert row.lost_us == pytest.approx(job.lost_ns(slow) / 1e3, rel=0.1)
    assert not summary.verdict.healthy


def test_a_stage_with_more_kernels_is_not_slow(tmp_path: Path) -> None:
    _, summary = without_shapes(replace(STAGES, causes=(ExtraLayers(stages=(2,), layers=1),)), tmp_path)
    assert not summary.stragglers
    assert not summary.verdict.healthy
