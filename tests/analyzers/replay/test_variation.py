"""How far the mean of few steps may be from that of many, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from perfscope.analyzers.replay.variation import most_below, of_odd_step, standard_error


def test_a_few_equal_steps_are_as_sure_as_one_more_that_differs() -> None:
    """A variance of 0.02² among four steps and the one that was not seen, and the mean of four of them."""
    assert standard_error(np.array([10, 10, 10, 10]), 0.02) == pytest.approx((0.02**2 / 4 / 4) ** 0.5)


def test_the_odd_step_is_apart() -> None:
    steps = np.array([10, 10, 10, 20])
    assert standard_error(steps, 0.02) == pytest.approx(0.005)
    # 10 more in one of four steps, whose mean is 12.5.
    assert of_odd_step(steps) == pytest.approx(10 / 4 / 12.5)


def test_of_two_steps_neither_is_odd() -> None:
    assert of_odd_step(np.array([10, 20])) == 0
    assert of_odd_step(np.array([0])) == 0, "a step that takes no time with a change"
    # Standard deviation 7.07, of a mean of 15, and a step that was not seen.
    assert standard_error(np.array([10, 20]), 0.0) == pytest.approx((0.5 * 50 / 15**2 / 2) ** 0.5)


def test_few_steps_say_less_of_the_quickest() -> None:
    """Of three steps three fifths of the quickest: 54 of 100."""
    assert most_below(np.array([90, 100, 110]), 100.0, 1.0) == pytest.approx(0.46)
