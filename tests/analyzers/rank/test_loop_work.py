"""What the training loop computes beside the training: found where it is, by hand."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.extra.loop_work import HOOKS
from perfscope.analyzers.rank.host_activity import BETWEEN
from perfscope.analyzers.rank.loop_phases import OF_BATCH
from perfscope.analyzers.rank.partial import LoopWork
from perfscope.recording.vocabulary import NO_GRADIENTS
from perfscope.trace.trace import Category
from tests.traces import RUNLOOP, TraceBuilder

STEPS = 3
AROUND = "autograd::engine::evaluate_function: "


def found(builder: TraceBuilder) -> dict[str, LoopWork]:
    return {part.name: part for part in analyze_rank(builder.build()).loop_work}


def trained(builder: TraceBuilder, now: int) -> int:
    """A forward of 100 µs, a backward of 200, an optimizer's step of 50; when it has ended."""
    builder.note("perfscope::forward", now, now + 100_000).op("aten::mm", now, now + 90_000)
    builder.note("perfscope::backward", now + 100_000, now + 300_000).op("aten::mm", now + 100_000, now + 290_000)
    builder.note("Optimizer.step#SGD.step", now + 300_000, now + 350_000)
    builder.op("aten::add_", now + 300_000, now + 350_000)
    return now + 350_000


def test_forwards_without_gradients_are_work_of_the_loop() -> None:
    """Ten of 30 µs, 10 µs apart, and 20 µs that belong to no operator: 420 µs from the optimizer's end on."""
    builder, now = TraceBuilder(), 0
    for step in range(STEPS):
        begin, now = now, now + 20_000
        for _ in range(10):
            builder.note(NO_GRADIENTS, now, now + 30_000)
            builder.op("aten::linear", now, now + 25_000).op("aten::relu", now + 25_000, now + 30_000)
            now += 40_000
        now = trained(builder, now)
        builder.step(step, begin, now)
    parts = found(builder)
    assert parts.keys() == {BETWEEN}
    part = parts[BETWEEN]
    assert part.took_ns[1:].tolist() == [420_000] * 2
    assert part.forwards[1:].tolist() == [10, 10]
    assert (part.operators, part.of_model) == (("aten::linear", "aten::relu"), True)


@pytest.mark.parametrize("often", [False, True], ids=["in one step", "in each"])
def test_loading_communication_and_evaluations_are_not(often: bool) -> None:
    """Of 500 µs in the loop 100 are loading, 150 an all-reduce and 90 an evaluation, which counts if it is in each."""
    builder, now = TraceBuilder(), 0
    for step in range(STEPS):
        begin = now
        builder.op("aten::histc", now, now + 60_000).op("c10d::allreduce_", now + 60_000, now + 210_000)
        if often or step == 1:
            builder.note("perfscope::evaluation", now + 210_000, now + 300_000)
            builder.op("aten::mm", now + 210_000, now + 290_000)
        builder.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", now + 300_000, now + 400_000)
        builder.op("aten::mul", now + 410_000, now + 440_000)
        now = trained(builder, now + 500_000)
        builder.step(step, begin, now)
    parts = found(builder)
    of_loop = 60_000 + 90_000 * often
    assert {name: part.took_ns[1] for name, part in parts.items()} == {BETWEEN: of_loop, OF_BATCH: 100_000}
    assert parts[BETWEEN].operators == (("aten::mm", "aten::histc") if often else ("aten::histc",))
    assert parts[BETWEEN].forwards[1] == often


def test_a_pause_is_no_work_of_the_few_operators_beside_it() -> None:
    """Between two operators of 30 µs the thread runs Python for 2 ms."""
    builder, now = TraceBuilder(), 0
    for step in range(STEPS):
        begin = now
        builder.op("aten::select", now, now + 30_000).op("aten::slice", now + 2_030_000, now + 2_060_000)
        now = trained(builder, now + 2_060_000)
        builder.step(step, begin, now)
    assert found(builder)[BETWEEN].took_ns[1] == 60_000


def test_on_a_device_it_is_what_the_loop_launches() -> None:
    """From the begin of its first kernel to the end of its last, in each stretch: 180 µs."""
    builder, now = TraceBuilder(), 0
    for step in range(STEPS):
        begin = now
        for number in range(10):
            at = now + 5_000 * number
            builder.op("aten::linear", at, at + 4_000)
            builder.launched("gemm", at + 1_000, now + 20_000 + 18_000 * number, now + 34_000 + 18_000 * number)
        now += 60_000
        builder.note("perfscope::forward", now, now + 100_000).op("aten::mm", now, now + 90_000)
        builder.launched("gemm", now + 10_000, now + 150_000, now + 250_000)
        builder.note("perfscope::backward", now + 100_000, now + 200_000)
        builder.note("Optimizer.step#SGD.step", now + 250_000, now + 300_000)
        now += 300_000
        builder.step(step, begin, now)
    part = found(builder)[BETWEEN]
    assert part.took_ns[1] == 9 * 18_000 + 14_000


@pytest.mark.parametrize("kept", [False, True], ids=["of a gradient", "once it is kept"])
def test_hooks_of_the_backward(kept: bool) -> None:
    """Each of four gradients has a hook of 30 µs: what the engine and a reducer do for it is not the hook's."""
    builder, now = TraceBuilder(), 0
    for step in range(STEPS):
        begin = now
        builder.note("perfscope::forward", now, now + 100_000).op("aten::mm", now, now + 90_000)
        builder.note("perfscope::backward", now + 100_000, now + 400_000)
        now += 100_000
        for _ in range(4):
            node = "torch::autograd::AccumulateGrad"
            builder.op(f"{AROUND}{node}", now, now + 60_000)
            builder.op("aten::linalg_vector_norm", now + 10_000, now + 20_000).op(
                "aten::item", now + 35_000, now + 40_000
            )
            builder.op(node, now + (5_000 if kept else 42_000), now + 45_000).op(
                "aten::detach", now + 43_000, now + 44_000
            )
            builder.op("torch::distributed::reducer::mul_out", now + 46_000, now + 50_000)
            builder.op(f"{AROUND}AddmmBackward0", now + 60_000, now + 70_000)
            builder.op("AddmmBackward0", now + 60_000, now + 68_000).op("aten::mm", now + 60_000, now + 66_000)
            builder.op("aten::add_", now + 68_000, now + 69_000)
            now += 75_000
        builder.note("Optimizer.step#SGD.step", now, now + 50_000).op("aten::add_", now, now + 50_000)
        now += 50_000
        builder.step(step, begin, now)
    part = found(builder)[HOOKS]
    assert part.took_ns[1] == 4 * 30_000
    assert part.operators == ("aten::linalg_vector_norm", "aten::item")


def test_what_a_reducer_waits_for_and_copies_is_not() -> None:
    """No range marks the backward, which ends for autograd before the last bucket has come. The norm is the loop's."""
    builder, now = TraceBuilder(), 0
    for step in range(STEPS):
        begin = now
        builder.note("DistributedDataParallel.forward", now, now + 100_000).op("aten::mm", now, now + 90_000)
        builder.op(f"{AROUND}AddmmBackward0", now + 100_000, now + 200_000)
        builder.event("gloo:all_reduce", Category.ANNOTATION, now + 150_000, now + 400_000, thread=RUNLOOP)
        builder.op("torch.distributed.ddp.reducer::copy_bucket_to_grad", now + 400_000, now + 440_000)
        builder.op("aten::linalg_vector_norm", now + 440_000, now + 470_000)
        builder.note("Optimizer.step#SGD.step", now + 470_000, now + 500_000)
        builder.op("aten::add_", now + 470_000, now + 500_000)
        now += 500_000
        builder.step(step, begin, now)
    (part,) = found(builder).values()
    assert part.took_ns[1] == 30_000
    assert part.operators == ("aten::linalg_vector_norm",)


def test_hooks_of_frameworks_that_reduce_gradients_are_theirs() -> None:
    builder = TraceBuilder().step(1, 0, 400_000).note("perfscope::forward", 0, 90_000).op("aten::mm", 0, 90_000)
    builder.op(f"{AROUND}torch::autograd::AccumulateGrad", 100_000, 300_000)
    builder.note("FSDP::post_backward_reduce", 110_000, 200_000).op("aten::cat", 120_000, 190_000)
    assert HOOKS not in found(builder)
