"""Gradients that are reduced to one rank and broadcast back: two ranks by hand, of one step each."""

from __future__ import annotations

from functools import reduce

import numpy as np

from perfscope.analyzers.job.collectives.matching import match
from perfscope.analyzers.job.collectives.returned import groups_of_returned, returned_per_step
from perfscope.analyzers.rank.analyze import analyze_rank
from tests.analyzers.job.collectives.matching_jobs import Rank

BACKWARD, STEPPED = 100_000, 700_000
"""When the backward ends, and the optimizer's step begins."""


def called(*calls: tuple[str, int, int], steps: bool = True) -> tuple[float, frozenset[int]]:
    """What two ranks reduce and broadcast back per step, and in which groups; ``calls``: kind, when, elements."""
    partials = {}
    for number in range(2):
        rank = Rank(number, 2, {"1": (0, 1)}, host="node")
        rank.builder.op("autograd::engine::evaluate_function: AddmmBackward0", 1_000, BACKWARD)
        if steps:
            rank.builder.note("Optimizer.step#SGD.step", STEPPED, STEPPED + 100_000)
        for kind, at, elements in calls:
            rank.kernel(kind, "1", at + 100, at + 2_000, elements, launch=at)
        partials[number] = analyze_rank(rank.builder.build())
    found, _, _ = match(partials, reduce(np.intersect1d, [partial.steps.number for partial in partials.values()]))
    return returned_per_step(partials, found, 1), groups_of_returned(partials, found)


FIRST, SECOND = ("reduce", 110_000, 10_000), ("reduce", 130_000, 20_000)
BACK, BACK_OF_SECOND = ("broadcast", 120_000, 10_000), ("broadcast", 140_000, 20_000)


def test_each_reduction_has_a_broadcast_of_its_size() -> None:
    assert called(FIRST, BACK, SECOND, BACK_OF_SECOND) == (2, {0})
    assert called(("reduce", 105_000, 20_000), FIRST, BACK, BACK_OF_SECOND) == (2, {0})  # two loops
    assert called(FIRST, BACK, ("broadcast", 150_000, 1)) == (1, {0})


def test_other_sizes_or_another_order_is_none() -> None:
    assert called(FIRST, BACK_OF_SECOND) == (0, frozenset())
    assert called(("broadcast", 105_000, 10_000), FIRST) == (0, frozenset())
    assert called(FIRST) == (0, frozenset())


def test_parameters_that_their_owners_broadcast_after_the_step_are_none() -> None:
    """ZeRO-1 and 2; so may be what no optimizer's step parts."""
    assert called(FIRST, ("broadcast", STEPPED + 110_000, 10_000)) == (0, frozenset())
    assert called(FIRST, BACK, steps=False) == (0, frozenset())


def test_most_reductions_of_the_group_have_to_be_such() -> None:
    assert called(FIRST, BACK, SECOND, ("reduce", 150_000, 30_000)) == (1, frozenset())
    assert called(FIRST, BACK, SECOND, BACK_OF_SECOND, ("reduce", 150_000, 30_000)) == (2, {0})
