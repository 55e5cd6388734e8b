"""What the training loop computes beside the training, over the ranks of a job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfscope.analyzers.job.extra_work import loop_work_costs
from perfscope.analyzers.rank.partial import LoopWork


def rank(*took_ms: float, name: str = "hooks") -> Any:
    """A rank whose loop takes so long in each of its steps, of which the last is not used; without any it has none."""
    took = np.array([*took_ms, 99.0]) * 1e6
    work = LoopWork(name, took.astype(np.int64), np.full(len(took), 3), ("aten::norm",), of_model=False)
    steps = SimpleNamespace(indices_of=lambda _: np.arange(len(took) - 1))
    return SimpleNamespace(loop_work=(work,) if took_ms else (), steps=steps)


@pytest.mark.parametrize(
    ("ranks", "us"),
    [
        ([rank(10, 20), rank(14, 16)], 15_000.0),
        ([rank(10), rank(20)], 15_000.0),
        ([rank(19, 19), rank(0.2, 0.4)], 300.0),
        ([rank(10), rank(30), rank(20)], 20_000.0),
        ([rank(10), rank(), rank(20)], 15_000.0),
        ([rank(10), rank()], None),
    ],
    ids=["alike", "unlike", "one of two alone", "three", "two of three", "half of them"],
)
def test_what_most_ranks_do_counts(ranks: list[Any], us: float | None) -> None:
    result: Any = SimpleNamespace(partials=dict(enumerate(ranks)), steps=(4, 5))
    costs = loop_work_costs(result)
    assert [cost.us for cost in costs] == ([] if us is None else [pytest.approx(us)])
    assert all((cost.part, cost.forwards, cost.operators) == ("hooks", 3.0, ("aten::norm",)) for cost in costs)
