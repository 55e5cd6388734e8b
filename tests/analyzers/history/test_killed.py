"""Ranks that were killed: their metadata is of their last capture, their step history goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import perfscope
from perfscope.analyzers.history.killed import with_unprofiled_steps
from perfscope.recording.history import DISTURBED, Block, pack
from perfscope.recording.job import Job, open_job
from perfscope.recording.metadata import RunMetadata, StepsMetadata, load_run, save
from perfscope.recording.paths import run_file, steps_file
from tests.emulator.emulate import emulate
from tests.emulator.spec import Job as EmulatedJob
from tests.emulator.spec import Model, Recording

STEPS_US = [30_000] * 4 + [9_000, 10_000, 11_000, 12_000, 8_000, 10_000]
"""The profiler was at work in the first four."""


def write(folder: Path, rank: int = 0, **of_run: object) -> None:
    flags = bytes([DISTURBED] * 4 + [0] * 6)
    steps_file(folder, rank).write_bytes(pack(Block(0, 0, 1, STEPS_US, {}, flags)))
    save(replace(RunMetadata(rank=rank, world_size=1), **of_run), run_file(folder, rank))


def opened(folder: Path) -> Job:
    return with_unprofiled_steps(open_job(folder))


def test_the_steps_of_its_history_are_a_killed_rank_s(tmp_path: Path) -> None:
    write(tmp_path, steps=StepsMetadata(seen=4))
    run = opened(tmp_path).runs[0]
    assert run.steps.unprofiled_ns == tuple(1000 * us for us in STEPS_US[4:])
    assert run.steps.seen == 4


@pytest.mark.parametrize(
    "of_run",
    [
        {"outcome": "ended", "steps": StepsMetadata(unprofiled_ns=(1, 2))},  # it wrote down itself what it knew
        {"steps": StepsMetadata(unprofiled_ns=tuple(range(7)))},  # it wrote down more than its history shows
        {"attempt": 1},  # the history is of the attempt before
    ],
)
def test_other_metadata_stays_as_it_is(of_run: dict[str, object], tmp_path: Path) -> None:
    write(tmp_path, **of_run)
    assert opened(tmp_path).runs == open_job(tmp_path).runs


def test_no_history_or_a_damaged_one_leaves_the_metadata(tmp_path: Path) -> None:
    write(tmp_path)
    steps_file(tmp_path, 0).write_bytes(b"PSH1 cut")
    assert opened(tmp_path).runs == open_job(tmp_path).runs


def test_the_unprofiled_step_time_of_a_job_that_was_killed_is_known(tmp_path: Path) -> None:
    """Six steps after the capture took 10 ms on average: what the analysis says is of these."""
    job = EmulatedJob(ranks=2, ranks_per_host=2, model=Model(blocks=2), recording=Recording(steps=4, run=True))
    emulate(job).write(tmp_path)
    for rank in range(2):
        path = run_file(tmp_path, rank)
        run = load_run(path)
        save(replace(run, outcome="running", steps=replace(run.steps, unprofiled_ns=())), path)
    assert perfscope.analyze(tmp_path, workers=1).job.unprofiled_step_us is None
    for rank in range(2):
        flags = bytes([DISTURBED] * 4 + [0] * 6)
        steps_file(tmp_path, rank).write_bytes(pack(Block(0, 0, 1, STEPS_US, {}, flags)))
    assert perfscope.analyze(tmp_path, workers=1).job.unprofiled_step_us == pytest.approx(10_000)
