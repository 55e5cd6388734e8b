"""What a reader is told of steps that no optimizer ended."""

from __future__ import annotations

from pathlib import Path

import pytest

import perfscope
from perfscope.recording.metadata import RunMetadata, StepsMetadata, save
from perfscope.recording.paths import run_file, trace_file
from tests.generator import cpu_job, simulate


@pytest.mark.parametrize(("source", "noted"), [("backward", True), ("gradients", True), ("optimizer", False)])
def test_steps_that_are_backward_passes_are_named_so(tmp_path: Path, source: str, *, noted: bool) -> None:
    simulate(cpu_job(ranks=2, steps=5)).write(tmp_path / "traces")
    for rank, trace in enumerate(sorted((tmp_path / "traces").iterdir())):
        trace.rename(trace_file(tmp_path, rank, 0, compressed=trace.suffix == ".gz"))
        steps = StepsMetadata(seen=20, detected_by=source)
        save(RunMetadata(rank=rank, world_size=2, steps=steps), run_file(tmp_path, rank))
    assert ("steps_by_backward" in {note.kind for note in perfscope.analyze(tmp_path).notes}) == noted
