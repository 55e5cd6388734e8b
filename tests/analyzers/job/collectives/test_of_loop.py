"""Which collectives a training loop calls for itself: two ranks by hand, of one step each."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from perfscope.analyzers.job.collectives.matching import match
from perfscope.analyzers.job.collectives.of_loop import calls_per_step
from perfscope.analyzers.rank.analyze import analyze_rank
from tests.analyzers.job.collectives.matching_jobs import Rank

KB = 1024
"""Elements of bfloat16 that are 2 KiB."""


def called(
    *calls: tuple[str, int, int, str], optimizer: int = 1_000, forward: int = 500_000, late: int = 0
) -> dict[str, float]:
    """Calls per step of two ranks that issue ``calls`` (kind, when, elements, type) in one step: its optimizer ends at
    ``optimizer``, its forward begins at ``forward``; rank 1 issues all ``late`` after rank 0.
    """
    partials = {}
    for number in range(2):
        rank = Rank(number, 2, {"1": (0, 1)}, host="node")
        rank.builder.note("Optimizer.step#AdamW.step", optimizer - 500, optimizer)
        rank.builder.note("DistributedDataParallel.forward", forward, forward + 10_000)
        for kind, at, elements, dtype in calls:
            issued = at + late * number
            rank.kernel(kind, "1", issued + 100, issued + 4_000, elements, launch=issued, dtype=dtype)
        partials[number] = analyze_rank(rank.builder.build())
    steps = reduce(np.intersect1d, [partial.steps.number for partial in partials.values()])
    found, _, _ = match(partials, steps)
    return calls_per_step(partials, found, 1)


def test_numbers_between_optimizer_and_forward_count() -> None:
    assert called(("allreduce", 10_000, 1, "Float"), ("allreduce", 20_000, 100, "Float")) == {"all_reduce": 2}


@pytest.mark.parametrize(("at", "optimizer"), [(600_000, 1_000), (50_000, 100_000)])
def test_elsewhere_the_model_may_need_them(at: int, optimizer: int) -> None:
    """In the forward, and before the optimizer's step has ended (its range is half a µs)."""
    inside = ("allreduce", at if at > optimizer else optimizer - 300, 1, "Float")
    assert called(inside, optimizer=optimizer, forward=400_000 if at < optimizer else 595_000) == {}


def test_on_some_rank_it_was_issued_in_the_forward() -> None:
    assert called(("allreduce", 490_000, 1, "Float"), late=15_000) == {}


def test_parameters_that_are_averaged_are_not_metrics_nor_are_their_biases() -> None:
    weights, bias = ("allreduce", 10_000, 100 * KB, "BFloat16"), ("allreduce", 20_000, 8, "BFloat16")
    assert called(weights, bias) == {}
    assert called(weights, ("_allgather_base", 30_000, 8, "Long")) == {"all_gather": 1}


def test_objects_are_gathered_in_two() -> None:
    """Their sizes, then as many bytes as they take; bytes without sizes before them are data."""
    sizes, content = ("_allgather_base", 10_000, 2, "Long"), ("_allgather_base", 20_000, 100 * KB, "Byte")
    assert called(sizes, content) == {"all_gather": 2}
    assert called(content) == {}
    assert called(("allreduce", 10_000, 2, "Float"), content) == {"all_reduce": 1}
