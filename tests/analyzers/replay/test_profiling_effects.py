"""Who is no straggler: ranks that are slow in the recorded steps alone, as unprofiled steps have no room for it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfscope.analyzers.replay.stragglers.profiling_effects import profiling_effect_notes, without_profiling_effects
from perfscope.recording.metadata import CpuMetadata, RunMetadata, StepsMetadata
from perfscope.results.categories import TimeCategory
from perfscope.results.rows import StragglerRow

SLOW = StragglerRow(rank=0, ranks=(0,), scope="rank", cause="compute", lost_us=230_000.0, confidence="high")


def recorded(
    *compute_ms: float, step_ms: float = 387.0, operators: int = 500, flops: tuple[int, int] = (10**9, 10**9)
) -> Any:
    """Two steps of ranks that compute for so long in each, in so many operators, of so many FLOPs."""
    totals, partials = {}, {}
    for rank, ms in enumerate(compute_ms):
        totals[rank] = np.zeros((2, len(TimeCategory)), dtype=np.int64)
        totals[rank][:, TimeCategory.COMPUTE] = round(ms * 1e6)
        totals[rank][:, TimeCategory.COMM_WAIT] = round((step_ms - ms) * 1e6)
        partials[rank] = SimpleNamespace(
            tables=SimpleNamespace(operators=SimpleNamespace(count=np.array([[operators, operators]]))),
            steps=SimpleNamespace(indices_of=lambda _: np.arange(2)),
            flops=SimpleNamespace(model=np.full((3, 2), flops[rank])),
            has_device_work=False,
        )
    return SimpleNamespace(totals=totals, partials=partials, step_ns=step_ms * 1e6, steps=[3, 4])


@pytest.mark.parametrize(
    ("result", "row", "unprofiled_ms", "named"),
    [
        (recorded(337, 104), SLOW, 154.0, False),
        (recorded(337, 104), SLOW, None, True),
        (recorded(337, 104), SLOW, 380.0, True),
        (recorded(337, 104), SLOW, 345.0, True),
        (recorded(337, 104), SLOW, 220.0, True),
        (recorded(337, 104), replace(SLOW, cause="host"), 154.0, True),
        (recorded(337, 104, operators=20_000), SLOW, 154.0, True),
        (recorded(337, 104, flops=(3 * 10**9, 10**9)), SLOW, 154.0, True),
        (recorded(337, 104, flops=(0, 0)), SLOW, 154.0, False),
        (recorded(337, 104), SLOW, 320.0, True),
        (recorded(337, 330), replace(SLOW, rank=1, ranks=(0, 1), scope="job"), 154.0, False),
        (recorded(337, 104), replace(SLOW, ranks=(0, 1), scope="job"), 154.0, True),
    ],
    ids=[
        "computes for more than twice an unprofiled step", "no such step was timed", "profiling changes little",
        "its compute fits", "without the wait the step would be far shorter", "what it takes longer is no compute",
        "recording the operators may take that long", "it has more work", "its work is not recorded",
        "its compute is hardly longer than the step", "both of them in turn", "one of them computes for less",
    ],
)  # fmt: skip
def test_a_rank_that_unprofiled_steps_have_no_room_for_is_not_named(
    result: Any, row: StragglerRow, unprofiled_ms: float | None, named: bool
) -> None:
    """Recorded steps take 387 ms, 230 of it for the rank that is slow there."""
    unprofiled_us = None if unprofiled_ms is None else unprofiled_ms * 1e3
    assert bool(without_profiling_effects([row], result, {}, unprofiled_us)) is named


def test_a_note_says_so() -> None:
    (note,) = profiling_effect_notes([SLOW], recorded(337, 104), {}, 154_000.0)
    assert note.text.startswith(
        "In the recorded steps the others waited for rank 0 59% of the step (slower compute), but what that rank takes "
        "for it (337 ms per step) is longer than a whole step without the profiler (154 ms)"
    )
    assert not list(profiling_effect_notes([], recorded(337, 104), {}, 154_000.0))


def ran(recorded_ms: float, unprofiled_ms: float, steps: int = 20, now_and_then_ms: float = 0.0) -> RunMetadata:
    """A rank whose training thread took so much CPU time in each recorded step and in each other one, in every fourth
    of these ``now_and_then_ms`` more; in one a checkpoint is saved.
    """
    unprofiled = tuple(
        round((unprofiled_ms + (now_and_then_ms if at % 4 == 0 else 0.0)) * 1e6) for at in range(1, steps)
    )
    unprofiled += (10**9,)
    return RunMetadata(
        cpu=CpuMetadata(steps=2, thread_ns=round(2e6 * recorded_ms)),
        steps=StepsMetadata(unprofiled_ns=unprofiled, unprofiled_thread_ns=unprofiled),
    )


ALIKE, SLOWER = ran(35.0, 26.0), ran(47.0, 26.0)
STEP_MS, LOST_US = 49.0, 11_000.0
LATE = replace(SLOW, lost_us=LOST_US)


@pytest.mark.parametrize(
    ("own", "row", "named"),
    [
        (SLOWER, LATE, False),
        (ran(47.0, 27.0), LATE, False),
        (ran(47.0, 35.0), LATE, True),
        (ran(47.0, 29.0), LATE, True),
        (ran(47.0, 26.0, now_and_then_ms=40.0), LATE, True),
        (ran(38.0, 26.0), LATE, True),
        (ran(47.0, 26.0, steps=7), LATE, True),
        (replace(SLOWER, cpu=None), LATE, True),
        (SLOWER, replace(LATE, cause="host"), False),
        (SLOWER, replace(LATE, cause="dataloader"), True),
        (SLOWER, replace(LATE, pattern="rotating"), True),
        (SLOWER, replace(LATE, ranks=(0, 1), scope="ranks"), True),
    ],
    ids=[
        "others take as much without the profiler", "a little more", "as much more as in the recorded steps",
        "a part of it", "in every fourth step", "what it takes more is no CPU time", "too few steps", "not recorded",
        "it runs Python", "it waits for batches", "in turn", "no others",
    ],
)  # fmt: skip
def test_what_runs_longer_in_the_recorded_steps_alone_is_not_named(
    own: RunMetadata, row: StragglerRow, named: bool
) -> None:
    """Steps of 49 ms, 30 without the profiler, in which rank 1 waits 11 ms for rank 0."""
    result = recorded(47.0, 36.0, step_ms=STEP_MS, operators=2_000)
    assert bool(without_profiling_effects([row], result, {0: own, 1: ALIKE}, 30_000.0)) is named


def test_devices_compute_at_no_cpu_time() -> None:
    result = recorded(47.0, 36.0, step_ms=STEP_MS, operators=2_000)
    for partial in result.partials.values():
        partial.has_device_work = True
    assert without_profiling_effects([LATE], result, {0: SLOWER, 1: ALIKE}, 30_000.0)


def test_another_note_gives_the_cpu_times() -> None:
    result, runs = recorded(47.0, 36.0, step_ms=STEP_MS, operators=2_000), {0: SLOWER, 1: ALIKE}
    (note,) = profiling_effect_notes([LATE], result, runs, 30_000.0)
    assert note.kind == "recorded_steps_alone"
    assert "took 47 ms of CPU time per step, the others' 35 ms." in note.text
    assert "Without the profiler it took 28.6 ms and the others' 28.6 ms" in note.text  # with the checkpoint
