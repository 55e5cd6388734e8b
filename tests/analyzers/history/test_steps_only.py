"""The verdict on runs of which only step times were recorded."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from perfscope.analyzers.history.steps_only import _first_action, _headline
from perfscope.recording.metadata import RunMetadata
from perfscope.results.history import EVALUATE_LESS, History, HistoryStraggler, RankHistory


def rank(loading_us: float) -> RankHistory:
    return RankHistory(
        rank=0, host="node0", attempt=0, earlier_steps=0, first_step=1, last_step=100, steps=100, disturbed_steps=0,
        lost_steps=0, mean_us=1e5, median_us=1e5, p95_us=1e5, p99_us=1e5, max_us=1e5, outlier_steps=0, trend=0.0,
        stages_us={"dataloader": loading_us, "other": 1e5 - loading_us},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("evaluation_us", "delayed", "leads"), [(3e4, 0.0, True), (1e4, 0.0, False), (3e4, 0.4, False)]
)
def test_evaluations_that_take_much_of_the_time_are_named(evaluation_us: float, delayed: float, leads: bool) -> None:
    own = replace(rank(0.0), stages_us={"evaluation": evaluation_us, "other": 1e5 - evaluation_us})
    late = HistoryStraggler(
        ranks=(0,), hosts=(), pattern="steady", stage="forward", stages_us={}, steps=100, share_of_steps=1.0,
        first_step=1, last_step=100, excess_us=0.0, cost_us=1e5 * delayed, cost_share=delayed,
    )  # fmt: skip
    history = History(ranks=(own,), bins=(), outliers=(), slow_ranks=(), stragglers=(late,) * bool(delayed))
    job: Any = SimpleNamespace(runs={0: RunMetadata(mode="steps")}, launch=None)
    said = "Steps take 100 ms (median of 100); evaluations take 30% of the steps' time."
    assert (_headline(history, own) == said) is leads
    assert (_first_action(job, history, own) == EVALUATE_LESS) is leads


def test_ranks_that_are_late_in_turn_are_told_so() -> None:
    late = HistoryStraggler(
        ranks=(0, 1), hosts=(), pattern="rotating", stage="backward", stages_us={}, steps=90, share_of_steps=0.9,
        first_step=1, last_step=100, excess_us=5e4, cost_us=5e4, cost_share=0.49,
    )  # fmt: skip
    assert late.in_words() == (
        "ranks are late in turn in the backward, in 90% of the steps: waiting for them costs 49% of the time"
    )


@pytest.mark.parametrize(
    ("loading_us", "said"),
    [
        (0.0, "Steps take 100 ms (median of 100); no step is an outlier."),
        (3e3, "Steps take 100 ms (median of 100); data loading takes 3%, and no step is an outlier."),
        (2e4, "Steps take 100 ms (median of 100); data loading takes 20% of each step."),
    ],
)
def test_loading_is_told_where_there_is_any(loading_us: float, said: str) -> None:
    own = rank(loading_us)
    assert _headline(History(ranks=(own,), bins=(), outliers=(), slow_ranks=()), own) == said
