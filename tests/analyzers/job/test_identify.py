"""Files that state no rank, neither in their content nor by their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import perfscope
from perfscope.errors import UnusableInput
from perfscope.execution.serial import Serial
from tests.analyzers.readers.helpers import event, save


def process(pid: int, begin: int) -> dict[str, Any]:
    """Three steps of a process, of 100 each, from ``begin`` on."""
    marks = [event(f"ProfilerStep#{n}", cat="user_annotation", pid=pid, ts=begin + 100 * n, dur=100) for n in range(3)]
    return {"traceEvents": [*marks, *(event("aten::mm", pid=pid, ts=begin + 100 * n, dur=60) for n in range(3))]}


def names(folder: Path, *documents: dict[str, Any]) -> list[str]:
    """As ``tensorboard_trace_handler`` names them, one of a host's tenth process last."""
    return [
        save(folder, json.dumps(document), f"host_{9 + at}.17000000000{at}.pt.trace.json").name
        for at, document in enumerate(documents)
    ]


def test_processes_that_ran_together_are_numbered_in_the_order_of_their_names(tmp_path: Path) -> None:
    first, second = names(tmp_path, process(7, 1000), process(8, 1010))
    summary = perfscope.analyze(tmp_path, executor=Serial())
    assert summary.job.ranks == (0, 1)
    (note,) = (note for note in summary.notes if note.kind == "ranks_by_file_order")
    assert note.text.index(first) < note.text.index(second)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(process(7, 1010), id="the same process"),
        pytest.param(process(8, 900_000), id="another time"),
    ],
)
def test_captures_of_one_process_and_of_another_time_are_no_ranks(second: dict[str, Any], tmp_path: Path) -> None:
    names(tmp_path, process(7, 1000), second)
    with pytest.raises(UnusableInput, match="says which rank it is"):
        perfscope.analyze(tmp_path, executor=Serial())


def test_a_file_that_states_its_rank_leaves_the_others_unknown(tmp_path: Path) -> None:
    known = {**process(7, 1000), "distributedInfo": {"rank": 1, "world_size": 2}}
    names(tmp_path, known, process(8, 1000))
    summary = perfscope.analyze(tmp_path, executor=Serial())
    assert summary.job.ranks == (1,)
    assert len(summary.job.failures) == 1


def rank(own: int, compute: int, **stated: Any) -> dict[str, Any]:
    """Three steps in which a kernel computes for ``compute`` of 100, and the others reduce until all are at 90."""
    events = []
    for at in (1000, 1100, 1200):
        events += [
            event(f"ProfilerStep#{at // 100}", cat="user_annotation", ts=at, dur=100),
            event("gemm", cat="kernel", pid=0, tid=7, ts=at, dur=compute),
            event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", cat="kernel", pid=0,
                  tid=20, ts=at + compute, dur=90 - compute),
        ]  # fmt: skip
    return {"traceEvents": events, **stated}


@pytest.mark.parametrize("size", [1, 4, None])
def test_names_number_ranks_whose_traces_all_state_rank_0(size: int | None, tmp_path: Path) -> None:
    stated = {"rank": 0} if size is None else {"rank": 0, "world_size": size}
    for own in range(4):
        save(tmp_path, rank(own, 80 if own == 2 else 40, distributedInfo=stated), f"rank{own}.json")
    summary = perfscope.analyze(tmp_path, executor=Serial())
    assert summary.job.ranks == (0, 1, 2, 3)
    assert not summary.job.failures
    assert summary.stragglers[0].rank == 2
    (said,) = (note for note in summary.notes if note.kind == "ranks_repeated")
    assert said.values["stated"] == [0]


def test_workers_of_torchs_handler_are_ranks_where_their_collectives_coincide(tmp_path: Path) -> None:
    for own, worker in enumerate(("ip-10-0-0-0_2000", "ip-10-0-0-0_2001", "ip-10-0-0-1_1990")):
        save(tmp_path, rank(own, 80 if own == 1 else 40), f"{worker}.1700000000.pt.trace.json")
    summary = perfscope.analyze(tmp_path, executor=Serial())
    assert summary.job.ranks == (0, 1, 2)
    assert summary.stragglers[0].rank == 1
    assert any(note.kind == "ranks_by_file_order" for note in summary.notes)


def test_folders_of_hosts_with_local_ranks_are_one_job(tmp_path: Path) -> None:
    for own in range(4):
        (tmp_path / f"node{own // 2}").mkdir(exist_ok=True)
        save(tmp_path / f"node{own // 2}", rank(own, 80 if own == 3 else 40), f"rank{own % 2}.JSON")
    summary = perfscope.analyze(tmp_path, executor=Serial())
    assert summary.job.ranks == (0, 1, 2, 3)
    assert summary.stragglers[0].rank == 3


@pytest.mark.parametrize("count", [1, 3])
def test_ranks_that_only_their_files_names_tell_are_noted_once(count: int, tmp_path: Path) -> None:
    for rank in range(count):
        save(tmp_path, json.dumps(process(7 + rank, 1000)), f"rank{rank}.json")
    summary = perfscope.analyze(tmp_path, executor=Serial())
    (note,) = (note for note in summary.notes if "file_name" in note.kind)
    assert note.ranks == tuple(range(count))
    names = "rank0.json" if count == 1 else "rank0.json and 2 more"
    assert f"({names})" in note.text
