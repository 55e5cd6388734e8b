"""The line at the end of ``perfscope run``: what was recorded, or why nothing was."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfscope.collectors.agreement import Board, open_board
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.launch.recap import _options_for, recap, recap_of_rank
from perfscope.recording.history import DISTURBED, Block, pack
from perfscope.recording.metadata import CaptureMetadata, ErrorMetadata, RunMetadata, StepsMetadata, save
from perfscope.recording.paths import BOOTSTRAP_FOLDER, run_file, stacks_file, steps_file, trace_file


@pytest.fixture
def config(tmp_path: Path) -> CollectorConfig:
    (tmp_path / BOOTSTRAP_FOLDER).mkdir()
    return CollectorConfig(output=str(tmp_path), package_root="")


def leave(config: CollectorConfig, run: RunMetadata) -> None:
    """As if a rank had written its metadata and its traces."""
    save(run, run_file(config.folder, run.rank))
    for number, _ in enumerate(run.captures):
        trace_file(config.folder, run.rank, number).write_bytes(b"x" * 1500)


def seen(config: CollectorConfig, *what: str) -> None:
    for name in what:
        (config.folder / BOOTSTRAP_FOLDER / f"seen-{name}").touch()


def rank(number: int, *, complete: bool = True) -> RunMetadata:
    captures = (CaptureMetadata(file="f", first_step=8, last_step=15, complete=complete),)
    return RunMetadata(rank=number, world_size=4, captures=captures, outcome="finished")


def test_a_whole_recording(config: CollectorConfig) -> None:
    for number in range(4):
        leave(config, rank(number))
    assert recap(config, 0) == [
        f"recorded all 4 ranks, steps 8-15, 5.86 KiB in {config.folder}",
        f"next: perfscope analyze {config.folder}",
    ]


def test_a_rank_that_started_the_recording_itself_speaks_for_itself(config: CollectorConfig) -> None:
    """The others may still be at it: what they have left by then is no share of the ranks."""
    config = dataclasses.replace(config, mode="steps")
    leave(config, RunMetadata(rank=0, world_size=2, mode="steps", outcome="finished"))
    block = Block(0, 0, 1_758_580_000_000_000_000, [10_000] * 20, {}, bytes(20))
    steps_file(config.folder, 0).write_bytes(pack(block))
    first, *_ = recap_of_rank(config, 0)
    assert first.startswith("recorded the step times of rank 0: 20 steps, ")


@pytest.mark.parametrize("planned", [True, False])
def test_a_slow_step_whose_capture_did_not_come_is_told_from_none(config: CollectorConfig, planned: bool) -> None:
    config = dataclasses.replace(config, mode="trigger", trigger=1.5, warmup=3)
    leave(config, RunMetadata(rank=0, mode="trigger", outcome="finished"))
    block = Block(0, 0, 1_758_580_000_000_000_000, [10_000] * 20, {}, bytes(20))
    steps_file(config.folder, 0).write_bytes(pack(block))
    open_board(config.folder)
    if planned:
        Board(config.folder, 0).propose(128, 8, "step 19 took 22.0x the median on rank 0", asked=False)
    told = recap(config, 0)[1]
    assert told == (
        "step 19 took 22.0x the median on rank 0: steps 131-138 were to be recorded, but the job ended before, so no "
        "capture was made"
        if planned
        else "no step took 1.5x the median, so no capture was made"
    )


def test_slow_steps_of_a_job_that_ends_before_the_next_look_are_no_lack_of_them(config: CollectorConfig) -> None:
    config = dataclasses.replace(config, mode="trigger", trigger=1.5)
    leave(config, RunMetadata(rank=0, mode="trigger", outcome="finished"))
    times = [10_000] * 40
    times[3] = times[20] = times[30] = times[35] = 90_000
    flags = bytes(DISTURBED if step == 35 else 0 for step in range(40))
    steps_file(config.folder, 0).write_bytes(pack(Block(0, 0, 1_758_580_000_000_000_000, times, {}, flags)))
    open_board(config.folder)
    assert recap(config, 0)[1] == (
        "2 steps took 1.5x the median or more, but the job ended before a capture could begin, so none was made"
    )


def test_which_ranks_failed_which_were_killed_and_which_stood_still(config: CollectorConfig) -> None:
    """Ranks that raised leave stacks as well; what a launcher ended afterwards is not named."""
    error = ErrorMetadata(type="ValueError", message="bad batch\nof two lines")
    raised = dataclasses.replace(rank(1), outcome="exception", error=error, ended_at="2026-11-28T03:35:22.1+00:00")
    late = dataclasses.replace(raised, rank=2, ended_at="2026-11-28T03:35:23.1+00:00")
    killed = dataclasses.replace(rank(3), outcome="running", exit_code=-9, ended_at="2026-11-28T03:35:22+00:00")
    stuck = dataclasses.replace(rank(0), outcome="running", exit_code=-15)
    for run in (raised, late, killed, stuck):
        leave(config, run)
    for number in (0, 1, 2):
        stacks_file(config.folder, number).touch()
    assert recap(config, 1)[1:-1] == [
        "rank 3 ended by signal 9",
        "ranks 1, 2 raised ValueError: bad batch",
        "rank 0 stood still, and wrote stacks and last collectives",
    ]


def test_missing_and_cut_ranks_are_named(config: CollectorConfig) -> None:
    leave(config, rank(1, complete=False))
    lines = recap(config, 0)
    assert lines[0].startswith("recorded 1 of 4 ranks, steps 8-15")
    assert lines[1] == "a capture was cut short on 1 rank"
    assert lines[2] == "no trace of ranks 0, 2, 3 here; if other nodes wrote it, see perfscope gather"


def test_a_rank_that_began_here_and_left_no_trace_was_stopped(config: CollectorConfig) -> None:
    leave(config, rank(1, complete=False))
    leave(config, dataclasses.replace(rank(0), captures=()))
    lines = recap(config, 1)
    assert lines[2] == "no trace of rank 0: stopped before it was written"
    assert lines[3] == "no trace of ranks 2, 3 here; if other nodes wrote it, see perfscope gather"


def test_ranks_that_were_not_chosen_are_not_missing(config: CollectorConfig) -> None:
    chosen = dataclasses.replace(config, ranks="1")
    leave(chosen, rank(1))
    lines = recap(chosen, 0)
    assert lines[0].startswith("recorded 1 rank (1 of 4 chosen), steps 8-15")
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("marks", "exit_code", "reason"),
    [
        ((), 0, "no Python process of the command loaded the collector"),
        (("python",), 0, "never imported torch"),
        (("python",), 3, "never imported torch (exit code 3)"),
        (("python", "torch"), 0, "call perfscope.step()"),
        (("python", "torch"), -11, "no optimizer step was completed (signal 11)"),
    ],
)
def test_why_nothing_was_recorded(config: CollectorConfig, marks: tuple[str, ...], exit_code: int, reason: str) -> None:
    seen(config, *marks)
    (line,) = recap(config, exit_code)
    assert line.startswith("nothing was recorded: ")
    assert reason in line


def test_a_collector_that_could_not_start_reports_why(config: CollectorConfig) -> None:
    seen(config, "python", "torch")
    (config.folder / BOOTSTRAP_FOLDER / "failures.txt").write_text("ImportError: x\nImportError: x\n")
    assert recap(config, 0) == ["nothing was recorded: the collector could not start: ImportError: x"]


def test_a_crash_before_the_first_capture_reports_how_to_record_it(config: CollectorConfig) -> None:
    leave(config, RunMetadata(world_size=2, steps=StepsMetadata(seen=3), outcome="exception"))
    leave(config, RunMetadata(rank=1, world_size=2, steps=StepsMetadata(seen=1), outcome="running"))
    (line,) = recap(config, 1)
    assert "the command failed (exit code 1) after 3 steps, and a capture begins after 8" in line
    assert line.endswith("to record those, use --wait 1 --warmup 0 --active 2")


def test_a_problem_is_repeated_where_it_prevented_recording(config: CollectorConfig) -> None:
    leave(config, RunMetadata(steps=StepsMetadata(seen=30), problems=("the profiler failed",), outcome="finished"))
    (line,) = recap(config, 0)
    assert line.endswith("yet no capture was written. A rank reported: the profiler failed")


@given(st.integers(2, 200))
def test_the_options_suggested_record_a_job_of_that_length(steps: int) -> None:
    wait, warmup, active = map(int, re.findall(r"\d+", _options_for(steps)))
    config = CollectorConfig(output="", package_root="", wait=wait, warmup=warmup, active=active)
    assert config.cycle <= steps
