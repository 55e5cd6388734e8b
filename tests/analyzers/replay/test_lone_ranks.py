"""Stages of a pipeline on one rank each, whose hosts pause in turn: nobody else does the work of any of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.analyzers.measured import measured
from tests.emulator import Cause, Job, Model, Recording, emulate, step_ns

STAGES = 3
JOB = Job(
    strategy="pipeline", ranks=STAGES, ranks_per_host=STAGES, stages=STAGES, microbatches=4, noise=0.03, item_every=1,
    model=Model(blocks=6, tokens=32768, width=512), recording=Recording(steps=12),
)  # fmt: skip


def pauses(*offsets: int, every: int = STAGES) -> Job:
    """Each rank pauses in every so many steps, for a quarter of one, this many steps later."""
    pause_ns = int(0.25 * step_ns(JOB))
    causes = [
        Cause("pause", pause_ns, (rank,), every=every, offset=offset, how="log") for rank, offset in enumerate(offsets)
    ]
    return replace(JOB, causes=tuple(causes))


def test_stages_that_pause_in_turn_are_one_straggler_that_rotates(tmp_path: Path) -> None:
    emulation = emulate(pauses(0, 1, 2))
    emulation.write(tmp_path)
    (row,) = measured(tmp_path).stragglers
    assert (row.pattern, row.cause, row.ranks) == ("rotating", "host", (0, 1, 2))
    lost_us = (emulation.step_ns - step_ns(JOB)) / 1e3
    assert row.lost_us == pytest.approx(lost_us, abs=0.03 * emulation.step_ns / 1e3)


def test_stages_that_pause_at_once_take_no_turns(tmp_path: Path) -> None:
    emulate(pauses(0, 0, 0)).write(tmp_path)
    assert all(row.pattern != "rotating" for row in measured(tmp_path).stragglers)


def test_stages_that_pause_seldom_take_no_turns(tmp_path: Path) -> None:
    """Pauses of a machine come here and there; what rotates delays most steps."""
    emulate(pauses(0, 1, 2, every=JOB.recording.steps)).write(tmp_path)
    assert all(row.pattern != "rotating" for row in measured(tmp_path).stragglers)
