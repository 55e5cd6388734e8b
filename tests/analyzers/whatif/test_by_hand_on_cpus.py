"""Gradients reduced by a loop on CPUs, where a small model computes less than its optimizer and threads are put off."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.analyzers.measured import measured

STEPS, GRADIENTS = 6, 12
STEP_US, PUT_OFF_US = 26_000, 600


def trace(rank: int, *, autograd: bool) -> dict[str, Any]:
    """2 ms of forward and backward, 12 all-reduces of 0.5 ms with averages between them, of which one in three is put
    off for 0.6 ms, a norm of one number, then an optimizer's step of 14 ms.
    """
    draw, events = random.Random(rank), list[dict[str, Any]]()

    def add(name: str, cat: str, ts: int, dur: int, tid: int = 1) -> int:
        events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur})
        return ts + dur

    def reduce(now: int, bytes_: int) -> int:
        add("c10d::allreduce_", "cpu_op", now, 30)
        add(f"perfscope::collective#all_reduce|0|2|{len(events)}||float32|{bytes_}", "user_annotation", now + 5, 20)
        add("gloo:all_reduce", "user_annotation", now + 10, 480, tid=2)
        return now + 500

    for step in range(STEPS):
        begin = now = step * STEP_US
        now = add("aten::addmm", "cpu_op", now, 700)
        for _ in range(3):
            if autograd:
                add("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", now, 430)
            now = add("aten::mm", "cpu_op", now + 10, 410) + 15
        for index in range(GRADIENTS):
            now = reduce(now, 4 if index == GRADIENTS - 1 else 40_000 + 4 * index)
            now = add("aten::div_", "cpu_op", now, 20 + PUT_OFF_US * (draw.random() < 1 / 3))
        add("Optimizer.step#Adam.step", "user_annotation", now, 14_000)
        add("aten::_foreach_addcdiv_", "cpu_op", now, 14_000)
        add(f"ProfilerStep#{step}", "user_annotation", begin, STEP_US)
    info = {"backend": "gloo", "rank": rank, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]}
    return {"distributedInfo": info, "traceEvents": events}


@pytest.mark.parametrize(("way", "saved_ms"), [("ddp", 4.0), ("flat", 0.0)])
def test_a_loop_is_found_by_where_the_backward_ends(way: str, saved_ms: float, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(trace(rank, autograd=True)))
    summary = measured(tmp_path)
    assert summary.job.strategies == ("data",)
    answer = predict(context_of(tmp_path), {"gradients.reduce": way})
    # The forward, the optimizer's step and the loop's averages stay; ``flat`` copies as much as three of these.
    assert 16.5e6 < answer.mid_ns < answer.measured_ns - saved_ms * 1e6


def test_without_autograds_functions_the_roles_stay_open(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(trace(rank, autograd=False)))
    assert [group.role for group in measured(tmp_path).groups] == ["unknown"]
