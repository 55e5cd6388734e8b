"""A mesh of 128 ranks with one at fault; ``tests.benchmarks.flight_dumps --ranks 1024`` times a larger one."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfscope import analyze
from tests.stuck.large import write_large


@pytest.mark.scale
@pytest.mark.parametrize("kind", ["sleep", "skip", "shape", "order"])
def test_the_rank_at_fault_of_many(tmp_path: Path, kind: str) -> None:
    guilty = write_large(tmp_path, 128, 300, kind)
    hang = analyze(tmp_path).hang
    assert hang is not None
    assert hang.missing_ranks == (guilty,)
