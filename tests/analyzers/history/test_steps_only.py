"""The verdict on runs of which only step times were recorded."""

from __future__ import annotations

import pytest

from perfscope.analyzers.history.steps_only import _headline
from perfscope.results.history import History, RankHistory


def rank(loading_us: float) -> RankHistory:
    return RankHistory(
        rank=0, host="node0", attempt=0, earlier_steps=0, first_step=1, last_step=100, steps=100, disturbed_steps=0,
        lost_steps=0, mean_us=1e5, median_us=1e5, p95_us=1e5, p99_us=1e5, max_us=1e5, outlier_steps=0, trend=0.0,
        stages_us={"dataloader": loading_us, "other": 1e5 - loading_us},
    )  # fmt: skip


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
