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
