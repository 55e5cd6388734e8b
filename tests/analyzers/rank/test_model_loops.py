"""Loops of a model over rows or time steps: found where operators repeat with no layer between them, by hand."""

from __future__ import annotations

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.extra.model_loops import LOOPS, REPEATED
from perfscope.analyzers.rank.partial import LoopWork
from tests.traces import TraceBuilder

STEPS = 3
AROUND = "autograd::engine::evaluate_function: "
EACH = 10_000
"""ns from one operator of a loop to the next."""


def found(builder: TraceBuilder) -> LoopWork | None:
    return next((part for part in analyze_rank(builder.build()).loop_work if part.name == LOOPS), None)


def loop(builder: TraceBuilder, now: int, *names: str, times: int = REPEATED) -> int:
    """Calls of these operators, 6 µs each, again and again; when the last has ended."""
    for _ in range(times):
        for name in names:
            builder.op(name, now, now + 6_000)
            now += EACH
    return now - 4_000


def steps(forward: tuple[str, ...] = (), loss: tuple[str, ...] = (), times: int = REPEATED) -> TraceBuilder:
    """Steps with a layer, a loop in the forward or behind it, and the layer's backward."""
    builder, now = TraceBuilder(), 0
    for step in range(STEPS):
        begin = now
        builder.op("aten::linear", now, now + 50_000)
        until = loop(builder, now + 60_000, *forward, times=times) if forward else now + 60_000
        builder.note("perfscope::forward", begin, until)
        now = loop(builder, until + 4_000, *loss, times=times) + 4_000 if loss else until + 4_000
        builder.note("perfscope::backward", now, now + 60_000)
        builder.op(f"{AROUND}AddmmBackward0", now, now + 50_000)
        builder.op("AddmmBackward0", now, now + 48_000).op("aten::mm", now, now + 40_000)
        builder.note("Optimizer.step#SGD.step", now + 70_000, now + 90_000).op("aten::add_", now + 70_000, now + 90_000)
        now += 100_000
        builder.step(step, begin, now)
    return builder


def test_a_loop_over_rows_in_the_forward_and_in_the_loss() -> None:
    for where in ("forward", "loss"):
        part = found(steps(**{where: ("aten::select", "aten::item")}))
        assert part is not None
        assert part.took_ns[1] == 2 * REPEATED * EACH - 4_000
        assert set(part.operators) == {"aten::select", "aten::item"}


def test_few_calls_and_calls_between_layers_are_none() -> None:
    assert found(steps(forward=("aten::select",), times=REPEATED - 1)) is None
    assert found(steps(forward=("aten::linear", "aten::relu"))) is None


def test_a_function_of_autograd_that_loops_is_named() -> None:
    """It copies row by row for 2 ms; gradients that are kept one after another are no loop."""
    builder, now = TraceBuilder(), 0
    for step in range(STEPS):
        begin = now
        builder.note("perfscope::forward", now, now + 60_000).op("aten::linear", now, now + 50_000)
        backward = now = now + 60_000
        until = loop(builder, now + 2_000, "aten::select", "aten::copy_")
        builder.op("SegSumBackward", now + 1_000, until + 1_000).op(f"{AROUND}SegSumBackward", now, until + 2_000)
        now = until + 4_000
        for _ in range(2 * REPEATED):
            builder.op(f"{AROUND}torch::autograd::AccumulateGrad", now, now + 900)
            now += 1_000
        builder.note("perfscope::backward", backward, now)
        builder.note("Optimizer.step#SGD.step", now, now + 20_000).op("aten::add_", now, now + 20_000)
        now += 30_000
        builder.step(step, begin, now)
    part = found(builder)
    assert part is not None
    assert part.took_ns[1] == 2 * REPEATED * EACH - 4_000
    assert part.operators[0] == "SegSumBackward"
    assert set(part.operators[1:]) == {"aten::select", "aten::copy_"}


def test_what_the_compiler_made_is_no_loop_of_the_script() -> None:
    """Neither what compiled code calls, nor what comes in one stretch because it has the layers inside."""
    builder, now = TraceBuilder(), 0
    for step in range(STEPS):
        begin = now
        until = loop(builder, now + 1_000, "aten::clone")
        builder.op("CompiledFunction", now, until + 1_000).note("perfscope::forward", begin, until + 2_000)
        now = until + 4_000
        for _ in range(2):
            now = loop(builder, now, "aten::copy_", times=REPEATED - 1)
            builder.op("## Call CompiledFxGraph abc ##", now, now + 20_000)
            now += 30_000
        builder.note("perfscope::backward", now, now + 20_000).op("aten::mm", now, now + 20_000)
        builder.note("Optimizer.step#SGD.step", now + 30_000, now + 40_000)
        now += 50_000
        builder.step(step, begin, now)
    assert found(builder) is None
