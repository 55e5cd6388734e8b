"""A rank that is slower than its peers in no step, and holds them up by a part of its work nevertheless."""

from __future__ import annotations

from pathlib import Path

from tests.analyzers.measured import measured
from tests.emulator.draw import draw
from tests.emulator.emulate import emulate

SEED = 18310
"""Two ranks under FSDP: rank 0 computes 1.3 times as long; rank 1 pauses for a checkpoint in two steps, for less than
that in each of them."""


def test_its_cause_is_that_part_and_not_what_it_does_sooner(tmp_path: Path) -> None:
    emulate(draw(SEED).job).write(tmp_path)
    causes = {row.rank: row.cause for row in measured(tmp_path).stragglers}
    assert causes == {0: "compute", 1: "host"}
