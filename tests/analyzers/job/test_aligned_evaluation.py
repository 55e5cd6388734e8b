"""Evaluations between training steps: their steps are left out, unless most steps are such."""

from __future__ import annotations

import pytest

from perfscope.analyzers.job.aligned import AlignedJob, align_job
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.recording.vocabulary import EVALUATION, FORWARD
from tests.traces import TraceBuilder


def job(evaluated: dict[int, set[int]], steps: int = 6, pauses: frozenset[int] = frozenset()) -> AlignedJob:
    """Ranks by the steps in which they evaluate: a step takes 100, an evaluation at its beginning 1000 more, and so do
    ``pauses`` at the ends of steps.
    """
    partials = {}
    for rank, evaluates in evaluated.items():
        builder = TraceBuilder(rank=rank, world_size=len(evaluated))
        now = 0
        for number in range(steps):
            begin = now
            if number in evaluates:
                builder.note(EVALUATION, now, now + 1000).op("aten::mm", now + 10, now + 900)
                now += 1000
            builder.note(FORWARD, now, now + 90).op("aten::mm", now, now + 80)
            now += 1100 if number in pauses else 100
            builder.step(number, begin, now)
        partials[rank] = analyze_rank(builder.build())
    return align_job(partials)


def test_a_step_with_an_evaluation_is_left_out() -> None:
    result = job({0: {2}})
    assert result.steps.tolist() == [0, 1, 3, 4, 5]
    assert result.evaluated.tolist() == [2]
    assert result.step_ns == 100
    assert result.evaluated_share == pytest.approx(1100 / 1600)


def test_one_rank_that_evaluates_is_enough() -> None:
    result = job({0: {2}, 1: set()})
    assert result.steps.tolist() == [0, 1, 3, 4, 5]


def test_without_an_evaluation_every_step_counts() -> None:
    result = job({0: set(), 1: set()})
    assert result.steps.tolist() == list(range(6))
    assert len(result.evaluated) == 0


@pytest.mark.parametrize(("evaluates", "mean"), [({0, 1, 2, 3, 4, 5}, 1100), ({1, 2, 3, 4}, 100 + 4000 / 6)])
def test_where_most_steps_evaluate_they_are_how_the_job_trains(evaluates: set[int], mean: float) -> None:
    result = job({0: evaluates})
    assert result.steps.tolist() == list(range(6))
    assert result.evaluated.tolist() == sorted(evaluates)
    assert result.step_ns == pytest.approx(mean)
    assert result.partials[0].named_host["evaluation"].measure() == 1000 * len(evaluates)
