"""Ranks that train on devices, and whose traces have none of their work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import perfscope
from perfscope.execution.serial import Serial
from perfscope.recording.metadata import DeviceMetadata
from tests.analyzers.job.recordings import record_on_cpus
from tests.analyzers.readers.helpers import event, save


@pytest.mark.parametrize(("device", "noted"), [("cuda", True), ("cpu", False)])
def test_the_run_knows_of_devices_that_the_trace_does_not_name(tmp_path: Path, device: str, *, noted: bool) -> None:
    record_on_cpus(tmp_path, device=DeviceMetadata(type=device, name="NVIDIA H100"))
    notes = [note for note in perfscope.analyze(tmp_path).notes if note.kind == "no_device_events"]
    assert [note.ranks for note in notes] == [(0, 1)] * noted
    assert all("CUPTI" in note.text for note in notes)


def trained(rank: int, *, device: bool) -> str:
    """The trace of three steps of 100 us, in each of which an operator launches a kernel: operators first, as kineto
    writes them.
    """
    hosts: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    for step in range(3):
        at, number = 100 * step, {"External id": step + 1}
        hosts += [
            event(f"ProfilerStep#{step}", cat="user_annotation", ts=at, dur=100),
            event("aten::mm", ts=at + 5, dur=20, args=number),
            event("cudaLaunchKernel", cat="cuda_runtime", ts=at + 10, dur=5, args={"correlation": step + 1, **number}),
        ]
        kernels.append(
            event("gemm", cat="kernel", pid=0, tid=7, ts=at + 20, dur=70, args={"correlation": step + 1, **number})
        )
    about = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100"}], "distributedInfo": {"rank": rank, "world_size": 4}}
    return json.dumps({**about, "traceEvents": hosts + kernels * device})


@pytest.mark.parametrize("cut", [True, False])
def test_a_rank_without_the_device_events_that_others_have_is_left_out(tmp_path: Path, *, cut: bool) -> None:
    for rank in (0, 1, 3):
        save(tmp_path, trained(rank, device=True), f"rank{rank}.json")
    if cut:
        whole = trained(2, device=True)
        save(tmp_path, whole[: whole.index('"gemm"') + 3], "rank2.json")
    else:
        save(tmp_path, trained(2, device=False), "rank2.json")
    summary = perfscope.analyze(tmp_path, executor=Serial())
    assert summary.job.ranks == (0, 1, 3)
    (failure,) = summary.job.failures
    assert failure.path.endswith("rank2.json")
    assert ("ends early" in failure.error) is cut
    assert "would seem idle" in failure.error
