"""Steps by ranges that programs name so, where nothing else marks them."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.steps import BY_OPTIMIZER, BY_RANGES, MARKED, UNMARKED, Steps
from tests.traces import TraceBuilder

STEPS, LENGTH = 4, 10_000


def work(builder: TraceBuilder, at: int, part: int) -> None:
    """Some kernels, another number of them in each part, so that nothing repeats."""
    for place in range(part + 3):
        begin = at + 200 + 100 * place
        builder.op(f"aten::op{part}", begin, begin + 50).launched(f"kernel{place}{part}", begin, begin + 10, begin + 90)


def loop(names: list[str], *, length: int = LENGTH, optimizer_every: int = 0) -> TraceBuilder:
    builder = TraceBuilder()
    for part, name in enumerate(names):
        at = part * LENGTH
        if name:
            builder.note(name, at, at + length)
        work(builder, at, part)
        if optimizer_every and part % optimizer_every == optimizer_every - 1:
            builder.note("Optimizer.step#SGD.step", at + 9_000, at + 9_500)
    return builder


def steps_of(builder: TraceBuilder) -> Steps:
    return analyze_rank(builder.build()).steps


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("step {}", 7), ("step_{}", 7), ("Iteration#{}", 7), ("train_step {}", 7), ("training iter={}", 7),
        ("batch-{}", 7), ("train_step", 0), ("iteration", 0), ("[pl][profile]run_training_batch", 0), ("train/step", 0),
    ],
)  # fmt: skip
def test_ranges_are_steps_with_their_numbers(name: str, first: int) -> None:
    steps = steps_of(loop([name.format(7 + part) for part in range(STEPS)]))
    assert steps.source == BY_RANGES
    assert steps.number.tolist() == list(range(first, first + STEPS))
    assert (steps.host_start_ns[1:] - steps.host_start_ns[:-1] == LENGTH).all()


@pytest.mark.parametrize("name", ["optimizer.step", "epoch 3", "micro_step 3", "lr_step 2", "stepper", "forward", ""])
def test_other_ranges_are_none(name: str) -> None:
    assert steps_of(loop([name] * STEPS)).source == UNMARKED


def test_a_profilers_steps_come_first() -> None:
    builder = loop([f"step {100 + part}" for part in range(STEPS)])
    for part in range(STEPS):
        builder.step(part, part * LENGTH, (part + 1) * LENGTH)
    steps = steps_of(builder)
    assert (steps.source, steps.number.tolist()) == (MARKED, list(range(STEPS)))


def test_ranges_around_micro_batches_are_no_steps() -> None:
    assert steps_of(loop(["batch"] * 8, optimizer_every=2)).source == BY_OPTIMIZER


def test_ranges_that_hold_little_of_the_time_are_no_steps() -> None:
    assert steps_of(loop(["step"] * STEPS, length=LENGTH // 4)).source == UNMARKED


def test_of_nested_ranges_the_longer_ones_are_steps() -> None:
    builder = loop([f"step {part}" for part in range(STEPS)])
    for part in range(STEPS):
        builder.note(f"batch {part}", part * LENGTH + 100, part * LENGTH + 7_000)
    assert steps_of(builder).host_end_ns[0] == LENGTH
