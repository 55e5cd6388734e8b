"""Steps that nothing numbers: the same one has the same number on all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import perfscope
from perfscope.execution.serial import Serial
from tests.analyzers.readers.helpers import event, save

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
STEP = 1000.0
TAKES = (600, 640, 580, 700, 610, 650, 590, 620)
"""When the kernels of each step are done: steps are not all alike, as in any recording."""


def recorded(rank: int, begins: int, *, clock_us: float = 0.0, numbered: bool = False) -> str:
    """Eight steps of 1 ms, of which the recording begins within step ``begins``. A step launches eight kernels, an
    all-reduce that ends on both ranks at once, and the optimizer's.
    """
    events: list[dict[str, Any]] = []
    for step, takes in enumerate(TAKES):
        begin = 10_000.0 + STEP * step
        if step > begins and numbered:
            events.append(event(f"ProfilerStep#{step}", cat="user_annotation", ts=begin + clock_us, dur=STEP))
        for at, name in enumerate([f"gemm{at}" for at in range(8)] + [NCCL, "fused_adam"]):
            called, ends = begin + 20 * at, begin + takes * (at + 1) / 10
            if step < begins or (step == begins and at < 5):
                continue
            ids = {"correlation": 100 * step + at}
            events.append(event("cudaLaunchKernel", cat="cuda_runtime", ts=called + clock_us, dur=5, args=ids))
            took = takes / 10 - 5
            args = {**ids, "device": 0, "stream": 7}
            events.append(event(name, cat="kernel", pid=0, tid=7, ts=ends - took + clock_us, dur=took, args=args))
    about = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100"}], "distributedInfo": {"rank": rank, "world_size": 2}}
    return json.dumps({**about, "traceEvents": events})


@pytest.mark.parametrize(("begins", "common"), [(0, 7), (1, 6), (2, 5)])
@pytest.mark.parametrize("first", [0, 1])
def test_recordings_that_begin_in_another_step_have_the_same_numbers(
    first: int, begins: int, common: int, tmp_path: Path
) -> None:
    save(tmp_path, recorded(first, 0), f"rank{first}.json")
    save(tmp_path, recorded(1 - first, begins), f"rank{1 - first}.json")
    summary = perfscope.analyze(tmp_path, executor=Serial())
    assert "steps_by_repetition" in {note.kind for note in summary.notes}
    assert len(summary.job.steps) == common
    assert min(summary.job.steps) >= 0
    # What the clocks are apart is found by steps that are the same.
    assert [row.offset_us for row in summary.clock] == pytest.approx([0.0, 0.0], abs=1.0)


def test_clocks_that_are_further_apart_than_a_step_tell_nothing(tmp_path: Path) -> None:
    save(tmp_path, recorded(0, 0), "rank0.json")
    save(tmp_path, recorded(1, 0, clock_us=3_600e6), "rank1.json")
    summary = perfscope.analyze(tmp_path, executor=Serial())
    assert len(summary.job.steps) == 7
    assert summary.clock[1].offset_us == pytest.approx(-3_600e6, rel=1e-6)


def test_numbers_that_are_recorded_stay(tmp_path: Path) -> None:
    """Of clocks that are a step apart the numbers know better."""
    save(tmp_path, recorded(0, 0, numbered=True), "rank0.json")
    save(tmp_path, recorded(1, 0, numbered=True, clock_us=STEP), "rank1.json")
    summary = perfscope.analyze(tmp_path, executor=Serial())
    assert summary.job.steps == tuple(range(1, 8))
    assert summary.clock[1].offset_us == pytest.approx(-STEP, abs=1.0)
