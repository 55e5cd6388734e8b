"""Who is no straggler: ranks that are slow in the recorded steps alone, as unprofiled steps have no room for it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfscope.analyzers.replay.stragglers.profiling_effects import profiling_effect_notes, without_profiling_effects
from perfscope.results.categories import TimeCategory
from perfscope.results.rows import StragglerRow

SLOW = StragglerRow(rank=0, ranks=(0,), scope="rank", cause="compute", lost_us=230_000.0, confidence="high")


def recorded(
    *compute_ms: float, step_ms: float = 387.0, operators: int = 500, flops: tuple[int, int] = (10**9, 10**9)
) -> Any:
    """Two steps of ranks that compute for so long in each, in so many operators, of so many FLOPs."""
    totals, partials = {}, {}
    for rank, ms in enumerate(compute_ms):
        totals[rank] = np.zeros((2, len(TimeCategory)), dtype=np.int64)
        totals[rank][:, TimeCategory.COMPUTE] = round(ms * 1e6)
        totals[rank][:, TimeCategory.COMM_WAIT] = round((step_ms - ms) * 1e6)
        partials[rank] = SimpleNamespace(
            tables=SimpleNamespace(operators=SimpleNamespace(count=np.array([[operators, operators]]))),
            steps=SimpleNamespace(indices_of=lambda _: np.arange(2)),
            flops=SimpleNamespace(model=np.full((3, 2), flops[rank])),
        )
    return SimpleNamespace(totals=totals, partials=partials, step_ns=step_ms * 1e6, steps=[3, 4])


@pytest.mark.parametrize(
    ("result", "row", "unprofiled_ms", "named"),
    [
        (recorded(337, 104), SLOW, 154.0, False),
        (recorded(337, 104), SLOW, None, True),
        (recorded(337, 104), SLOW, 380.0, True),
        (recorded(337, 104), SLOW, 345.0, True),
        (recorded(337, 104), SLOW, 220.0, True),
        (recorded(337, 104), replace(SLOW, cause="host"), 154.0, True),
        (recorded(337, 104, operators=20_000), SLOW, 154.0, True),
        (recorded(337, 104, flops=(3 * 10**9, 10**9)), SLOW, 154.0, True),
        (recorded(337, 104, flops=(0, 0)), SLOW, 154.0, False),
        (recorded(337, 104), SLOW, 320.0, True),
        (recorded(337, 330), replace(SLOW, rank=1, ranks=(0, 1), scope="job"), 154.0, False),
        (recorded(337, 104), replace(SLOW, ranks=(0, 1), scope="job"), 154.0, True),
    ],
    ids=[
        "computes for more than twice an unprofiled step", "no such step was timed", "profiling changes little",
        "its compute fits", "without the wait the step would be far shorter", "what it takes longer is no compute",
        "recording the operators may take that long", "it has more work", "its work is not recorded",
        "its compute is hardly longer than the step", "both of them in turn", "one of them computes for less",
    ],
)  # fmt: skip
def test_a_rank_that_unprofiled_steps_have_no_room_for_is_not_named(
    result: Any, row: StragglerRow, unprofiled_ms: float | None, named: bool
) -> None:
    """Recorded steps take 387 ms, 230 of it for the rank that is slow there."""
    unprofiled_us = None if unprofiled_ms is None else unprofiled_ms * 1e3
    assert bool(without_profiling_effects([row], result, unprofiled_us)) is named


def test_a_note_says_so() -> None:
    (note,) = profiling_effect_notes([SLOW], recorded(337, 104), 154_000.0)
    assert note.text.startswith(
        "In the recorded steps the others waited for rank 0 59% of the step (slower compute), but what that rank takes "
        "for it (337 ms per step) is longer than a whole step without the profiler (154 ms)"
    )
    assert not list(profiling_effect_notes([], recorded(337, 104), 154_000.0))
