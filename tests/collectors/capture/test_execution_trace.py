"""``perfscope run --with execution-trace``: PyTorch's execution trace of the recorded steps, beside the trace."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from perfscope.analyzers.analyze import analyze
from perfscope.recording.job import open_job
from tests.collectors.harness import SCRIPTS, needs_torch, record

pytestmark = [pytest.mark.training, needs_torch]


def test_it_holds_the_recorded_steps_and_gives_the_trace_its_shapes(tmp_path: Path) -> None:
    options = (
        "--no-sampler",
        "--no-shapes",
        "--wait",
        "2",
        "--warmup",
        "1",
        "--active",
        "3",
        "--with",
        "execution-trace",
    )
    recording = record(tmp_path / "r", sys.executable, str(SCRIPTS / "paced.py"), "--ms", "5", options=options)
    assert recording.exit_code == 0, recording.err
    assert recording.run().problems == ()
    (source,) = open_job(recording.folder).sources
    assert source.execution == recording.folder / "rank-00000.capture-0.et.json.gz"
    assert not list(recording.folder.glob("*.partial"))
    document = json.loads(gzip.decompress(source.execution.read_bytes()))
    steps = sum(node["name"].startswith("Optimizer.step") for node in document["nodes"])
    assert steps == 4  # the last one of the warm-up, and the recorded ones
    summary = analyze(recording.folder, workers=1)
    assert summary.job.failures == ()
    assert (summary.utilisation.model_flops_per_step or 0) > 0
