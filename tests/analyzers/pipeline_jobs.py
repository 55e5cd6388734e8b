"""Pipelines of the generator, compared as the analysis compares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from perfscope.analyzers.analyze import read_ranks
from perfscope.analyzers.compared import Compared, compare_job
from perfscope.job import open_job
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


def compared(spec: JobSpec, folder: Path, ranks: Sequence[int] | None = None) -> tuple[Job, Compared]:
    """The job, and its recording (of ``ranks`` only, where given) as the analysis compares it."""
    job = simulate(spec)
    job.write(folder, ranks=ranks)
    opened, found = read_ranks(open_job(folder), workers=1)
    return job, compare_job(opened, found)
