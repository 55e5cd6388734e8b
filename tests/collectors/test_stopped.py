"""Processes of a job that are stopped for a while and go on, as by Ctrl-Z or a scheduler that suspends a job."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.history.rank_history import read
from perfscope.recording.metadata import load_run
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


def test_a_training_on_a_thread_of_its_own_is_written_when_that_ends(tmp_path: Path) -> None:
    """As in Ray Train, which then ends its workers without their exit handlers."""
    folder = tmp_path / "r"
    command = (sys.executable, str(SCRIPTS / "on_a_thread.py"), "30", str(Running.stop_file(folder)))

    def written() -> tuple[int, int]:
        runs = [load_run(file) for file in folder.glob("*.run.json")]
        files = [file for file in folder.glob("*.steps.bin") if file.stat().st_size]
        return max((run.steps.seen for run in runs), default=0), max((read(f).number[-1] for f in files), default=0)

    with Running(folder, *command, options=("--wait", "1", "--warmup", "1", "--active", "2")) as training:
        training.until(lambda: written() == (30, 29), "all steps are written")
        recording = training.stop()
    assert (recording.exit_code, recording.run().problems) == (0, ()), recording.err
    assert [(each.first_step, each.last_step) for each in recording.run().captures] == [(2, 3)]
