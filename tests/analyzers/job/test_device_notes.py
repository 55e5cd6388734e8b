"""Ranks that train on devices, and whose traces have none of their work."""

from __future__ import annotations

from pathlib import Path

import pytest

import perfscope
from perfscope.recording.metadata import DeviceMetadata
from tests.analyzers.job.recordings import record_on_cpus


@pytest.mark.parametrize(("device", "noted"), [("cuda", True), ("cpu", False)])
def test_the_run_knows_of_devices_that_the_trace_does_not_name(tmp_path: Path, device: str, *, noted: bool) -> None:
    record_on_cpus(tmp_path, device=DeviceMetadata(type=device, name="NVIDIA H100"))
    notes = [note for note in perfscope.analyze(tmp_path).notes if note.kind == "no_device_events"]
    assert [note.ranks for note in notes] == [(0, 1)] * noted
    assert all("CUPTI" in note.text for note in notes)
