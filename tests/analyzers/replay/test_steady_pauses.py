"""Who is steadily slow by its pauses, though ranks seem to be slow in turn."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.replay.stragglers.steady_pauses import with_steady_pauses
from perfscope.results.rows import StragglerRow

STEPS = tuple(range(8, 16))
STEP_MS = 120
IN_TURN = StragglerRow(
    rank=1, cause="host", lost_us=14_000.0, confidence="high", scope="job", ranks=(0, 1), pattern="rotating",
    steps=STEPS[:7],
)  # fmt: skip


def rank(*paused_ms: float) -> Any:
    """A rank that pauses for so long at the begin of each step, and for as long as it likes in its backward."""
    elsewhere_ns = np.random.default_rng(round(sum(paused_ms))).integers(0, 40_000_000, len(STEPS))
    start = np.arange(len(STEPS), dtype=np.int64) * STEP_MS * 1_000_000
    steps = SimpleNamespace(
        host_start_ns=start, host_end_ns=start + STEP_MS * 1_000_000, indices_of=lambda steps: np.arange(len(steps))
    )
    pauses = Intervals.of(start, start + (np.array(paused_ms) * 1e6).astype(np.int64))
    elsewhere = Intervals.of(start + 60_000_000, start + 70_000_000 + elsewhere_ns)
    return SimpleNamespace(named_host={"the loop": pauses, "the backward": elsewhere}, steps=steps)


def found(*ranks: Any, row: StragglerRow = IN_TURN) -> StragglerRow:
    result: Any = SimpleNamespace(partials=dict(enumerate(ranks)), steps=STEPS, step_ns=STEP_MS * 1e6)
    (only,) = with_steady_pauses([row], result)
    return only


def test_the_rank_that_pauses_in_nearly_every_step_is_slow_steadily() -> None:
    one = found(rank(16, 16, 16, 16, 36, 16, 16, 3), rank(*[1] * 8))
    assert (one.scope, one.rank, one.ranks, one.pattern) == ("rank", 0, (0,), "steady")
    assert one.steps == STEPS[:7]
    assert one.lost_us == 14_000.0
    # No more than its pauses are longer.
    assert found(rank(*[11] * 8), rank(*[1] * 8)).lost_us == pytest.approx(10_000.0)


@pytest.mark.parametrize(
    ("ranks", "row"),
    [
        ((rank(16, 1, 16, 1, 16, 1, 16, 1), rank(1, 16, 1, 16, 1, 16, 1, 16)), IN_TURN),
        ((rank(*[16, 16, 16, 16, 16, 1, 1, 1]), rank(*[1] * 8)), IN_TURN),
        ((rank(*[5] * 8), rank(*[1] * 8)), IN_TURN),
        ((rank(*[16] * 8), rank(*[1] * 8)), replace(IN_TURN, cause="compute")),
        ((rank(*[16] * 8), rank(*[1] * 8)), replace(IN_TURN, scope="ranks")),
    ],
    ids=["in turn", "in five of eight steps", "for little", "by another cause", "not in turn"],
)
def test_others_stay_as_they_are(ranks: tuple[Any, ...], row: StragglerRow) -> None:
    assert found(*ranks, row=row) == row
