"""Recordings that a program starts itself, in real trainings."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools

from perfscope import analyze
from tests.collectors.harness import PERFSCOPE, SCRIPTS, Recording, needs_torch
from tests.waiting import PATIENCE_S

pytestmark = [needs_torch, pytest.mark.training]


def run(folder: Path, *command: str, **environment: str) -> Recording:
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return Recording(folder, done.returncode, done.stdout, done.stderr)


def truths(recording: Recording) -> list[dict[str, Any]]:
    lines = [line.partition("the truth: ")[2] for line in recording.out.splitlines() if "the truth: " in line]
    return sorted(map(json.loads, lines), key=lambda truth: int(truth["rank"]))


def torchrun(folder: Path, how: str) -> Recording:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return run(folder, *command, str(SCRIPTS / "from_code.py"), str(folder), how)


def test_two_ranks_record_from_code_as_often_as_they_like(tmp_path: Path) -> None:
    recording, plain = torchrun(tmp_path / "r", "record"), torchrun(tmp_path / "r", "plain")
    assert recording.exit_code == plain.exit_code == 1, recording.err  # torchrun's own for scripts that end with 7
    assert "exitcode: 7" in recording.err
    mine, theirs = truths(recording), truths(plain)
    assert [rank["losses"] for rank in mine] == [rank["losses"] for rank in theirs]
    folders = [str(tmp_path / name) for name in ("r", "r", "r-2", "r-3")]
    assert [rank["folders"] for rank in mine] == [folders, folders]
    assert not (tmp_path / "inner").exists()
    for rank in range(2):
        first = recording.run(rank)
        # 4 steps, 4 within the inner one, and 2 after it.
        assert (first.steps.seen, first.outcome, first.strategies, first.problems) == (10, "finished", ("ddp",), ())
        assert [(each.first_step, each.last_step) for each in first.captures] == [(2, 3)]
        assert len(first.dataloaders) == 1
        second = Recording(tmp_path / "r-2", 0, "", "").run(rank)
        assert (second.mode, second.steps.seen, second.captures) == ("steps", 6, ())
        third = Recording(tmp_path / "r-3", 0, "", "").run(rank)
        assert (third.outcome, third.steps.seen) == ("exception", 6)
        assert [(each.first_step, each.last_step) for each in third.captures] == [(2, 3)]
    # It ended before the program did.
    assert (recording.launch.exit_code, recording.launch.has_ended) == (None, True)
    told = re.search(r"recorded steps 2-3 in \S+ \(rank 0; each of the 2 ranks records its own\)", recording.messages)
    assert told is not None
    assert recording.messages.count("what is started within is the same recording") == 1
    summary = analyze(tmp_path / "r")
    assert (summary.job.ranks, summary.job.strategy) == ((0, 1), "ddp")
    # Late hooks see all of a step.
    names = set(recording.trace(1).ranges())
    assert {f"perfscope::{name}" for name in ("dataloader", "forward", "backward", "optimizer")} <= names
    assert any(name.startswith("perfscope::collective#all_reduce") for name in names)


@pytest.fixture
def hooked(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder for PYTHONPATH in which each Python runs the line of perfscope.pth at its start."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    line = runpy.run_path(str(root / "setup.py"))["LINE"]
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(line)
    return os.pathsep.join((str(tmp_path / "site"), str(root)))


def test_the_variable_records_a_program_as_it_is(tmp_path: Path, hooked: str) -> None:
    program = (sys.executable, str(SCRIPTS / "unchanged.py"))
    words = f"{tmp_path / 'r'} --wait 1 --warmup 1 --active 2"
    recording = run(tmp_path / "r", *program, PYTHONPATH=hooked, PERFSCOPE=words)
    assert recording.exit_code == 5
    assert recording.launch.exit_code is None  # what is given to sys.exit is not known
    assert (recording.run().steps.seen, recording.run().outcome) == (8, "finished")
    assert recording.trace().recorded_steps() == [2, 3]
    # A word that means nothing is said, and the training goes on.
    wrong = run(tmp_path / "w", *program, PYTHONPATH=hooked, PERFSCOPE="w --wiat 2")
    assert (wrong.exit_code, wrong.messages) == (
        5,
        "perfscope: nothing is recorded: PERFSCOPE: unrecognized arguments: --wiat 2",
    )
    assert run(tmp_path / "w", *program, PYTHONPATH=hooked, PERFSCOPE="0").messages == ""
    assert not (tmp_path / "w").exists()


def test_perfscope_run_is_the_one_recording(tmp_path: Path, hooked: str) -> None:
    program = (
        "import runpy, sys, perfscope\n"
        f"with perfscope.record({str(tmp_path / 'inner')!r}) as recording:\n"
        "    try:\n"
        f"        runpy.run_path({str(SCRIPTS / 'unchanged.py')!r})\n"
        "    finally:\n"
        "        print(recording.folder)\n"
    )
    options = ("--output", str(tmp_path / "r"), "--wait", "1", "--warmup", "1", "--active", "2")
    command = (
        *PERFSCOPE,
        "run",
        *options,
        "--",
        "env",
        f"PERFSCOPE={tmp_path / 'other'}",
        sys.executable,
        "-c",
        program,
    )
    recording = run(tmp_path / "r", *command, PYTHONPATH=hooked)
    assert recording.exit_code == 5, recording.err
    assert recording.out.strip() == str(tmp_path / "r")
    assert "perfscope run records this program" in recording.err
    assert recording.run().steps.seen == 8
    assert not (tmp_path / "inner").exists()
    assert not (tmp_path / "other").exists()
