"""Steps that take far longer again and again: their period, whose they are, and when chance may explain them."""

from __future__ import annotations

import pytest

from perfscope.analyzers.history.long_steps import long_steps, of_one_kind, period_of
from perfscope.results.history import LongSteps, OutlierStep

RUN_US = 10_000_000.0


def outlier(step: int, longer_ms: float = 400, rank: int | None = 1, stage: str = "other") -> OutlierStep:
    """One step of 100 ms that takes so much longer."""
    us = 1000 * (100 + longer_ms)
    return OutlierStep(step=step, us=us, ratio=us / 100_000, ranks=(0, 1), rank=rank, stage=stage)


def found(*outliers: OutlierStep, compared: bool = True, least_us: float = RUN_US) -> LongSteps | None:
    ordered = sorted(outliers, key=lambda row: -row.us)
    return long_steps(ordered, 100, RUN_US, least_us=least_us, compared=compared)


def test_a_pause_of_one_rank_that_comes_regularly() -> None:
    again = found(*map(outlier, (20, 40, 60, 80)), outlier(33, 30), outlier(57, 20))
    assert again is not None
    assert (again.steps, again.period, again.rank, again.stage) == ((20, 40, 60, 80), 20, 1, "other")
    assert (again.longer_us, again.share) == (pytest.approx(400_000), pytest.approx(0.16))
    assert again.in_words() == (
        "every 20 steps (20, 40, 60 …) one takes 400 ms longer than those around it, on rank 1 outside of data "
        "loading, forward, backward and optimizer: 16% of the run's time"
    )


def test_a_pause_of_all_ranks_is_nobody_s() -> None:
    everywhere = [outlier(step, rank=None) for step in (20, 40, 60, 80)]
    again = found(*everywhere)
    assert again is not None
    assert (again.rank, again.on_all_ranks) == (None, True)
    unknown = found(*everywhere, compared=False)
    assert unknown is not None
    assert not unknown.on_all_ranks


def test_where_one_rank_has_no_long_steps_those_of_the_others_are_waits_for_it() -> None:
    """Four steps of a rank take 400 ms longer, as it then waits for one that is slow in every step."""
    pauses = [*map(outlier, (20, 40, 60, 80))]
    assert found(*pauses, least_us=0.0) is None
    assert found(*pauses, least_us=1_500_000.0) is not None


def test_steps_at_random_have_no_period_and_several_ranks_no_rank() -> None:
    again = found(*(outlier(step, rank=step % 3) for step in (7, 22, 41, 63, 80)))
    assert again is not None
    assert (again.period, again.rank, again.of_steps) == (None, None, 100)
    assert again.in_words().startswith(
        "5 of 100 steps (no regular ones, between 7 and 80) take 400 ms longer than those around them: 20%"
    )


def test_one_compilation_hides_no_pauses() -> None:
    again = found(outlier(2, 8000), *map(outlier, (20, 40, 60, 80)))
    assert again is not None
    assert again.steps == (20, 40, 60, 80)


@pytest.mark.parametrize(
    "outliers",
    [
        [],
        [outlier(20), outlier(40)],  # few
        [outlier(step, 40) for step in (20, 40, 60, 80)],  # 1.6 % of the run
        [outlier(step, stage="checkpoint") for step in (20, 40, 60, 80)],  # goodput names it
    ],
)
def test_what_is_no_word_worth(outliers: list[OutlierStep]) -> None:
    assert found(*outliers) is None


@pytest.mark.parametrize(
    ("numbers", "period"),
    [
        ([20, 40, 60, 80], 20),
        ([20, 40, 80, 120], 20),  # some of them in a capture
        ([20, 120, 220], 100),
        ([4, 8, 12], None),  # three numbers have a common divisor of 4 by chance in one of 16 cases
        ([4, 8, 12, 16, 20], 4),
        ([20, 40, 61, 80], None),
        ([20, 40, 400], None),  # not at most of those where it is due
        ([20, 20, 20], None),
        ([20, 40], None),
    ],
)
def test_the_period(numbers: list[int], period: int | None) -> None:
    assert period_of(numbers) == period


def test_what_is_longer_by_about_as_much() -> None:
    assert of_one_kind("abcde", [10.0, 4.0, 1.0, 0.2, 15.0]) == ["a", "b", "e"]
    assert of_one_kind("abcd", [10.0, 4.0, 1.0, 0.2]) == ["b", "c"]
    assert of_one_kind("a", [3.0]) == ["a"]
