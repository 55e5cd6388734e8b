"""The command as a process: it ends at once when it is done, and loses nothing of what Python does at an end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SETUP = """
import atexit, sys, threading, time
from perfscope.cli.main import start
"""


def ran(setup: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, after ``setup``."""
    code = f"{SETUP}{setup}\nsys.argv[1:] = {list(arguments)}\nstart()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_its_output_is_whole_where_nobody_waits_for_more() -> None:
    ended = ran("", "schema", "summary")
    assert ended.returncode == 0
    assert ended.stdout.rstrip().endswith("}")
    assert len(ended.stdout) > 10_000


def test_its_status_says_what_went_wrong(tmp_path: Path) -> None:
    assert ran("", "no-such-verb").returncode == 2
    missing = ran("", "analyze", str(tmp_path / "missing"))
    assert missing.returncode == 2
    assert "missing" in missing.stderr


def test_what_was_registered_for_the_end_is_called() -> None:
    ended = ran("atexit.register(print, 'the end')", "--version")
    assert ended.stdout.splitlines()[-1] == "the end"


def test_another_thread_may_finish() -> None:
    ended = ran("threading.Thread(target=lambda: (time.sleep(0.2), print('finished'))).start()", "--version")
    assert ended.stdout.splitlines()[-1] == "finished"
    assert ended.returncode == 0


def test_output_that_nobody_reads_is_reported_as_python_does() -> None:
    ended = ran("import os\nreading, writing = os.pipe()\nos.close(reading)\nos.dup2(writing, 1)", "--version")
    assert "BrokenPipeError" in ended.stderr or ended.returncode != 0
