"""What a reader is told of steps that no optimizer ended, and of a lone one."""

from __future__ import annotations

from pathlib import Path

import pytest

import perfscope
from perfscope.recording.metadata import StepsMetadata
from tests.analyzers.job.recordings import record_on_cpus
from tests.analyzers.measured import measured
from tests.emulator.emulate import emulate
from tests.emulator.spec import MS, Job, Loader, Model, Recording


@pytest.mark.parametrize(("source", "noted"), [("backward", True), ("gradients", True), ("optimizer", False)])
def test_steps_that_are_backward_passes_are_named_so(tmp_path: Path, source: str, *, noted: bool) -> None:
    record_on_cpus(tmp_path, steps=StepsMetadata(seen=20, detected_by=source))
    assert ("steps_by_backward" in {note.kind for note in perfscope.analyze(tmp_path).notes}) == noted


@pytest.mark.parametrize(
    ("load_ms", "steps", "noted"), [(80, 1, True), (1, 1, False), (80, 4, False)], ids=["slow", "quick", "several"]
)
def test_a_wait_that_a_lone_step_counts_as_hidden_is_told(
    load_ms: int, steps: int, tmp_path: Path, *, noted: bool
) -> None:
    """Two workers deliver a batch every 40 ms to a step of 18; the device is still busy when its host is done."""
    loader = Loader(workers=2, load_ns=load_ms * MS, jitter=0.0)
    job = Job(
        ranks=1, ranks_per_host=1, noise=0.0, model=Model(blocks=2, tokens=4096, width=2048), loader=loader,
        recording=Recording(steps=steps, first=22),
    )  # fmt: skip
    emulate(job).write(tmp_path)
    told = {note.kind: note.text for note in measured(tmp_path).notes}
    assert ("lone_step_waits" in told) == noted
    if noted:
        assert "the host of rank 0 waited for a batch" in told["lone_step_waits"]
