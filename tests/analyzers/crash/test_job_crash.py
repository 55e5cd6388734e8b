"""Which rank of a failed job is the cause, from what ranks and their launcher wrote; a job that stood still is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.analyze import analyze
from perfscope.analyzers.crash.job_crash import job_crash
from perfscope.analyzers.crash.words import verdict
from perfscope.recording.dumps import StuckFiles
from perfscope.recording.history import Block, pack
from perfscope.recording.job import Job
from perfscope.recording.metadata import CallMetadata, ErrorMetadata, LaunchMetadata, RunMetadata, StepsMetadata, save
from perfscope.recording.paths import LAUNCH_FILE, run_file, stacks_file, steps_file
from perfscope.results.ending.crash import Crash

LOOP = CallMetadata(file="/home/me/train.py", line=20, function="main")
BACKWARD = CallMetadata(file="/usr/lib/python3/site-packages/torch/autograd/graph.py", line=9, function="_run_backward")
OWN = ErrorMetadata(type="ValueError", message="loss is not a number\nat step 30", calls=(LOOP,))
CLOSED = ErrorMetadata(
    type="RuntimeError", message="[third_party/gloo/gloo/pair.cc:553] Connection closed by peer", calls=(BACKWARD, LOOP)
)
TIMEOUT = ErrorMetadata(type="RuntimeError", message="[gloo/pair.cc:70] Timed out waiting 1800000ms", calls=(BACKWARD,))


def raised(error: ErrorMetadata, at: str = "2026-11-28T03:35:22.100+00:00") -> dict[str, Any]:
    return {"outcome": "exception", "error": error, "ended_at": at}


def crash_of(
    *ends: dict[str, Any], exit_code: int | None = 1, ended: bool = False, stuck: Sequence[int] = ()
) -> Crash | None:
    """Of ranks that ended so, after 31 steps; those of ``stuck`` had written that they stood still."""
    steps = StepsMetadata(seen=31)
    runs = {
        rank: RunMetadata(**{"rank": rank, "world_size": len(ends), "backend": "gloo", "steps": steps, **end})
        for rank, end in enumerate(ends)
    }
    files = StuckFiles(stacks={rank: Path(f"rank{rank}.stack") for rank in stuck})
    launch = LaunchMetadata(exit_code=exit_code, ended=ended)
    return job_crash(Job(Path("recording"), (), runs=runs, launch=launch, stuck=files), None)


def headline(crash: Crash | None) -> str:
    assert crash is not None
    return verdict(crash).headline


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        pytest.param(
            [raised(CLOSED, "2026-11-28T03:35:22.000+00:00"), raised(OWN)],
            "rank 1 raised ValueError: loss is not a number (in main, train.py:20), after 31 steps; rank 0 failed in "
            "consequence",
            id="an exception, and a peer that writes first that its connection is closed",
        ),
        pytest.param(
            [raised(OWN), raised(OWN), raised(CLOSED)],
            "ranks 0, 1 raised ValueError: loss is not a number (in main, train.py:20), after 31 steps; rank 2 failed "
            "in consequence",
            id="two ranks with the same exception",
        ),
        pytest.param(
            [raised(replace(OWN, type="KeyError"), "2026-11-28T03:35:22.900+00:00"), raised(OWN)],
            "rank 1 raised ValueError: loss is not a number (in main, train.py:20), after 31 steps; rank 0 failed in "
            "consequence",
            id="two exceptions, the first of them",
        ),
        pytest.param(
            [{"exit_code": -15}, {"exit_code": -9}],
            "rank 1 ended by signal 9 (SIGKILL), after at least 31 steps",
            id="a kill, and a peer that the launcher ended",
        ),
        pytest.param(
            [raised(CLOSED), raised(replace(OWN, type="ConnectionError", message="S3: Connection reset, timed out"))],
            "rank 1 raised ConnectionError: S3: Connection reset, timed out (in main, train.py:20), after 31 steps; "
            "rank 0 failed in consequence",
            id="a server's connection",
        ),
        pytest.param(
            [{"exit_code": 1, "outcome": "finished"}, {"exit_code": -9}, {"exit_code": -9}],
            "ranks 1, 2 ended by signal 9 (SIGKILL), after at least 31 steps; rank 0 failed in consequence",
            id="kills, and a peer that exits because of them",
        ),
        pytest.param(
            [raised(CLOSED), {"exit_code": 3, "outcome": "finished"}],
            "rank 1 ended with exit code 3, after 31 steps; rank 0 failed in consequence",
            id="sys.exit",
        ),
        pytest.param(
            [{"exit_code": -15, "outcome": "finished"}, {"exit_code": 3}],
            "rank 1 ended with exit code 3, after at least 31 steps",
            id="os._exit, as the launcher saw it",
        ),
        pytest.param(
            [raised(CLOSED), {"outcome": "finished"}],
            "rank 1 ended before the others, after 31 steps; rank 0 failed in consequence",
            id="an end before the others",
        ),
        pytest.param(
            [raised(CLOSED), {}],
            "rank 1 ended unseen, killed or by os._exit, after at least 31 steps; rank 0 failed in consequence",
            id="an end that no launcher reports",
        ),
        pytest.param(
            [raised(replace(CLOSED, message="NCCL error: invalid usage"))] * 2,
            "ranks 0, 1 raised RuntimeError: NCCL error: invalid usage (in main, train.py:20), after 31 steps",
            id="communication that cannot be set up",
        ),
    ],
)
def test_the_rank_that_ended_first_is_the_cause(ends: list[dict[str, Any]], said: str) -> None:
    assert headline(crash_of(*ends)) == f"The job failed: {said}."


def test_an_exception_that_was_raised_from_a_timeout_is_one() -> None:
    wrapped = ErrorMetadata(type="TrainingError", message="step failed", causes=(f"RuntimeError: {TIMEOUT.message}",))
    assert crash_of(raised(wrapped), {"exit_code": -15}) is None


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param([raised(TIMEOUT), {"exit_code": -15}], id="torch's timeout"),
        pytest.param([raised(CLOSED), {}], id="a rank that is killed while it stands still"),
        pytest.param([raised(TIMEOUT), raised(replace(OWN, type="SIGTERMException"))], id="a framework's own end"),
        pytest.param([{"exit_code": -15}, {"exit_code": -9}], id="all of them"),
    ],
)
def test_a_job_that_stood_still_did_not_fail_of_its_own(ends: list[dict[str, Any]]) -> None:
    assert crash_of(*ends, stuck=(1,)) is None


def test_nccls_watchdog_ends_ranks_that_wait() -> None:
    assert crash_of({"exit_code": -6, "backend": "nccl"}, {"exit_code": -15, "backend": "nccl"}) is None
    assert headline(crash_of({"exit_code": -6}, {"exit_code": -15})).startswith(
        "The job failed: rank 0 ended by signal 6"
    )


def test_a_command_that_did_not_fail() -> None:
    assert crash_of(raised(OWN), exit_code=0) is None
    assert crash_of(raised(OWN), exit_code=None, ended=True) is None, "the program may have caught it"
    assert crash_of(raised(OWN), exit_code=None) is not None
    assert crash_of({"outcome": "finished"}, {"outcome": "finished"}) is None
    assert crash_of({"outcome": "exception"}, {"outcome": "exception"}) is None, "why is not known"


def test_an_interrupt_of_a_job_that_stands_still_is_no_failure_of_its_own(tmp_path: Path) -> None:
    """Its stacks are of where it stood; the interrupt is nobody's exception."""
    path = stacks_file(tmp_path, 1)
    path.write_text('Thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 20 in <module>\n')
    runs = {
        rank: RunMetadata(rank=rank, world_size=2, outcome="exception", error=CLOSED if rank == 0 else None)
        for rank in range(2)
    }
    job = Job(tmp_path, (), runs=runs, launch=LaunchMetadata(exit_code=-2), stuck=StuckFiles(stacks={1: path}))
    assert job_crash(job, None) is None


def test_stacks_of_a_recording_whose_metadata_do_not_say_why(tmp_path: Path) -> None:
    """As earlier versions wrote them: the exception's class and place alone."""
    stacks = {0: (BACKWARD, LOOP), 1: (LOOP,)}
    for rank, calls in stacks.items():
        lines = [f'  File "{call.file}", line {call.line} in {call.function}' for call in calls]
        module = '  File "/home/me/train.py", line 46 in <module>'
        thread = "Thread 0x00007f8b5d67db80 (most recent call first):\n"
        other = '  File "watch.py", line 1 in _end\n'
        text = f"{thread}{other}\nUncaught RuntimeError\n\n{thread}" + "\n".join([*lines, module])
        stacks_file(tmp_path, rank).write_text(text)
        save(RunMetadata(rank=rank, world_size=2, mode="steps", outcome="exception"), run_file(tmp_path, rank))
        steps_file(tmp_path, rank).write_bytes(pack(Block(0, 0, 1, [10_000] * 31, {}, bytes(31))))
    save(LaunchMetadata(exit_code=1), tmp_path / LAUNCH_FILE)
    summary = analyze(tmp_path)
    assert summary.hang is None
    assert summary.verdict.headline == (
        "The job failed: rank 1 raised RuntimeError (in main, train.py:20), after 31 steps; rank 0 failed in "
        "consequence."
    )
    assert summary.verdict.first_action == "Look at main (/home/me/train.py:20), where rank 1 raised it."
