"""Medians by group, weighted medians, and trends beside labels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfscope.trace.medians import fit_lines, median_by, middle_of, weighted_median

SECOND = 1_000_000_000
labelled = st.lists(st.tuples(st.integers(0, 4), st.integers(-(1 << 61), 1 << 61)), max_size=30)


@given(labelled)
def test_medians_are_those_of_numpy(samples: list[tuple[int, int]]) -> None:
    label, value = (np.array([sample[at] for sample in samples], dtype=np.int64) for at in (0, 1))
    found = median_by(label, value, 6)
    for each in range(6):
        own = sorted(value[label == each].tolist())
        low, high = (own[(len(own) - 1) // 2], own[len(own) // 2]) if own else (0, 0)
        assert found[each] == low + (high - low) // 2


def test_middle_is_half_way_between_the_extremes() -> None:
    assert middle_of(np.array([0, 0, 2]), np.array([10, 30, 7]), 3).tolist() == [20, 0, 7]


def test_weighted_median_is_where_half_of_the_weight_is_reached() -> None:
    value = np.array([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0], [1.0, 1.0, 1.0]])
    weight = np.array([[1.0, 1.0, 1.0], [5.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    assert weighted_median(value, weight)[:2].tolist() == [2.0, 3.0]
    assert np.isnan(weighted_median(value, weight)[2])


def test_a_trend_is_found_beside_a_label_without_one() -> None:
    x = np.tile(np.arange(50) * SECOND // 10, 2)
    label = np.repeat([0, 1], 50)
    noise = np.random.default_rng(3).integers(-500, 500, 100)
    y = np.where(label == 0, 7000 + x // 50_000, 9000) + noise
    lines = fit_lines(label, x, y, 2)
    assert lines.slope[0] == pytest.approx(20e-6, rel=0.02)
    assert lines.slope[1] == 0
    assert lines.offset[0] == pytest.approx(7000, abs=200)
    assert lines.at(np.array([0]), np.array([SECOND]))[0] == pytest.approx(27_000, abs=300)


def test_a_trend_survives_late_samples() -> None:
    x = np.arange(60) * SECOND // 10
    y = x // 100_000
    y[::5] += 3_000_000  # a descheduled thread
    lines = fit_lines(np.zeros(60, dtype=np.int64), x, y, 1)
    assert lines.slope[0] == pytest.approx(10e-6, rel=0.01)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("count", [16, 40])
def test_chance_is_no_trend(count: int, seed: int) -> None:
    dice = np.random.default_rng(seed)
    x = np.sort(dice.integers(0, SECOND, count))
    y = dice.normal(0, 20_000, count).astype(np.int64)
    assert fit_lines(np.zeros(count, dtype=np.int64), x, y, 1).slope[0] == 0


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (np.arange(15) * SECOND, np.arange(15) * 100_000),  # too few
        (np.arange(40) * SECOND, np.arange(40) * SECOND // 100),  # one percent: no clock
        (np.arange(40) * 1000, np.arange(40)),  # 39 ns in all
        (np.zeros(40, dtype=np.int64), np.arange(40) * 1000),  # one moment
    ],
)
def test_what_cannot_be_a_clocks_trend_is_none(x: np.ndarray, y: np.ndarray) -> None:
    assert fit_lines(np.zeros(len(x), dtype=np.int64), x.astype(np.int64), y.astype(np.int64), 1).slope[0] == 0
