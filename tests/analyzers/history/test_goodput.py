"""Goodput: what trained, and where the rest of a run's time went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfscope import analyze
from perfscope.analyzers.history.goodput import rank_goodput
from perfscope.analyzers.history.job_history import job_history
from perfscope.analyzers.history.rank_history import read_attempts
from perfscope.recording.history import DISTURBED, Block, pack
from perfscope.recording.job import open_job
from perfscope.recording.metadata import LaunchMetadata, RunMetadata, save
from perfscope.recording.paths import LAUNCH_FILE, run_file, steps_file

MS = 1_000_000
BEGAN = 1_700_000_000_000_000_000
STAGES = ("dataloader", "forward", "backward", "optimizer")


def block(
    steps_ms: list[int], *, attempt: int = 0, began_ns: int = BEGAN, disturbed: int = -1, **pauses: dict[int, int]
) -> bytes:
    """Steps of so many ms; ``pauses``: of a stage, step -> ms."""
    stages: dict[str, list[int]] = {name: [1000] * len(steps_ms) for name in STAGES}
    for name, at in pauses.items():
        stages[name] = [1000 * at.get(step, 0) for step in range(len(steps_ms))]
    flags = bytes(DISTURBED * (step == disturbed) for step in range(len(steps_ms)))
    return pack(Block(attempt, 0, began_ns, [1000 * ms for ms in steps_ms], stages, flags, {}))


def test_each_part_by_hand(tmp_path: Path) -> None:
    """100 steps of 10 ms. The first two take 90 and 40 ms; step 20 evaluates (4 ms of forwards, 60 longer), step 40
    saves (30 longer), step 60 stalls (90 longer), in step 80 the profiler works (20 longer). After 500 ms a
    second attempt makes 10 steps.
    """
    steps = [10] * 100
    for step, ms in {0: 90, 1: 40, 20: 70, 40: 40, 60: 100, 80: 30}.items():
        steps[step] = ms
    first = block(steps, disturbed=80, evaluation={20: 4}, checkpoint={40: 25})
    ended = BEGAN + sum(steps) * MS
    (tmp_path / "steps").write_bytes(first + block([10] * 10, attempt=1, began_ns=ended + 500 * MS))
    found = rank_goodput(read_attempts(tmp_path / "steps"))
    assert (found.warmup_us, found.evaluation_us, found.checkpoint_us) == (110_000, 60_000, 30_000)
    assert (found.stall_us, found.restart_us) == (90_000, pytest.approx(500_000))
    assert found.recording_us == pytest.approx(20_000)
    assert (found.span_us, found.attempts, found.steps) == (pytest.approx((sum(steps) + 600) * 1000), 2, 110)


def test_the_job_has_the_pauses_of_the_rank_that_makes_them(tmp_path: Path) -> None:
    for rank in range(2):
        steps = [10] * 50
        steps[30] = 60
        data = block(steps, evaluation={30: 20}) if rank == 1 else block(steps)
        steps_file(tmp_path, rank).write_bytes(data)
        started = "2023-11-14T22:13:19+00:00"  # 1 s before the first step
        save(RunMetadata(rank=rank, world_size=2, started_at=started, strategies=("ddp",)), run_file(tmp_path, rank))
    history, _ = job_history(open_job(tmp_path))
    assert history is not None
    goodput = history.goodput
    assert goodput is not None
    goodput.self_check()
    assert (goodput.rank, goodput.evaluation_us, goodput.stall_us) == (1, 50_000, 0)
    assert (goodput.startup_us, goodput.wall_us, goodput.training_us) == (1e6, 1.55e6, 500_000)
    assert goodput.in_words() == "Goodput: 32% of 1.55 s trained; time to the first step 65%, evaluation 3.2%."


@pytest.mark.parametrize(
    ("launch", "rank", "stood_s"),
    [
        ({"exit_code": 1, "ended_at": "2023-11-14T22:15:20.500+00:00"}, {}, 120),
        ({"exit_code": 0, "ended_at": "2023-11-14T22:15:20.500+00:00"}, {}, None),
        ({"exit_code": 1, "ended_at": "2023-11-14T22:15:20.500+00:00"}, {"ended_at": "2023-11-14T22:13:21"}, None),
        ({"exit_code": 1}, {}, None),
        (None, {}, None),
    ],
    ids=["killed", "ended", "a rank ended itself", "when is not known", "no launch"],
)
def test_a_job_stands_still_from_its_last_step_until_it_is_killed(
    launch: dict[str, Any] | None, rank: dict[str, Any], stood_s: float | None, tmp_path: Path
) -> None:
    """50 steps of 10 ms; the command began a second before them and ended two minutes after them."""
    started = "2023-11-14T22:13:19+00:00"
    for number in range(2):
        steps_file(tmp_path, number).write_bytes(block([10] * 50))
        run = RunMetadata(rank=number, world_size=2, started_at=started, strategies=("ddp",), **rank)
        save(run, run_file(tmp_path, number))
    if launch is not None:
        save(LaunchMetadata(started_at=started, **launch), tmp_path / LAUNCH_FILE)
    history, _ = job_history(open_job(tmp_path))
    assert history is not None
    goodput = history.goodput
    assert goodput is not None
    goodput.self_check()
    assert history.stood_still_us == (None if stood_s is None else stood_s * 1e6)
    assert (goodput.stall_us, goodput.wall_us) == ((stood_s or 0) * 1e6, 1.5e6 + (stood_s or 0) * 1e6)
    told = analyze(tmp_path).verdict
    said = "No rank made a step in the last 120 s before the job was ended"
    assert told.headline.startswith(said) is (stood_s is not None)
    assert ("--hang-timeout" in (told.first_action or "")) is (stood_s is not None)
