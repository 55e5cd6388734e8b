"""Who is steadily slow by its pauses, though ranks seem to be slow in turn."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.replay.stragglers.steady_pauses import with_steady_pauser, with_steady_pauses
from perfscope.results.categories import TimeCategory
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
    named = {"the loop": pauses, "the backward": elsewhere}
    return SimpleNamespace(named_host=named, steps=steps, has_device_work=False)


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


def added(
    *ranks: Any, waits_ms: float = 14.0, told: tuple[StragglerRow, ...] = (), core_ms: tuple[Any, ...] = ()
) -> tuple[StragglerRow, ...]:
    """Of a job of which ``told`` is known; all but rank 0 wait so long per step for late ranks."""
    totals = {}
    for number in range(len(ranks)):
        totals[number] = np.zeros((len(STEPS), len(TimeCategory)), dtype=np.int64)
        totals[number][:, TimeCategory.COMM_WAIT] = round(waits_ms * 1e6) if number else 0
    result: Any = SimpleNamespace(
        partials=dict(enumerate(ranks)), steps=STEPS, step_ns=STEP_MS * 1e6, totals=totals,
        hosts=SimpleNamespace(names={0: "vm"}),
    )  # fmt: skip
    core = {number: (np.array(ms) * 1e6).astype(np.int64) for number, ms in enumerate(core_ms)}
    return with_steady_pauser(told, result, core)


ALWAYS, NEVER = rank(*[16] * 8), rank(*[1] * 8)


def test_who_pauses_in_the_same_place_in_each_step_is_named_whatever_it_waits_for_cores() -> None:
    """15 ms longer than the other, which waits 14 for it; both wait for cores, now one for longer and now the other."""
    (one,) = added(ALWAYS, NEVER, core_ms=((50, 40, 20, 50, 20, 40, 10, 30), (40, 0, 30, 10, 40, 10, 0, 0)))
    assert (one.rank, one.cause, one.scope, one.pattern, one.host) == (0, "host", "rank", "steady", "vm")
    assert (one.steps, one.share_of_steps) == (STEPS, 1.0)
    assert one.lost_us == 14_000.0


def test_it_takes_the_place_of_what_is_told_of_the_rank_for_less() -> None:
    little = StragglerRow(rank=0, cause="host", lost_us=3_000.0, confidence="medium", ranks=(0,))
    other = replace(little, rank=1, ranks=(1,), lost_us=20_000.0)
    kept, one = added(ALWAYS, NEVER, NEVER, told=(other, little))
    assert (kept, one.rank, one.lost_us) == (other, 0, 14_000.0)
    enough = replace(little, lost_us=8_000.0)
    assert added(ALWAYS, NEVER, told=(enough,)) == (enough,)


@pytest.mark.parametrize(
    "rows",
    [
        added(ALWAYS, NEVER, waits_ms=5),
        added(rank(16, 16, 16, 16, 16, 1, 1, 16), NEVER),
        added(rank(16, 16, 16, 16, 16, 16, 16, 1), NEVER, core_ms=((0, 0, 12, 12, 0, 0, 0, 0), (0,) * 8)),
        added(ALWAYS, ALWAYS),
        added(ALWAYS),
    ],
    ids=["nobody waits", "in six of eight steps", "as it waits for cores in two more", "both", "alone"],
)
def test_nobody_else_is(rows: tuple[StragglerRow, ...]) -> None:
    assert rows == ()
