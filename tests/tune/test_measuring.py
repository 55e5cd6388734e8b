"""Step times of a trial, and what is noise."""

from __future__ import annotations

import numpy as np
import pytest

from perfscope.tune.measuring import LEAST_GAIN, Drift, Measurement, gain, measured


def exact(step_ns: float) -> Measurement:
    return Measurement(step_ns, 0.0, 24)


def test_batches_that_come_in_bursts_are_averaged_over_a_round_of_the_workers() -> None:
    bursts = np.tile([1.0, 1.0, 1.0, 9.0], 12)[None]
    assert measured(bursts, period=4) == Measurement(3.0, 0.0, 48)
    assert np.median(bursts) == 1.0


def test_a_step_takes_what_its_slowest_rank_takes() -> None:
    assert measured(np.array([[10.0] * 24, [12.0] * 24])).step_ns == 12.0


def test_one_long_interruption_does_not_count() -> None:
    steps = np.full((1, 48), 10.0)
    steps[0, 20] = 900.0
    assert measured(steps).step_ns == 10.0


def test_few_steps_are_one_block() -> None:
    found = measured(np.array([[4.0, 6.0, 8.0]]), period=16)
    assert (found.step_ns, found.error_ns, found.steps) == (6.0, 0.0, 3)


def test_the_error_is_that_of_the_median_of_the_blocks() -> None:
    """For independent steps it must cover the truth about as often as a standard error does."""
    rng = np.random.default_rng(1)
    runs = [measured(rng.normal(100.0, 10.0, (1, 48))) for _ in range(400)]
    far = [abs(run.step_ns - 100.0) for run in runs]
    typical = float(np.sqrt(np.mean([run.error_ns**2 for run in runs])))
    assert typical == pytest.approx(float(np.std([run.step_ns for run in runs])), rel=0.3)
    assert np.mean([distance < 3 * typical for distance in far]) > 0.98


def test_a_steady_slowdown_of_the_machine_is_no_gain() -> None:
    before, after = exact(100), exact(110)
    found = gain(exact(105), before, after, Drift((before, after)))
    assert found.share == pytest.approx(0.0)
    assert not found.real


def test_a_gain_must_be_worth_the_while() -> None:
    same = exact(100)
    quiet = Drift((same, same))
    assert gain(exact(100 * (1 - LEAST_GAIN) + 0.1), same, same, quiet).real is False
    assert gain(exact(100 * (1 - LEAST_GAIN) - 0.1), same, same, quiet).real is True


def test_noise_between_runs_counts_as_noise() -> None:
    runs = tuple(exact(step) for step in (100, 106, 98, 104))
    assert Drift(runs).noise == pytest.approx(0.048, abs=0.005)
    assert not gain(exact(93), runs[-2], runs[-1], Drift(runs)).real
    assert gain(exact(70), runs[-2], runs[-1], Drift(runs)).real


def test_noise_within_a_run_counts_as_noise() -> None:
    same = exact(100)
    assert not gain(Measurement(90.0, 5.0, 24), same, same, Drift((same, same))).real
