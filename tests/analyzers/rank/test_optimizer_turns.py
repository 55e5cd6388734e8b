"""Training steps of several optimizers of one name: windows hold all of their turns, by what runs before each."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.steps import Steps
from tests.traces import TraceBuilder

MS = 1_000_000
DISCRIMINATOR, GENERATOR = ("aten::conv2d",) * 20 + ("aten::binary_cross_entropy",), ("aten::conv_transpose2d",) * 20


def steps(*turns: tuple[str, ...], times: int = 6) -> Steps:
    """Each turn runs its operators for 10 ms, then steps an Adam; the trace begins where the first one does."""
    builder, now = TraceBuilder(), 0
    for number in range(times * len(turns)):
        for name in turns[number % len(turns)]:
            builder.op(name, now, now + 400_000)
            now += 400_000
        builder.note("Optimizer.step#Adam.step", now, now + MS).op("aten::add_", now, now + MS)
        now += MS
    return analyze_rank(builder.build()).steps


@pytest.mark.parametrize(
    ("turns", "each_ms"),
    [
        ((DISCRIMINATOR, GENERATOR), (21 + 20) * 0.4 + 2),
        ((DISCRIMINATOR,) * 5 + (GENERATOR,), (5 * 21 + 20) * 0.4 + 6),
        ((DISCRIMINATOR,), 21 * 0.4 + 1),
    ],
    ids=["a discriminator and a generator", "five of a critic", "one optimizer"],
)
def test_a_training_step_has_all_turns(turns: tuple[tuple[str, ...], ...], each_ms: float) -> None:
    found = steps(*turns)
    assert (found.host_end_ns - found.host_start_ns).tolist() == [round(each_ms * MS)] * 5


def test_what_every_other_step_does_besides_makes_no_longer_step() -> None:
    """An evaluation in every other one: it has all that the others have."""
    evaluation = ("aten::conv2d",) * 20 + ("aten::argmax",) * 2
    found = steps(DISCRIMINATOR, DISCRIMINATOR + evaluation)
    assert (found.host_end_ns - found.host_start_ns).tolist()[:2] == [43 * 400_000 + MS, 21 * 400_000 + MS]
