"""Dumps of real jobs with known faults (nvidia-resiliency-ext, Apache-2.0): skipped where they are not at hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perfscope.analyzers.analyze import analyze

FAULTS = ("gpu_error_2nd", "lock_gil_1st")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_ranks_with_faults_are_named(fault: str, root: Path) -> None:
    folder = root.parent / "shared" / "traces" / "flight_recorder" / fault
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    faulty = re.search(r"Fault ranks: \[(.*)\]", (folder / "fault_injection.log").read_text())
    assert faulty is not None
    hang = analyze(folder).hang
    assert hang is not None
    assert hang.missing_ranks == tuple(int(rank) for rank in faulty[1].split(","))
    # The first that the other ranks of the last stage issued and the faulty ones did not.
    assert (hang.group_description, hang.group, hang.collective) == ("EXPERT_MODEL_PARALLEL_GROUP", "72", "all_to_all")
    assert hang.waiting_ranks == (8, 10, 11, 12, 13, 15)
    assert hang.confidence == "high"
    assert {rank for row in hang.victims for rank in row.ranks} == set(range(8))
