"""A rank that is late in a few of many steps: slow, or no more than its peers are now and then?"""

from __future__ import annotations

import numpy as np
import pytest

from perfscope.analyzers.replay.stragglers.chance import (
    are_few,
    by_chance,
    by_same_share,
    least_told_ns,
    rests_on_long_steps,
    rests_on_one_step,
)
from perfscope.trace.trace import Int64

STEP_NS = 100_000_000


def own(steps: int, ranks: int = 4, noise: float = 0.01, seed: int = 0) -> Int64:
    """Own time of ranks that do the same [rank, step]: 80 % of the step, with noise."""
    drawn = np.random.default_rng(seed).normal(0.8, noise, (ranks, steps))
    return np.asarray(drawn * STEP_NS, dtype=np.int64)


def with_delay(times: Int64, rank: int, steps: slice | list[int], share: float) -> Int64:
    """That rank takes longer in these steps."""
    late = times.copy()
    late[rank, steps] += round(share * STEP_NS)
    return late


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_noise_is_chance_and_a_delay_is_none(ranks: int) -> None:
    times = own(30, ranks)
    assert all(by_chance(rank, [times], STEP_NS) for rank in range(ranks))
    assert not by_chance(1, [with_delay(times, 1, slice(None), 0.06)], STEP_NS)
    assert not by_chance(1, [with_delay(times, 1, [2, 5, 9, 14, 20, 26], 0.12)], STEP_NS)


def test_one_pause_among_many_steps_is_chance_and_among_few_it_is_not_known_to_be() -> None:
    assert by_chance(1, [with_delay(own(30), 1, [7], 0.5)], STEP_NS)
    assert not by_chance(1, [with_delay(own(6), 1, [3], 0.5)], STEP_NS)


def test_of_a_few_steps_a_mean_within_their_noise_is_chance() -> None:
    """Of two ranks alike each recording of 6 steps shows one to be slower; one that is slow is no chance."""
    alike = [own(6, 2, noise=0.03, seed=seed) for seed in range(200)]
    told = [not by_chance(rank, [times], STEP_NS) for times in alike for rank in (0, 1)]
    assert np.mean(told) < 0.05
    slow = [with_delay(times, 1, slice(None), 0.06) for times in alike]
    assert np.mean([by_chance(1, [times], STEP_NS) for times in slow]) < 0.2
    assert not by_chance(1, [with_delay(own(6, 2, noise=0.005), 1, slice(None), 0.03)], STEP_NS)
    assert not by_chance(1, [own(3, 2, noise=0.03)], STEP_NS)  # how much three steps vary they hardly show


def test_what_one_of_two_ranks_takes_longer_in_a_few_long_steps_is_looked_at() -> None:
    """Two of eight steps take 6 times as long on both ranks, which vary by a fifth there and by more in short ones."""
    own_ms = np.array([[54.1, 3.1, 7.5, 10.0, 69.5, 6.4, 3.3, 3.6], [46.0, 9.9, 5.6, 4.2, 64.6, 6.1, 3.7, 5.0]])
    times, saved = (np.asarray(ms * 1e6, np.int64) for ms in (own_ms, np.array([8.1, 0, 1.1, 3.0, 3.4, 0, 0, 0])))
    assert rests_on_long_steps(saved, times, 21e6)
    assert not by_same_share(0, times)
    slow = times.copy()
    slow[0] = 1.3 * times[1]
    assert by_same_share(0, slow)
    assert not rests_on_long_steps(saved + 2_000_000, times, 21e6)  # it costs much in the other steps, too
    assert not rests_on_long_steps(saved, own(8, 2), 21e6)  # no step is long on both
    alone = with_delay(own(8, 2), 0, [0, 4], 1.0)
    assert not rests_on_long_steps(alone[0] - alone[1], alone, STEP_NS)  # one that is long on one rank is that rank's


def test_what_comes_to_another_rank_as_often_is_chance() -> None:
    late = with_delay(own(30, 2), 1, [2, 5, 9, 14, 20], 0.12)
    assert not by_chance(1, [late], STEP_NS)
    assert by_chance(1, [with_delay(late, 0, [3, 8, 15], 0.12)], STEP_NS)


def test_a_part_shows_what_the_noise_of_the_rest_hides() -> None:
    rest, part = own(30, noise=0.05), own(30, noise=0.002, seed=1)
    late = with_delay(part, 2, [2, 5, 9, 14, 20], 0.08)
    assert by_chance(2, [rest + late], STEP_NS)
    assert not by_chance(2, [rest + late, late], STEP_NS)


def test_a_small_loss_that_rests_on_one_step_is_no_rank_s() -> None:
    """24 steps save 3 % in all: 9 of the 17 ms in one of them, or alike in six."""
    saved = np.zeros(24, dtype=np.int64)
    saved[[3, 7, 11, 15, 19]] = [9_000_000, 2_500_000, 2_500_000, 2_000_000, 1_000_000]
    assert rests_on_one_step(saved, noise_ns=500_000)
    assert not rests_on_one_step(saved[:15], noise_ns=500_000)  # of few steps once is often enough
    saved[[3, 7, 11, 15, 19, 23]] = 2_900_000
    assert not rests_on_one_step(saved, noise_ns=500_000)


def test_what_costs_no_more_than_steps_vary_by_is_asked_about() -> None:
    """The difference of two ranks varies by 1.4 times what each of them does; a rank that is far above is no noise."""
    assert least_told_ns(own(30, 2, noise=0.01), STEP_NS) == 0.05 * STEP_NS
    varied = own(200, 2, noise=0.10)
    assert least_told_ns(varied, STEP_NS) == pytest.approx(0.14 * STEP_NS, rel=0.15)
    assert least_told_ns(with_delay(varied, 1, slice(None), 0.5), STEP_NS) == least_told_ns(varied, STEP_NS)
    assert least_told_ns(own(6, 2, noise=0.10), STEP_NS) == 0.05 * STEP_NS  # too few steps to ask


def test_steps_that_are_far_above_do_not_hide_one_another() -> None:
    """Ten of 30 are late by 8 %: the middle of the differences is then far from that of usual steps."""
    late = with_delay(own(30, 2, noise=0.01), 1, slice(0, 30, 3), 0.08)
    assert not by_chance(1, [late], STEP_NS)
    assert by_chance(0, [late], STEP_NS)


def test_few_of_many_ranks_in_many_steps_are_no_chance() -> None:
    assert are_few(2, 8, 8)
    assert not are_few(2, 8, 4)
    assert not are_few(2, 4, 8)
    assert not are_few(8, 8, 100)
