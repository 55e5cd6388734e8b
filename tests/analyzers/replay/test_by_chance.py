"""Single ranks that were slower by chance, where all vary from step to step, against those that are slow."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from perfscope.analyzers.replay.stragglers.own_time import by_chance
from perfscope.trace.trace import Int64

# Own times of three ranks in 24 steps of a healthy job on a busy machine, 0.1 ms.
HEALTHY = (
    (
        188, 241, 241, 185, 239, 231, 230, 230, 267, 294, 203, 234,
        233, 221, 226, 226, 187, 306, 237, 254, 327, 185, 199, 190,
    ),
    (
        213, 203, 249, 188, 255, 190, 209, 217, 217, 273, 215, 289,
        246, 217, 246, 231, 217, 223, 237, 239, 196, 194, 197, 194,
    ),
    (
        259, 227, 359, 217, 225, 236, 276, 289, 228, 226, 249, 235,
        206, 187, 207, 326, 265, 317, 188, 187, 196, 279, 213, 189,
    ),
)  # fmt: skip


def over_others(own: Int64) -> dict[int, Int64]:
    """By how much each of three ranks exceeds the mean of the others."""
    return {rank: own[rank] - np.delete(own, rank, axis=0).sum(axis=0) // 2 for rank in range(3)}


def varying(seed: int, steps: int) -> Int64:
    """Own times of three ranks that vary by a tenth."""
    random = Random(seed)
    return np.array([[round(random.gauss(1000, 100)) for _ in range(steps)] for _ in range(3)])


def test_a_rank_of_a_healthy_job_is_slower_by_chance() -> None:
    assert by_chance(over_others(np.array(HEALTHY))) == {0, 1, 2}


def test_most_healthy_jobs_have_no_other_rank() -> None:
    found = [by_chance(over_others(varying(seed, 24))) for seed in range(200)]
    assert sum(len(ranks) for ranks in found) >= 0.97 * 3 * 200


@pytest.mark.parametrize(
    ("every", "longer"), [(1, 150), (3, 400), (24, 1200)], ids=["steady", "every third step", "one pause"]
)
def test_a_slow_rank_is_not_there_by_chance(every: int, longer: int) -> None:
    for seed in range(20):
        own = varying(seed, 24)
        own[2, ::every] += longer
        assert 2 not in by_chance(over_others(own)), seed


def test_one_step_tells_nothing_of_chance() -> None:
    assert by_chance({0: np.array([-50]), 1: np.array([50])}) == {0}
