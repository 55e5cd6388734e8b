"""Causes of ranks whose steps as a whole do not tell them."""

from __future__ import annotations

from pathlib import Path

from tests.analyzers.measured import measured
from tests.emulator.draw import draw
from tests.emulator.emulate import emulate

PAUSING = 18310
"""Two ranks under FSDP: rank 0 computes 1.3 times as long; rank 1 pauses for a checkpoint in two steps, for less than
that in each of them."""
LATE_AT_FIRST = 18628
"""Four ranks, two recorded steps: rank 3 came late to the first for its loader. What each computes varies by 3 %."""


def causes(seed: int, folder: Path) -> dict[tuple[int, ...], str]:
    """Ranks of each straggler -> its cause."""
    emulate(draw(seed).job).write(folder)
    return {row.ranks: row.cause for row in measured(folder).stragglers}


def test_a_rank_that_is_slower_in_no_step_is_slow_by_its_longer_part(tmp_path: Path) -> None:
    assert causes(PAUSING, tmp_path) == {(0,): "compute", (1,): "host"}


def test_work_spread_evenly_does_not_make_a_loader_quicker(tmp_path: Path) -> None:
    assert causes(LATE_AT_FIRST, tmp_path) == {(3,): "dataloader"}
