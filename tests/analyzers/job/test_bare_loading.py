"""Data loading in hand-made traces: step ranges, a range around loading of some name, and kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perfscope.results.summary import Summary
from tests.analyzers.measured import advised, measured

WORKERS = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
ALONE = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
STEPS, COMPUTE, TRANSFER = 4, 25_000, 5_000


def write(
    folder: Path, loads_us: dict[int, int], name: str, *, between: bool = False, category: str = "user_annotation"
) -> None:
    """Each rank loads for so long, computes for 25 ms and all-reduces with the others, which takes 5 ms once all have
    come. ``between``: the range around loading lies before the step's.
    """
    period = max(loads_us.values()) + COMPUTE + TRANSFER
    for rank, load in loads_us.items():
        events: list[dict[str, Any]] = []

        def add(name: str, cat: str, tid: int, ts: int, dur: int, events: list[Any] = events) -> None:
            events.append({"ph": "X", "name": name, "cat": cat, "pid": tid, "tid": tid, "ts": ts, "dur": dur})

        for step in range(STEPS):
            begin = step * period
            add(f"ProfilerStep#{step}", "user_annotation", 1, begin + load * between, period - load * between)
            add(name, category, 1, begin, load)
            add("gemm", "kernel", 7, begin + load, COMPUTE)
            add("AllReduce", "kernel", 20, begin + load + COMPUTE, period - load - COMPUTE)
        (folder / f"rank_{rank}.json").write_text(json.dumps({"traceEvents": events}))


def lone_straggler(summary: Summary) -> tuple[tuple[int, ...], str, float]:
    (row,) = summary.stragglers
    assert summary.findings[0].rule == "straggling-rank"
    return row.ranks, row.cause, row.lost_us


@pytest.mark.parametrize(
    ("name", "category"),
    [
        (ALONE, "user_annotation"), ("dataloader", "user_annotation"), ("DataLoader", "cpu_op"),
        ("data_loading", "nvtx"), ("next_batch", "user_annotation"), ("load_batch", "user_annotation"),
        ("get_batch", "user_annotation"), ("dataload", "user_annotation"),
        ("dataloader.next()", "user_annotation"), ("data_wait 3", "user_annotation"),
    ],
)  # fmt: skip
def test_a_slow_loader_of_one_rank(name: str, category: str, tmp_path: Path) -> None:
    write(tmp_path, {0: 200, 1: 18_000, 2: 200, 3: 200}, name, category=category)
    assert lone_straggler(advised(tmp_path)) == ((1,), "dataloader", pytest.approx(17_800, rel=0.02))


@pytest.mark.parametrize("name", ["load_state", "batch_norm", "data_parallel", "get_batch_norm", "epoch"])
def test_other_ranges_are_no_loading(name: str, tmp_path: Path) -> None:
    write(tmp_path, {0: 200, 1: 18_000, 2: 200, 3: 200}, name)
    summary = measured(tmp_path)
    assert not summary.dataloader
    assert all(row.cause != "dataloader" for row in summary.stragglers)


@pytest.mark.parametrize(
    ("loads_ms", "named"),
    [
        ((3, 18, 3, 3), True),
        ((3, 18, 5, 11), False),  # workers of one pace on all ranks, some later than others
        ((18, 18, 18, 3), False),
        ((3, 18), False),  # two do not show what is usual
    ],
)
def test_waits_that_most_ranks_share_are_what_taking_a_batch_costs(
    loads_ms: tuple[int, ...], tmp_path: Path, *, named: bool
) -> None:
    write(tmp_path, {rank: 1_000 * load for rank, load in enumerate(loads_ms)}, WORKERS)
    summary = advised(tmp_path)
    if named:
        assert lone_straggler(summary) == ((1,), "dataloader", pytest.approx(15_000, rel=0.02))
    else:
        assert not summary.stragglers


@pytest.mark.parametrize("name", [WORKERS, ALONE])
def test_loading_between_two_steps_counts(name: str, tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(range(4), 20_000), name, between=True)
    summary = advised(tmp_path)
    assert summary.findings[0].rule == "dataloader-workers"
    assert all(row.batches_per_step == pytest.approx(0.75) for row in summary.dataloader)  # the first lies before
