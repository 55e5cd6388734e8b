"""Ranks that train on devices, and whose traces have none of their work."""

from __future__ import annotations

from pathlib import Path

import pytest

import perfscope
from perfscope.recording.metadata import DeviceMetadata, RunMetadata, save
from perfscope.recording.paths import run_file, trace_file
from tests.generator import cpu_job, simulate


@pytest.mark.parametrize(("device", "noted"), [("cuda", True), ("cpu", False)])
def test_the_run_knows_of_devices_that_the_trace_does_not_name(tmp_path: Path, device: str, *, noted: bool) -> None:
    simulate(cpu_job(ranks=2, steps=5)).write(tmp_path / "traces")
    for rank, trace in enumerate(sorted((tmp_path / "traces").iterdir())):
        trace.rename(trace_file(tmp_path, rank, 0, compressed=trace.suffix == ".gz"))
        run = RunMetadata(rank=rank, world_size=2, device=DeviceMetadata(type=device, name="NVIDIA H100"))
        save(run, run_file(tmp_path, rank))
    notes = [note for note in perfscope.analyze(tmp_path).notes if note.kind == "no_device_events"]
    assert [note.ranks for note in notes] == [(0, 1)] * noted
    assert all("CUPTI" in note.text for note in notes)
