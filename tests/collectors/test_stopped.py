"""Processes of a job that are stopped for a while and go on, as by Ctrl-Z or a scheduler that suspends a job."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.history.rank_history import read
from perfscope.recording.paths import steps_file
from tests.collectors.harness import SCRIPTS, Running, needs_torch

pytestmark = [pytest.mark.training, needs_torch]

STOPPED_S = 1.5


def find(training: Running, what: str) -> psutil.Process:
    """``perfscope run``, the rank that it runs, or the rank's sampler."""
    own = psutil.Process(training.process.pid)
    if what == "perfscope":
        return own
    each = {
        "sampler" if any('"period_s"' in word for word in child.cmdline()) else "rank": child
        for child in own.children(recursive=True)
    }
    return each[what]


@pytest.mark.parametrize("what", ["rank", "perfscope", "sampler"])
def test_a_process_that_is_stopped_for_a_while_costs_that_time_alone(tmp_path: Path, what: str) -> None:
    file = steps_file(tmp_path / "r", 0)

    def last() -> int:
        return int(read(file).number[-1]) if file.exists() and file.stat().st_size else 0

    command = (
        sys.executable,
        str(SCRIPTS / "paced.py"),
        "--ms",
        "20",
        "--until",
        str(Running.stop_file(tmp_path / "r")),
    )
    with Running(tmp_path / "r", *command, options=("--steps-only", "--sample-every", "0.1")) as training:
        training.until(lambda: last() > 3, "steps are in the history")
        process = find(training, what)
        process.suspend()
        time.sleep(STOPPED_S)
        process.resume()
        seen = last()
        training.until(lambda: last() > seen + 3, "the training goes on")
        recording = training.stop()
    assert recording.exit_code == 0, recording.err
    steps = read(file)
    assert steps.number.tolist() == list(range(1, len(steps.number) + 1))
    assert steps.step_us.max() > 1e6 * STOPPED_S or what != "rank"
    assert analyze(recording.folder).history is not None
