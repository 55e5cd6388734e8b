"""What recording costs each step, from what the ranks measured of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfscope import analyze
from perfscope.analyzers.history.job_history import job_history
from perfscope.recording.history import Block, pack
from perfscope.recording.job import open_job
from perfscope.recording.metadata import RecordingMetadata, RunMetadata, save
from perfscope.recording.paths import run_file, steps_file
from perfscope.reports.terminal import verdict
from perfscope.results.history import RecordingCost

MEASURED = RecordingMetadata(
    between_ns=12_000, phase_ns=2_500, wait_ns=1_500, steps=200, phases=800, waits=1200, thread_ns=402_000,
    thread_steps=201,
)  # fmt: skip
"""12 µs between steps, 4 phases of 2.5 µs and 6 waits of 1.5 µs in each: 31 µs. The other thread: 2 µs."""


def write(folder: Path, rank: int, step_us: int, measured: RecordingMetadata | None) -> None:
    stages = {name: [step_us // 5] * 50 for name in ("dataloader", "forward", "backward", "optimizer")}
    steps_file(folder, rank).write_bytes(pack(Block(0, 0, 1, [step_us] * 50, stages, bytes(50), {})))
    save(RunMetadata(rank=rank, world_size=2, mode="steps", recording=measured), run_file(folder, rank))


def found(folder: Path) -> RecordingCost | None:
    history, failures = job_history(open_job(folder))
    assert history is not None
    assert not failures
    return history.recording_cost


def test_the_cost_by_hand(tmp_path: Path) -> None:
    """Of a step of 10 ms 31 µs are 0.31 %; of rank 1, whose steps are shorter, 0.62 %."""
    write(tmp_path, 0, 10_000, MEASURED)
    write(tmp_path, 1, 5_000, MEASURED)
    cost = found(tmp_path)
    assert cost is not None
    cost.self_check()
    assert (cost.rank, cost.step_us, cost.share) == (1, pytest.approx(31), pytest.approx(0.0062))
    assert (cost.between_us, cost.phases_us, cost.waits_us) == pytest.approx((12, 10, 9))
    assert cost.thread_us == pytest.approx(2)
    text = verdict(analyze(tmp_path))
    assert "Recording step times takes 31 µs (0.62%) of each step on rank 1" in " ".join(text.split())


def test_nothing_is_said_where_nothing_was_measured(tmp_path: Path) -> None:
    write(tmp_path, 0, 10_000, None)
    assert found(tmp_path) is None
    assert "Recording step times" not in verdict(analyze(tmp_path))


def test_a_rank_without_steps_costs_nothing(tmp_path: Path) -> None:
    """Counts of nothing, as in a file that was written before the first step had passed."""
    write(tmp_path, 0, 10_000, RecordingMetadata(between_ns=8_000))
    cost = found(tmp_path)
    assert cost is not None
    assert (cost.step_us, cost.thread_us) == (8, 0)
