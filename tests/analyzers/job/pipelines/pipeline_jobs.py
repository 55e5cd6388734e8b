"""Pipelines of the generator, aligned and replayed as the analysis does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfscope.analyzers.job.pipelines.table import ideal_bubble_share
from perfscope.analyzers.read_ranks import read_ranks
from perfscope.analyzers.replay.job_replay import JobReplay, replay_job
from perfscope.recording.job import open_job
from perfscope.recording.metadata import RunMetadata
from perfscope.results.tables import Pipeline, StageRow
from tests.analyzers.rules.jobs import STEP_US, breakdown, context
from tests.generator import Job, JobSpec, ModelSpec, PipelineSpec, simulate

MODEL = ModelSpec(layers=8, tokens=2048)

INTERLEAVED = PipelineSpec(schedule="interleaved", chunks=2, coalesced=True)
GPIPE = PipelineSpec(schedule="gpipe")
COALESCED = PipelineSpec(coalesced=True)


def pipeline(**changes: object) -> JobSpec:
    """Four stages and eight micro-batches on four ranks of one host; ``changes`` replace fields of JobSpec."""
    spec = JobSpec(ranks=4, strategy="pipeline", pipeline=4, microbatches=8, steps=3, warmup=2, model=MODEL)
    return replace(spec, **changes)  # type: ignore[arg-type]


def silent(schedule: PipelineSpec) -> PipelineSpec:
    """The same, in whose traces sends do not name their receivers."""
    return replace(schedule, peers=False)


def compared(spec: JobSpec, folder: Path, ranks: Sequence[int] | None = None) -> tuple[Job, JobReplay]:
    """The job, and its recording (of ``ranks`` only, where given) aligned and replayed."""
    job = simulate(spec)
    job.write(folder, ranks=ranks)
    opened, found = read_ranks(open_job(folder), workers=1)
    return job, replay_job(opened, found)


def stage(
    number: int, *, busy: float = 70_000.0, flops: float | None = 1e12, kernels: float | None = 100.0
) -> StageRow:
    return StageRow(
        stage=number, ranks=(number,), busy_us=busy, bubble_start_us=0.0, bubble_steady_us=STEP_US - busy,
        bubble_drain_us=0.0, forward_us=None, backward_us=None, flops_per_step=flops, kernels_per_step=kernels,
    )  # fmt: skip


def made(rows: Sequence[StageRow], **changes: Any) -> Pipeline:
    """A pipeline of these stages, all waiting 30% of the step; ``changes`` replaces fields."""
    known = Pipeline(
        stages=tuple(rows), microbatches=8, virtual_stages=1, schedule="1f1b", bubble_share=0.3,
        ideal_bubble_share=ideal_bubble_share(len(rows), 8, 1), imbalance=1.0, degree=len(rows),
    )  # fmt: skip
    return replace(known, **changes)


FOUR = [stage(number) for number in range(4)]


def waiting(
    known: Pipeline, settings: Mapping[str, dict[str, Any]] | None = None, share: float = 0.3,
    more: Mapping[str, float] | None = None, **fields: object,
) -> Any:  # fmt: skip
    """Four ranks of such a pipeline, as rules see them, that wait for this share of the step; ``more`` is what else
    their time goes to, µs by category.
    """
    runs = {0: RunMetadata(rank=0, settings=dict(settings))} if settings else {}
    ranks = [breakdown(rank, exposed_comm_wait=share * STEP_US, **(more or {})) for rank in range(4)]
    return context(*ranks, pipeline=known, runs=runs, strategy="pipeline", **fields)
