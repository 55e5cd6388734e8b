"""``perfscope watch`` in a real terminal: a job that has not begun, trains, loses a rank and ends; keys and sizes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pexpect", reason="pexpect is not installed")
pytest.importorskip("pyte", reason="pyte is not installed")

from perfscope.recording.metadata import load_run
from perfscope.recording.paths import run_file
from tests.analyzers.live.live_jobs import Recorded
from tests.cli.watched import watching
from tests.collectors.harness import PERFSCOPE, SCRIPTS, kill_all, needs_torch
from tests.waiting import PATIENCE_S

LEFT = b"\x1b[?7h\x1b[?25h\x1b[?1049l"
"""Wrapping, the cursor and the former screen are back."""


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    """A job of 40 ranks that may still run, for all that its files say."""
    job = Recorded(tmp_path / "recording", world=40)
    job.launch()
    job.ranks()
    job.all_step(0, 100, slow={17: {"dataloader": 12.0, "backward": 10.0}})
    return job


def test_keys_and_sizes(recorded: Recorded) -> None:
    with watching(recorded.folder, lines=24) as terminal:
        terminal.until("rank 17: 10.0 ms per step later than its peers (25%), in loading, latest in 100% of steps")
        terminal.until(lambda text: re.search(r"^ +17 ", text, re.MULTILINE) is not None)
        terminal.press("r")
        terminal.until("of 40 by rank")
        terminal.press("\x1b[6~\x1b[6~\x1b[6~")
        terminal.until("to 40 of 40 by rank")
        terminal.press("h")
        terminal.until("Page Down")
        terminal.press("x5")
        terminal.until("every 5 s")
        terminal.press(" ")
        terminal.until("paused at")
        terminal.press(" ")
        terminal.resize(60, 11)
        terminal.until(lambda text: "h: help" in text.split("\n")[0] and "of 40 by rank" in text.split("\n")[-1])
        terminal.resize(120, 40)
        terminal.until(lambda text: "recording" in text.split("\n")[0] and "of 40 by rank" in text.split("\n")[-1])
        terminal.press("q")
        assert terminal.ended() == 0
        assert terminal.received.endswith(LEFT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_the_terminal_as_it_was(recorded: Recorded, number: signal.Signals) -> None:
    with watching(recorded.folder) as terminal:
        terminal.until("rank 17")
        os.kill(terminal.child.pid, number)
        assert terminal.ended() == (0 if number == signal.SIGINT else 128 + number)
        assert terminal.received.endswith(LEFT)


def test_a_dumb_terminal_gets_lines(recorded: Recorded) -> None:
    with watching(recorded.folder, "--once", term="dumb") as terminal:
        assert terminal.ended() == 0
        assert b"\x1b" not in terminal.received
        assert b"rank 17 10.0 ms later in loading" in terminal.received


@needs_torch
@pytest.mark.training
def test_a_job_is_watched_from_before_it_begins_until_a_rank_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(SCRIPTS / "paced.py")]
    command += ["--ms", "20", "--load-ms", "20", "--slow-rank", "1", "--until", str(tmp_path / "stop")]
    with watching(folder, "--interval", "1", columns=120) as terminal:
        terminal.until("the folder does not exist yet")
        job = subprocess.Popen(
            [*PERFSCOPE, "run", "--steps-only", "--output", str(folder), "--", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            terminal.until("no rank has written a step yet")
            # All at once: on a busy machine a rank may be silent for a moment.
            shown = (r"straggler +rank 1: .* in loading", r"^running$", "2 stepping", "samples/s")
            terminal.until(lambda text: all(re.search(each, text, re.MULTILINE) for each in shown))
            terminal.until(lambda text: "CPU" in text and "cores" in text)
            os.kill(load_run(run_file(folder, 1)).pid, signal.SIGKILL)
            # The launcher ends the other rank at once: both may be gone by the next look.
            terminal.until(
                lambda text: re.search(r"ranks? (0, )?1 (is|are) gone \(killed, or crashed\)", text) is not None
            )
            terminal.until("the job has ended: exit code 1")
            assert job.wait(PATIENCE_S) == 1
        finally:
            kill_all(job)
            job.wait()
        terminal.press("q")
        assert terminal.ended() == 0
