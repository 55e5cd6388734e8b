"""With which code a process ends, as it knows it itself at its end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from perfscope.collectors.ending import at_end_of_thread
from tests.waiting import PATIENCE_S

BEGIN = """
import multiprocessing, sys
from perfscope.collectors.ending import at_end, exit_code, program_frame

def ask_at_end():
    program = program_frame()
    at_end(lambda: print('known:', exit_code(program), flush=True))
"""
FORKING = """
def target():
    ask_at_end()
    {end}

process = multiprocessing.get_context("fork").Process(target=target)
process.start()
process.join()
print("code:", process.exitcode)
"""


def ended(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(BEGIN + program)
    return subprocess.run(
        [sys.executable, *(options or ["program.py"])], cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S,
        check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("end", "known"),
    [
        pytest.param("pass", "0", id="its last line"),
        pytest.param("for _ in range(2):\n    pass", "0", id="a loop's end"),
        pytest.param("sys.exit(3)", "None", id="sys.exit"),
        pytest.param("sys.exit()", "None", id="sys.exit without a code"),
        pytest.param("def main():\n    raise SystemExit(4)\nmain()", "None", id="SystemExit in a function"),
        pytest.param("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass", "0", id="a sys.exit that is caught"),
        pytest.param("raise ValueError", "1", id="an exception"),
        pytest.param("raise KeyboardInterrupt", "None", id="an interrupt"),
    ],
)
def test_a_program_knows_its_exit_code_or_none(end: str, known: str, tmp_path: Path) -> None:
    for options in ((), ("-m", "program")):
        done = ended(tmp_path, f"ask_at_end()\n{end}\n", *options)
        assert done.stdout == f"known: {known}\n", done.stderr
        assert known in (str(done.returncode), "None")


@pytest.mark.parametrize(("end", "code"), [("pass", "0"), ("sys.exit(3)", "3"), ("raise ValueError", "1")])
def test_a_process_of_multiprocessing_knows_its_exit_code(end: str, code: str, tmp_path: Path) -> None:
    done = ended(tmp_path, FORKING.format(end=end))
    assert done.stdout.split() == ["known:", code, "code:", code], done.stderr


def test_the_end_of_a_thread_calls_once_and_in_its_process_alone() -> None:
    called: list[int] = []
    goes_on, begun = threading.Event(), threading.Event()

    def work() -> None:
        held.append(at_end_of_thread(lambda: called.append(os.getpid())))
        begun.set()
        goes_on.wait(PATIENCE_S)

    held: list[object] = []
    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(PATIENCE_S)
    if not (child := os.fork()):
        os._exit(len(called))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert called == []
    goes_on.set()
    thread.join(PATIENCE_S)
    held.clear()
    assert called == [os.getpid()]
