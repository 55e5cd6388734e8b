"""Jobs of which a rank is missing or cannot be used: what the others show is told, with what is not known of it.

Each step, in ms: every rank computes, all reduce together for 8 from when the last one comes, and the step ends at 50::

    rank 1     gemm 40                          all-reduce 8
    others     gemm 25          (waiting 15)    all-reduce 8

At its peers' pace rank 1 would save 15 of each step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from perfscope.results.summary import Summary
from tests.analyzers.measured import advised

STEP, REDUCE, STEPS = 50, 8, 5
SLOW = {0: 25, 1: 40, 2: 25, 3: 25}


def trace(
    rank: int, compute: Mapping[int, int], steps: range = range(STEPS), size: int | None = 4, length: int = STEP
) -> dict[str, Any]:
    """One rank's: ``compute`` of all ranks, steps of ``length``."""
    until = max(compute.values()) + REDUCE
    events = []
    for step in steps:
        at = 1000 * length * step
        kernel = {"ph": "X", "cat": "kernel", "pid": 0}
        args = {"device": 0}
        events += [
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1, "ts": at,
             "dur": 1000 * length - 5},
            {**kernel, "name": "ampere_bf16_s16816gemm", "tid": 7, "ts": at + 50, "dur": 1000 * compute[rank],
             "args": {**args, "stream": 7}},
            {**kernel, "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "tid": 20,
             "ts": at + 60 + 1000 * compute[rank], "dur": 1000 * (until - compute[rank]),
             "args": {**args, "stream": 20}},
        ]  # fmt: skip
    stated = {} if size is None else {"distributedInfo": {"rank": rank, "world_size": size, "backend": "nccl"}}
    return {**stated, "traceEvents": events}


def analyze(folder: Path, traces: Mapping[int, dict[str, Any] | str]) -> Summary:
    for rank, content in traces.items():
        (folder / f"rank{rank}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return advised(folder)


def assert_rank_1_is_told(summary: Summary) -> None:
    (row,) = summary.stragglers
    assert (row.rank, row.cause, row.confidence) == (1, "compute", "medium")
    assert row.lost_us == pytest.approx(15_000, rel=0.02)
    assert len(summary.job.steps) == STEPS
    assert "Rank 1 is a straggler" in summary.verdict.headline
    assert summary.findings[0].predicted_step_us.high >= summary.job.step_time_us
    assert "rank 2" in summary.findings[0].action.how


@pytest.mark.parametrize("size", [4, None])
def test_a_rank_that_was_not_recorded_hides_no_straggler(size: int | None, tmp_path: Path) -> None:
    assert_rank_1_is_told(analyze(tmp_path, {rank: trace(rank, SLOW, size=size) for rank in (0, 1, 3)}))


@pytest.mark.parametrize("size", [4, None])
@pytest.mark.parametrize("broken", ["cut", "other steps", "no marks", "no kernels", "no JSON"])
def test_a_broken_trace_hides_no_straggler(broken: str, size: int | None, tmp_path: Path) -> None:
    traces: dict[int, dict[str, Any] | str] = {rank: trace(rank, SLOW, size=size) for rank in SLOW}
    events = traces[2]["traceEvents"]  # type: ignore[index]
    if broken == "cut":
        text = json.dumps(traces[2])
        traces[2] = text[: text.index("ProfilerStep#1") - 40]
    elif broken == "no JSON":
        traces[2] = "no trace"
    elif broken == "other steps":
        traces[2] = trace(2, SLOW, range(20, 20 + STEPS), size=size)
    else:
        kept = [event for event in events if (event["cat"] == "kernel") is (broken == "no marks")]
        traces[2] = {**traces[2], "traceEvents": kept}  # type: ignore[dict-item]
    summary = analyze(tmp_path, traces)
    assert summary.job.ranks == (0, 1, 3)
    assert [failure.rank for failure in summary.job.failures] == [2]
    assert_rank_1_is_told(summary)


@pytest.mark.parametrize("compute", [dict.fromkeys(range(4), 30), {0: 30, 1: 30, 2: 38, 3: 30}])
def test_nobody_is_accused_for_a_rank_that_is_missing(compute: Mapping[int, int], tmp_path: Path) -> None:
    summary = analyze(tmp_path, {rank: trace(rank, compute) for rank in (0, 1, 3)})
    assert not summary.stragglers


def test_a_few_shared_steps_are_enough(tmp_path: Path) -> None:
    """Of 5 steps 3 on one of the ranks: no rank is left out for the other two."""
    traces = {rank: trace(rank, SLOW, range(3 if rank == 2 else STEPS)) for rank in SLOW}
    summary = analyze(tmp_path, traces)
    assert summary.job.ranks == (0, 1, 2, 3)
    assert len(summary.job.steps) == 3


def test_the_slowest_of_ranks_that_never_wait_is_named(tmp_path: Path) -> None:
    traces = {}
    for rank in range(4):
        alone = {rank: 60 if rank == 3 else 40}
        traces[rank] = trace(rank, alone, length=70 if rank == 3 else STEP)
    summary = analyze(tmp_path, traces)
    assert not summary.stragglers
    assert summary.verdict.headline.startswith("Rank 3 is the slowest")
    assert "Nothing in the recording makes the others wait" in summary.verdict.headline
    assert "all ranks" not in (summary.verdict.first_action or "")
    assert not summary.verdict.healthy


def test_idle_time_at_the_end_of_steps_hides_no_straggler(tmp_path: Path) -> None:
    """Steps of a fixed length, longer than their work."""
    summary = analyze(tmp_path, {rank: trace(rank, SLOW, length=65) for rank in SLOW})
    (row,) = summary.stragglers
    assert row.rank == 1
    assert row.lost_us == pytest.approx(15_000, rel=0.02)
    assert "Rank 1 is a straggler" in summary.verdict.headline
