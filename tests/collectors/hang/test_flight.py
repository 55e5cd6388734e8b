"""One dump of several recorders, and of calls that none of them recorded."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from perfscope.collectors.hang import flight
from perfscope.collectors.hang.log import CollectiveLog
from perfscope.collectors.problems import Problems
from tests.collectors.harness import needs_torch
from tests.collectors.worlds import world

MOMENT = flight.Moment(rank=1, world_size=2, steps=7, idle_s=2.0)


def made(monkeypatch: pytest.MonkeyPatch, log: CollectiveLog, **recorders: dict[str, Any]) -> dict[str, Any]:
    """The dump where torch's recorders hold this."""
    functions = {name: lambda content=content: pickle.dumps(content) for name, content in recorders.items()}
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(**functions))
    content: dict[str, Any] = pickle.loads(flight.dump(log, MOMENT))
    return content


def recorded(group: str, number: int, time_ns: int, sequence: int) -> dict[str, Any]:
    return {
        "process_group": (group, ""), "pg_id": number, "time_created_ns": time_ns, "collective_seq_id": sequence,
        "is_p2p": False, "record_id": 0,
    }  # fmt: skip


def test_two_recorders_keep_their_groups_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = {"version": "2.9", "entries": [recorded("0", 0, 5, 1)], "pg_config": {}, "pg_status": {"0": {"x": 1}}}
    gloo = {"version": "2.9", "entries": [recorded("3", 0, 4, 1)], "pg_config": {}, "pg_status": {"0": {"x": 2}}}
    dump = made(monkeypatch, CollectiveLog(Problems()), _dump_nccl_trace=nccl, _dump_fr_trace=gloo)
    assert {entry["process_group"][0]: entry["pg_id"] for entry in dump["entries"]} == {"0": 0, "3": 1000}
    assert dump["pg_status"] == {"0": {"x": 1}, "1000": {"x": 2}}
    assert dump["version"] == "2.9"


def test_without_a_recorder_there_is_a_dump_without_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    dump = made(monkeypatch, CollectiveLog(Problems()))
    assert dump["entries"] == []
    assert dump["perfscope"]["rank"] == 1
    assert dump["perfscope"]["written_ns"] - dump["perfscope"]["idle_since_ns"] == 2_000_000_000


@needs_torch
def test_calls_are_noted_as_torch_dumps_them() -> None:
    """On a backend that has no recorder, every call is: two collectives, and the second message to rank 3."""
    import torch
    import torch.distributed as dist

    with world(4, rank=1):
        log = CollectiveLog(Problems())
        log.install()
        dist.all_reduce(torch.ones(2, 3, dtype=torch.bfloat16))
        dist.send(torch.ones(5), 3)
        dist.send(torch.ones(5), 3)
        dist.all_gather([torch.ones(2) for _ in range(4)], torch.ones(2))
        dump: dict[str, Any] = pickle.loads(flight.dump(log, MOMENT))
        log.forget()
        dist.all_reduce(torch.ones(2))
    assert [
        (entry["profiling_name"], entry["collective_seq_id"], entry["p2p_seq_id"]) for entry in dump["entries"]
    ] == [
        ("fake:all_reduce", 1, 0), ("fake:send 1->3", 1, 1), ("fake:send 1->3", 1, 2), ("fake:all_gather", 2, 0)
    ]  # fmt: skip
    first, *_, last = dump["entries"]
    assert (first["input_sizes"], first["input_dtypes"]) == ([[2, 3]], ["BFloat16"])
    assert (last["input_sizes"], last["output_sizes"]) == ([[2]], 4 * [[2]])
    assert any(frame["filename"] == __file__ for frame in first["frames"])
    assert dump["pg_config"]["0"]["ranks"] == "[0, 1, 2, 3]"
    assert log.entries() == []
