"""Tests of significance against tables and definitions, and how often they cry wolf."""

from __future__ import annotations

import math

import numpy as np
import pytest

from perfscope.analyzers.compare.significance import (
    effective_size,
    holm,
    student_cdf,
    student_quantile,
    two_sample_test,
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
    found = two_sample_test(np.array([1.0, 2, 3, 4, 5]), np.array([2.0, 4, 6, 8, 10]))
    assert found is not None
    assert found.means.delta == 3
    assert found.means.error == pytest.approx(math.sqrt(2.5))
    assert found.means.degrees == pytest.approx(6.25 / 1.0625)
    assert found.means.p == pytest.approx(0.107, abs=1e-3)


def test_yuen_by_hand() -> None:
    # Of 1 2 3 4 90 the middle is 2 3 4; drawn in: 2 2 3 4 4 with variance 1, so 4 * 1 / (3 * 2) is its error squared.
    found = two_sample_test(np.array([1.0, 2, 3, 4, 90]), np.array([11.0, 12, 13, 14, 15]))
    assert found is not None
    assert found.trimmed.delta == 10
    assert found.trimmed.error == pytest.approx(math.sqrt(2 * 4 / 6))
    assert found.trimmed.degrees == pytest.approx(4)


def test_samples_without_spread() -> None:
    same = two_sample_test(np.full(3, 5.0), np.full(3, 5.0))
    other = two_sample_test(np.full(3, 5.0), np.full(3, 6.0))
    assert same is not None
    assert same.p == 1
    assert other is not None
    assert (other.p, other.means.delta, other.means.half_width(0.99)) == (0, 1, 0)


def test_one_value_is_no_sample() -> None:
    assert two_sample_test(np.array([1.0]), np.array([1.0, 2.0])) is None


def test_an_odd_step_hides_a_shift_from_the_means_only() -> None:
    baseline = np.array([100.0, 101, 99, 100.5, 100.2, 99.7, 100.1, 99.4])
    found = two_sample_test(baseline, np.array([90.0, 91, 89, 90.5, 90.2, 89.7, 89.9, 400]))
    assert found is not None
    assert found.means.p > 0.1
    assert found.p < 0.001
    assert found.trimmed.delta == pytest.approx(-10, abs=0.5)


def test_neighbours_that_resemble_count_for_fewer() -> None:
    rng = np.random.default_rng(1)
    drifting = np.cumsum(rng.normal(size=100))
    assert effective_size(drifting) < 20
    assert effective_size(rng.normal(size=100)) == 100
    assert effective_size(np.arange(5.0)) == 5


def test_holm_holds_the_chance_of_any_false_alarm() -> None:
    assert holm([0.001, 0.02, 0.2], 0.05) == [True, True, False]
    assert holm([0.02, 0.02, 0.02], 0.05) == [False, False, False]
    assert holm([], 0.05) == []


@pytest.mark.parametrize("steps", [5, 12])
@pytest.mark.parametrize("kind", ["normal", "skewed", "odd last step"])
def test_false_alarms_are_as_rare_as_claimed(steps: int, kind: str) -> None:
    """Steps of one distribution, some as real ones: a long tail, a last step that is cut."""
    rng = np.random.default_rng(steps)
    alarms, pairs = 0, 1000

    def sample() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        values = np.exp(rng.normal(0, 0.2, steps)) if kind == "skewed" else rng.normal(100, 3, steps)
        if kind == "odd last step":
            values[-1] = 30
        return values

    for _ in range(pairs):
        found = two_sample_test(sample(), sample())
        assert found is not None
        alarms += found.p < 0.01
    assert alarms / pairs < 0.01 + 3 * math.sqrt(0.01 / pairs)


def test_a_true_difference_is_found() -> None:
    rng = np.random.default_rng(3)
    found = [two_sample_test(rng.normal(100, 3, 8), rng.normal(110, 3, 8)) for _ in range(200)]
    assert sum(one is not None and one.p < 0.01 for one in found) > 180
