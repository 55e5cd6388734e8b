"""A job that ended within a capture: the step that was cut is not among the recorded ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfscope.recording import metadata, paths
from perfscope.recording.metadata import CaptureMetadata, RunMetadata, StepsMetadata
from tests.analyzers.measured import measured
from tests.generator import JobSpec, simulate

TRACE = "rank-{rank:05d}.capture-0.trace.json"
SPEC = JobSpec(ranks=2, steps=5, first_step=10)


@pytest.mark.parametrize(("complete", "steps"), [(True, (10, 11, 12, 13, 14)), (False, (10, 11, 12))])
def test_steps_end_with_the_last_one_that_ended_on_every_rank(
    tmp_path: Path, complete: bool, steps: tuple[int, ...]
) -> None:
    simulate(SPEC).write(tmp_path, file_template=TRACE)
    for rank, last in ((0, 13), (1, 12)):
        file = paths.trace_file(tmp_path, rank, 0).name
        capture = CaptureMetadata(file=file, first_step=10, last_step=14 if complete else last, complete=complete)
        run = RunMetadata(rank=rank, world_size=2, captures=(capture,), steps=StepsMetadata(seen=15))
        metadata.save(run, paths.run_file(tmp_path, rank))
    assert measured(tmp_path).job.steps == steps
