"""Predictions in words."""

from __future__ import annotations

import pytest

from perfscope.results.findings import Prediction


@pytest.mark.parametrize(
    ("low", "mid", "high", "text"),
    [
        (50, 60, 80, "6.7x"),
        (3.6, 4, 39, "100x"),  # the upper end is not yet ten times the middle
        (3.6, 4, 253, "1.58x to 111x"),
        (12, 21, 253, "1.58x to 33x"),
        (20, 36, 400, "up to 20x"),  # nothing may be gained
        (20, 36, 500, "up to 20x"),
        (0, 4, 253, "1.58x or more"),
        (0, 4, 400, "1x or more"),
        (700, 800, 900, "0.5x"),
    ],
)
def test_a_speedup_is_that_of_the_middle_unless_the_range_says_more(
    low: float, mid: float, high: float, text: str
) -> None:
    """Of a step of 400 µs."""
    assert Prediction(low=low, mid=mid, high=high).speedup_of(400.0) == text


def test_no_speedup_of_a_step_that_takes_no_time() -> None:
    assert Prediction(low=0.0, mid=0.0, high=1.0).speedup_of(400.0) == "–"
