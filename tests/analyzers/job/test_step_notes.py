"""What a reader is told of steps that no optimizer ended."""

from __future__ import annotations

from pathlib import Path

import pytest

import perfscope
from perfscope.recording.metadata import StepsMetadata
from tests.analyzers.job.recordings import record_on_cpus


@pytest.mark.parametrize(("source", "noted"), [("backward", True), ("gradients", True), ("optimizer", False)])
def test_steps_that_are_backward_passes_are_named_so(tmp_path: Path, source: str, *, noted: bool) -> None:
    record_on_cpus(tmp_path, steps=StepsMetadata(seen=20, detected_by=source))
    assert ("steps_by_backward" in {note.kind for note in perfscope.analyze(tmp_path).notes}) == noted
