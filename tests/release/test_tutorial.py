"""The tutorial of the documentation, run as its reader would."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.release.tutorial import run_tutorial
from tests.schemas import follows


@pytest.mark.frameworks  # .ci/package runs it with the wheel
@pytest.mark.training
def test_the_tutorial_finds_the_bottleneck_and_removes_it(tmp_path: Path, root: Path) -> None:
    pytest.importorskip("torch", reason="trains for real")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, module in (("perfscope", "perfscope"), ("torchrun", "torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    work = tmp_path / "work"
    work.mkdir()
    outputs = run_tutorial(work, environment)
    assert (work / "perfscope-recording" / "report.html").stat().st_size > 100_000
    assert (work / "comparison.html").is_file()
    assert any(command.startswith("perfscope check") for command in outputs)
    _check_metadata(work / "perfscope-recording")


def _check_metadata(recording: Path) -> None:
    """What a real recording holds in JSON follows its schemas."""
    follows("launch", json.loads((recording / "perfscope.json").read_text(encoding="utf-8")))
    for rank in (0, 1):
        follows("run", json.loads((recording / f"rank-0000{rank}.run.json").read_text(encoding="utf-8")))
    (samples,) = recording.glob("host-*.samples.jsonl")
    lines = [line for line in samples.read_text(encoding="utf-8").splitlines() if line]
    assert len(lines) > 3
    for line in lines:
        follows("samples", json.loads(line))
