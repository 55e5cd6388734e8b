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
from tests.analyzers.measured import measured
from tests.analyzers.readers.helpers import event, save


@pytest.mark.parametrize(("device", "noted"), [("cuda", True), ("cpu", False)])
def test_the_run_knows_of_devices_that_the_trace_does_not_name(tmp_path: Path, device: str, *, noted: bool) -> None:
    record_on_cpus(tmp_path, device=DeviceMetadata(type=device, name="NVIDIA H100"))
    notes = [note for note in measured(tmp_path).notes if note.kind == "no_device_events"]
    assert [note.ranks for note in notes] == [(0, 1)] * noted
    assert all("CUPTI" in note.text for note in notes)


def trained(rank: int, *, device: bool) -> str:
    """The trace of three steps of 100 us, in each of which operators launch three kernels.

    Operators come first, then device events, which are in no order of time: as in files of Kineto.
    """
    operators: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    for step in range(3):
        operators.append(event(f"ProfilerStep#{step}", cat="user_annotation", ts=100 * step, dur=100))
        for at in range(3):
            ts, ids = 100 * step + 10 * at, {"External id": 10 * step + at + 1}
            args = {"correlation": ids["External id"], **ids}
            operators.append(event("aten::mm", ts=ts + 1, dur=8, args=ids))
            calls.append(event("cudaLaunchKernel", cat="cuda_runtime", ts=ts + 3, dur=2, args=args))
            kernels.append(event("gemm", cat="kernel", pid=0, tid=7, ts=ts + 10, dur=9, args=args))
    about = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100"}], "distributedInfo": {"rank": rank, "world_size": 4}}
    return json.dumps({**about, "traceEvents": [*operators, *calls, *kernels[::-1] * device]})


@pytest.mark.parametrize(
    ("ranks", "cut"),
    [((0, 1, 3), True), ((0, 1, 3), False), ((0,), True)],
    ids=["cut", "not recorded", "one of two is cut"],
)
def test_a_rank_without_the_device_events_that_others_have_is_left_out(
    ranks: tuple[int, ...], tmp_path: Path, *, cut: bool
) -> None:
    for rank in ranks:
        save(tmp_path, trained(rank, device=True), f"rank{rank}.json")
    if cut:
        whole = trained(2, device=True)
        save(tmp_path, whole[: whole.index('"gemm"') + 3], "rank2.json")
    else:
        save(tmp_path, trained(2, device=False), "rank2.json")
    summary = perfscope.analyze(tmp_path, executor=Serial())
    assert summary.job.ranks == ranks
    (failure,) = summary.job.failures
    assert failure.path.endswith("rank2.json")
    assert ("ends early" in failure.error) is cut
    assert "would seem idle" in failure.error


def test_a_rank_of_which_no_step_is_whole_in_a_file_that_ends_early_is_left_out(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        save(tmp_path, trained(rank, device=True), f"rank{rank}.json")
    whole = trained(1, device=True)
    save(tmp_path, whole[: whole.index('"gemm"', whole.index('"gemm"') + 1)], "rank1.json")
    (failure,) = perfscope.analyze(tmp_path, executor=Serial()).job.failures
    assert failure.path.endswith("rank1.json")
    assert "ends early, and no step in it is whole" in failure.error


def test_what_limits_a_job_is_not_known_where_device_events_of_every_step_are_missing(tmp_path: Path) -> None:
    """One step, of whose three kernels, as its calls show, the file holds two."""
    document = json.loads(trained(0, device=True))
    events = [event for event in document["traceEvents"] if event["ts"] < 100]
    text = json.dumps({**document, "traceEvents": events})
    summary = perfscope.analyze(save(tmp_path, text[: text.rindex('"gemm"')], "rank0.json"), executor=Serial())
    (note,) = (note for note in summary.notes if note.kind == "device_events_lost")
    assert note.ranks == (0,)
    (row,) = summary.time_breakdown
    assert row.idle_launch_us == row.idle_host_us == row.idle_dependency_us == 0
    assert row.idle_unknown_us > 0
    assert "not known: the file ends early" in summary.verdict.headline
    assert summary.verdict.unsure


def test_what_is_the_same_of_several_traces_is_noted_once(tmp_path: Path) -> None:
    """On two of three ranks the last step's kernels had not run when the recording ended."""
    for rank in range(3):
        document = json.loads(trained(rank, device=True))
        if rank:
            kept = [event for event in document["traceEvents"] if event["cat"] != "kernel" or event["ts"] < 200]
            document["traceEvents"] = kept
        save(tmp_path, document, f"rank{rank}.json")
    (note,) = (note for note in perfscope.analyze(tmp_path, executor=Serial()).notes if note.about == "reading")
    assert (note.kind, note.ranks) == ("reading_alike", (1, 2))
    assert note.text.startswith(f"Each of ranks 1, 2 ({tmp_path / 'rank1.json'} and 1 more): step 2 launched kernels")
