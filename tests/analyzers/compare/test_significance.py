"""Tests of significance against tables and definitions, and how often they cry wolf."""

from __future__ import annotations

import math

import numpy as np
import pytest

from perfscope.analyzers.compare.significance import (
    effective_size,
    holm,
    regular_steps,
    separation,
    student_cdf,
    student_quantile,
    welch_test,
)


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    # Student's t, from any table of it.
    [(0.975, 1, 12.7062), (0.995, 5, 4.0321), (0.975, 10, 2.2281), (0.95, 30, 1.6973), (0.995, 1000, 2.5808)],
)
def test_students_t_is_that_of_the_tables(probability: float, degrees: float, expected: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(expected, abs=1e-4)
    assert student_cdf(expected, degrees) == pytest.approx(probability, abs=1e-5)
    assert student_cdf(-expected, degrees) == pytest.approx(1 - probability, abs=1e-5)


def test_welch_by_hand() -> None:
    # Variances 2.5 and 10 of five values each: error sqrt(2.5/5 + 10/5), degrees 2.5^2 / (0.5^2/4 + 2^2/4).
    found = welch_test(np.array([1.0, 2, 3, 4, 5]), np.array([2.0, 4, 6, 8, 10]))
    assert found is not None
    assert found.delta == 3
    assert found.error == pytest.approx(math.sqrt(2.5))
    assert found.degrees == pytest.approx(6.25 / 1.0625)
    assert found.p == pytest.approx(0.107, abs=1e-3)


def test_the_interval_excludes_no_difference_exactly_where_p_is_small() -> None:
    rng = np.random.default_rng(7)
    for _ in range(300):
        found = welch_test(rng.normal(100, 3, 6), rng.normal(100 + rng.uniform(0, 12), 5, 8))
        assert found is not None
        assert (abs(found.delta) > found.half_width(0.99)) == (found.p < 0.01)


def test_samples_without_spread() -> None:
    same = welch_test(np.full(3, 5.0), np.full(3, 5.0))
    other = welch_test(np.full(3, 5.0), np.full(3, 6.0))
    assert same is not None
    assert same.p == 1
    assert other is not None
    assert (other.p, other.delta, other.half_width(0.99)) == (0, 1, 0)


def test_one_value_is_no_sample() -> None:
    assert welch_test(np.array([1.0]), np.array([1.0, 2.0])) is None


STEADY = [100.0, 101, 99, 100.5, 100.2, 99.7, 100.1, 99.4]


@pytest.mark.parametrize(
    ("times", "left_out"),
    [
        (STEADY, []),
        ([*STEADY[:7], 400.0], [7]),  # a checkpoint
        ([180.0, *STEADY[1:]], [0]),  # warm-up
        ([*STEADY[:7], 40.0], [7]),  # cut by the recording's end
        ([190.0, *STEADY[1:], *STEADY[:7], 40.0], [0, 15]),
        ([190.0, 170.0, *STEADY], [0, 1]),
        ([*STEADY[:7], 102.0], []),  # far off by their deviation, but not by much
        ([100.0, 100, 100, 300] * 3, []),  # four workers that stall together
        ([*STEADY[:7], 300.0] * 2, []),  # eight of them
        ([100.0, 100, 100, 300], []),  # too few to tell
        ([60.0, 140, 70, 130, 90, 100], []),
        ([], []),
    ],
)
def test_a_lone_odd_step_is_left_out_and_recurring_ones_are_not(times: list[float], left_out: list[int]) -> None:
    assert np.flatnonzero(~regular_steps(np.array(times))).tolist() == left_out


def test_an_odd_step_does_not_hide_a_shift() -> None:
    odd = np.array([90.0, 91, 89, 90.5, 90.2, 89.7, 89.9, 400])
    found = welch_test(np.array(STEADY), odd[regular_steps(odd)])
    assert found is not None
    assert found.p < 0.001
    assert found.delta == pytest.approx(-10, abs=0.5)


def test_samples_that_are_apart_differ_however_much_one_varies() -> None:
    """Batches come late in one recording only, in each step of it, and in some much more: Welch's test is not sure."""
    quick, starved = np.array([13.2, 13.3, 13.2, 13.1, 13.2, 13.3]), np.array([13.4, 15.3, 20.6, 19.4, 20.8, 20.5])
    test, apart = welch_test(quick, starved), separation(quick, starved)
    assert test is not None
    assert test.p > 0.01
    assert apart is not None
    assert (apart.gap, apart.p) == (pytest.approx(0.1), pytest.approx(2 / 924))
    assert separation(starved, quick) == apart
    assert separation(quick, np.append(starved, 13.0)) is None
    few = separation(quick[:2], starved[:2])
    assert few is not None
    assert few.p > 0.3


def test_neighbours_that_resemble_count_for_fewer() -> None:
    rng = np.random.default_rng(1)
    drifting = np.cumsum(rng.normal(size=100))
    assert effective_size(drifting) < 20
    assert effective_size(rng.normal(size=100)) == 100
    assert effective_size(np.arange(5.0)) == 5


def test_a_long_run_tells_better_whether_neighbours_resemble() -> None:
    """Eight steps that happen to rise, of a run in which nothing does."""
    rising = np.arange(8.0)
    rng = np.random.default_rng(1)
    assert effective_size(rising) == 2
    assert effective_size(rising, rng.normal(0, 1, 40)) == 8
    assert effective_size(rising, rng.normal(0, 1, 12)) == effective_size(rising)
    assert effective_size(rng.normal(0, 1, 8), np.arange(40.0)) == 8


def test_holm_holds_the_chance_of_any_false_alarm() -> None:
    assert holm([0.001, 0.02, 0.2], 0.05) == [True, True, False]
    assert holm([0.02, 0.02, 0.02], 0.05) == [False, False, False]
    assert holm([], 0.05) == []


@pytest.mark.parametrize("steps", [3, 5, 8, 12, 30])
@pytest.mark.parametrize("kind", ["normal", "skewed", "odd last step", "odd steps", "periodic"])
def test_false_alarms_are_as_rare_as_claimed(steps: int, kind: str) -> None:
    """Steps of one distribution, some as real ones: a long tail, a last step that is cut, now and then a
    pause, a loader's stalls.
    """
    rng = np.random.default_rng(steps)
    alarms, pairs = 0, 1500

    def sample() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        values = np.exp(rng.normal(0, 0.2, steps)) if kind == "skewed" else rng.normal(100, 3, steps)
        if kind == "odd last step":
            values[-1] = 30
        if kind == "odd steps":
            values += 200 * (rng.random(steps) < 0.08)
        if kind == "periodic":
            values[int(rng.integers(4)) :: 4] += 150
        return values[regular_steps(values)]

    for _ in range(pairs):
        found = welch_test(sample(), sample())
        assert found is not None
        alarms += found.p < 0.01
    assert alarms / pairs < 0.01 + 3 * math.sqrt(0.01 / pairs)


@pytest.mark.parametrize("steps", [8, 12, 30])
def test_false_alarms_stay_rare_where_neighbours_resemble_each_other(steps: int) -> None:
    """Not as rare as claimed, up to 4 %: so few steps show their correlation badly. The floor is for that."""
    rng = np.random.default_rng(steps)
    alarms, pairs = 0, 1500
    for _ in range(pairs):
        drawn = rng.normal(0, 3, (2, steps))
        for place in range(1, steps):
            drawn[:, place] += 0.3 * drawn[:, place - 1]
        found = welch_test(*(100 + drawn))
        assert found is not None
        alarms += found.p < 0.01
    assert alarms / pairs < 0.045


@pytest.mark.parametrize("odd", [False, True])
def test_a_true_difference_is_found(odd: bool) -> None:
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(200):
        first, second = rng.normal(100, 3, 8), rng.normal(110, 3, 8)
        if odd:
            first[0], second[-1] = 250.0, 40.0
        test = welch_test(first[regular_steps(first)], second[regular_steps(second)])
        found += test is not None and test.p < 0.01
    assert found > 180


def test_eight_drifting_steps_far_apart_differ() -> None:
    """As recorded: a loader's wait with no workers and with two, which drifts by some per cent within the steps."""
    without = np.array([63.0, 63.6, 63.9, 64.3, 63.6, 65.4, 62.9, 63.4])
    with_two = np.array([3.2, 1.6, 1.9, 2.1, 2.0, 4.0, 5.2, 5.1])
    found = welch_test(without, with_two)
    assert effective_size(with_two) < 3
    assert found is not None
    assert abs(found.delta) > found.half_width(1 - 0.01 / 11)  # of eleven categories together


@pytest.mark.parametrize(("correlation", "most"), [(0.0, 0.02), (0.3, 0.05), (0.6, 0.14)])
def test_correlated_samples_of_one_mean_rarely_differ(correlation: float, most: float) -> None:
    """Eight steps of a first-order autoregressive process each, at a level of 1 %."""
    rng = np.random.default_rng(11)
    wrong = 0
    for _ in range(1000):
        pair = []
        for _ in range(2):
            noise, steps = rng.normal(size=40), np.zeros(40)
            for at in range(1, 40):
                steps[at] = correlation * steps[at - 1] + math.sqrt(1 - correlation**2) * noise[at]
            pair.append(steps[-8:])
        found = welch_test(*pair)
        wrong += found is not None and found.p < 0.01
    assert wrong <= most * 1000
