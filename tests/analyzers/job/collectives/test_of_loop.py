"""Which collectives a training loop calls for itself: two ranks by hand, of one step each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import numpy as np
import pytest

from perfscope.analyzers.job.collectives.matching import match
from perfscope.analyzers.job.collectives.of_loop import calls_per_step, places_of_calls
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


IN_FORWARD, BEFORE_BACKWARD, BETWEEN_BATCHES, BEFORE_OPTIMIZER = 110_000, 160_000, 350_000, 700_000
"""When something is issued: in the first forward, behind it, behind its backward, or behind the last backward."""


def trained(
    *calls: tuple[str, int, int],
    groups: Mapping[str, tuple[int, ...]] | None = None,
    of_metrics: str = "1",
    function: tuple[int, int] | None = None,
    bucket: str = "allreduce",
) -> tuple[dict[str, float], tuple[str, ...]]:
    """The same of two ranks that issue ``calls`` (kind, when, elements of float32) in a step of two micro-batches with
    gradients reduced in the last backward, and when they are issued. An autograd function runs over ``function``.

    Forwards are from 100 to 150 µs and from 480 to 500, backwards from 200 to 300 and from 550 to 650, and the
    optimizer's step from 800 to 810.
    """
    partials = {}
    for number in range(2):
        rank = Rank(number, 2, groups or {"1": (0, 1)}, host="node")
        build = rank.builder
        for begin, end in ((100_000, 150_000), (480_000, 500_000)):
            build.note("DistributedDataParallel.forward", begin, end)
        for begin, end in ((200_000, 300_000), (550_000, 650_000)):
            build.note("perfscope::backward", begin, end)
        build.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 600_000, 610_000)
        build.note("Optimizer.step#AdamW.step", 800_000, 810_000)
        rank.kernel(bucket, "1", 605_100, 640_000, 100 * KB, launch=605_000, dtype="Float")
        if function is not None:
            build.op("_AllGather", *function)
        for kind, at, elements in calls:
            rank.kernel(kind, of_metrics, at + 100, at + 2_000, elements, launch=at, dtype="Float")
        partials[number] = analyze_rank(build.build())
    steps = reduce(np.intersect1d, [partial.steps.number for partial in partials.values()])
    found, _, _ = match(partials, steps)
    return calls_per_step(partials, found, 1), places_of_calls(partials, found)


METRIC = ("allreduce", IN_FORWARD, 1)


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (IN_FORWARD, "the forward"),
        (BEFORE_BACKWARD, "between forward and backward"),
        (BETWEEN_BATCHES, "between backward and forward"),
        (BEFORE_OPTIMIZER, "between backward and optimizer"),
        (900_000, "between optimizer and forward"),
    ],
)
def test_a_few_numbers_count_wherever_they_are_reduced(at: int, said: str) -> None:
    assert trained(("allreduce", at, 1)) == ({"all_reduce": 1}, (said,))
    assert trained(("allreduce", 570_000, 1)) == ({}, ())  # in the backward


def test_all_places_are_said_where_most_are_first() -> None:
    calls, places = trained(METRIC, *(("_allgather_base", BETWEEN_BATCHES + 5_000 * n, 64) for n in range(2)))
    assert calls == {"all_gather": 2, "all_reduce": 1}
    assert places == ("between backward and forward", "the forward")


def test_more_than_a_few_numbers_are_the_models_in_its_forward() -> None:
    """What is as small beside them is, too: counts of tokens, statistics."""
    assert trained(METRIC, ("allreduce", IN_FORWARD + 10_000, 64)) == ({}, ())
    assert trained(METRIC, ("all_to_allv", IN_FORWARD + 10_000, 64)) == ({}, ())
    assert trained(("_allgather_base", IN_FORWARD, 32)) == ({"all_gather": 1}, ("the forward",))
    assert trained(("_allgather_base", IN_FORWARD, 64 * 2)) == ({}, ())


def test_what_an_autograd_function_sends_is_the_models() -> None:
    assert trained(METRIC, function=(IN_FORWARD - 1_000, IN_FORWARD + 1_000)) == ({}, ())


def test_in_forwards_only_groups_of_data_parallel_ranks_count() -> None:
    """Not those of some of them, as of tensor or expert parallelism."""
    assert trained(METRIC, groups={"1": (0, 1), "2": (0, 1)}, of_metrics="2")[0] == {"all_reduce": 1}
    assert trained(METRIC, groups={"1": (0, 1), "2": (0, 1, 2)}, of_metrics="2")[0] == {"all_reduce": 1}
    assert trained(METRIC, groups={"1": (0, 1, 2), "2": (0, 1)}, of_metrics="2") == ({}, ())


def test_sharded_models_need_norms_of_their_gradients() -> None:
    assert trained(("allreduce", BEFORE_OPTIMIZER, 1), bucket="_reduce_scatter_base")[0] == {}
    assert trained(METRIC, bucket="_reduce_scatter_base")[0] == {"all_reduce": 1}
