"""The step from which on a run takes another time, in steps by hand and drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from perfscope.analyzers.history.level import step_change
from perfscope.results.history import HistoryBin

NOISE = np.random.default_rng(7)


def bins(times_ms: Sequence[float], *, width: int = 1, first: int = 0) -> list[HistoryBin]:
    return [
        HistoryBin(first_step=begin, last_step=begin + width - 1, median_us=ms * 1e3, max_us=ms * 1e3)
        for begin, ms in zip(range(first, first + width * len(times_ms), width), times_ms, strict=True)
    ]


def noisy(*levels: tuple[int, float]) -> list[float]:
    """So many steps of so many ms each, with a standard deviation of 10 %."""
    return [ms * (1 + 0.1 * z) for count, ms in levels for z in NOISE.standard_normal(count)]


@pytest.mark.parametrize(("before", "after"), [(30.0, 80.0), (80.0, 30.0), (30.0, 60.0)])
def test_a_step_from_which_on_all_take_another_time(before: float, after: float) -> None:
    change = step_change(bins(noisy((13, before), (90, after)), first=17))
    assert change is not None
    assert change.first_step == 30
    assert not change.about
    assert change.slower is (after > before)
    assert change.before_us == pytest.approx(before * 1e3, rel=0.1)
    assert change.after_us == pytest.approx(after * 1e3, rel=0.05)
    assert change.share_after == pytest.approx(90 * after / (90 * after + 13 * before), rel=0.02)


def test_of_long_runs_it_is_known_to_a_bin() -> None:
    change = step_change(bins(noisy((100, 30.0), (100, 60.0)), width=64))
    assert change is not None
    assert (change.first_step, change.about) == (6_400, True)
    assert change.in_words().startswith("from about step 6,400 on steps take ")


@pytest.mark.parametrize(
    "times",
    [
        noisy((200, 30.0)),
        [30.0 + 0.3 * step for step in range(200)],  # a drift: twice as long at the end, and no edge
        [30.0 * (1 + 0.004 * step) + ms - 30.0 for step, ms in enumerate(noisy((200, 30.0)))],
        noisy((6, 90.0), (190, 30.0)),  # a start
        noisy((190, 30.0), (6, 90.0)),  # an end
        noisy((60, 30.0), (40, 32.0)),  # less than noise
        [*noisy((50, 30.0)), *[30.0, 80.0] * 40],  # every other step pauses from then on
        noisy((8, 30.0)),
        [],
    ],
    ids=["steady", "drift", "noisy drift", "start", "end", "little", "every other", "short", "nothing"],
)
def test_no_plain_change(times: list[float]) -> None:
    assert step_change(bins(times)) is None
