"""What the report says of messages whose other end was not found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.analyzers.measured import measured
from tests.generator import MS, JobSpec, ModelSpec, PipelineSpec, simulate

ALONE = JobSpec(
    ranks=4,
    strategy="pipeline",
    model=ModelSpec(layers=8),
    steps=4,
    pipeline=4,
    microbatches=4,
    ranks_per_host=1,
    host_clock_offsets_ns={1: 20 * MS, 2: -30 * MS, 3: 50 * MS},
    schedule=PipelineSpec(schedule="interleaved", chunks=2, coalesced=True, peers=False),
)
"""Every stage on a host, so on a clock, of its own; all steps are alike, which shows no clock."""


def kinds(folder: Path) -> dict[str, str]:
    return {note.kind: note.text for note in measured(folder).notes}


@pytest.mark.parametrize("missing", [False, True])
def test_of_recorded_ranks_they_are_not_said_to_be_missing(missing: bool, tmp_path: Path) -> None:
    simulate(ALONE).write(tmp_path)
    if missing:
        next(path for path in sorted(tmp_path.iterdir()) if "3" in path.name).unlink()
    found = kinds(tmp_path)
    assert ("participants_missing" in found) is missing
    assert ("messages_unpaired" in found) is not missing
