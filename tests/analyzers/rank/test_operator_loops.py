"""Loops over many tensors outside the model: found where they are, and what one call for all tensors spares."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.extra.operator_loops import REPEATED
from perfscope.analyzers.rank.host_activity import BETWEEN
from perfscope.analyzers.rank.loop_phases import OF_BATCH
from perfscope.analyzers.rank.partial import RankPartial
from tests.traces import TraceBuilder

PERIOD, TAKES, LARGE = 10_000, 4_000, 54_000
"""ns from one operator of the loops to the next, what each takes, and what the one of a large tensor takes."""


def recorded(calls: int = 40, optimizer: str = "SGD", lost_core_in: int | None = None) -> RankPartial:
    """Three steps on a CPU: a forward, a backward, ``calls`` operators that scale gradients, the last of a large
    tensor, an optimizer's step with as many. In one step the thread has no core for 1 ms, within an operator.
    """
    builder, now = TraceBuilder(), 0
    for step in range(3):
        begin = now
        builder.note("perfscope::forward", now, now + 100_000).op("aten::mm", now, now + 90_000)
        builder.note("perfscope::backward", now + 100_000, now + 300_000).op("aten::mm", now + 100_000, now + 290_000)
        now += 300_000
        for stretch in ("clipping", "optimizer"):
            start = now
            for number in range(calls):
                takes = LARGE if number == calls - 1 else TAKES
                takes += 1_000_000 if (step, stretch, number) == (lost_core_in, "clipping", 5) else 0
                builder.op("aten::mul_" if stretch == "clipping" else "aten::add_", now + 1_000, now + 1_000 + takes)
                now += takes + PERIOD - TAKES
            if stretch == "optimizer":
                builder.note(f"Optimizer.step#{optimizer}.step", start, now)
        builder.step(step, begin, now)
    return analyze_rank(builder.build())


def spared_us(partial: RankPartial, what: str, step: int = 1) -> float:
    extra = partial.optimizer_loops if what == "optimizer" else partial.loops.others
    return float(extra.host.within(partial.steps.host_start_ns, partial.steps.host_end_ns)[step]) / 1e3


def test_each_part_of_the_loop_has_its_own() -> None:
    partial = recorded()
    rows = {row.name: (row.count.tolist(), row.operators) for row in partial.loops.parts}
    assert rows == {
        "the optimizer's step": ([39] * 3, ("aten::add_",)),
        "the loop between backward and optimizer": ([39] * 3, ("aten::mul_",)),
    }
    took_us = {row.name: int(row.took_ns[1]) / 1e3 for row in partial.loops.parts}
    assert took_us["the loop between backward and optimizer"] == pytest.approx(39 * 10 + 54, abs=7)


def test_what_is_computed_stays() -> None:
    """Of each operator the 6 µs before it go, and half of the 4 that each takes at least: of the large tensor, too."""
    assert spared_us(recorded(), "clipping") == pytest.approx(39 * (6 + 2), rel=0.02)
    assert spared_us(recorded(optimizer="Custom"), "optimizer") == pytest.approx(39 * (6 + 2), rel=0.02)


def test_a_fused_optimizer_spares_all_but_what_is_computed() -> None:
    assert spared_us(recorded(), "optimizer") == pytest.approx(39 * (6 + 4), rel=0.02)


@pytest.mark.parametrize("where", [BETWEEN, OF_BATCH])
def test_copies_of_each_tensor_are_spared_but_those_of_a_batch(where: str) -> None:
    """40 tensors are copied in 4 µs and scaled in 4 µs, 6 µs apart: of one operator half of the 4 µs stays. What
    prepares a batch has to convert it.
    """
    builder, now = TraceBuilder(), 0
    for step in range(3):
        begin = now
        if where == OF_BATCH:
            builder.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", now, now + 5_000)
        now += 10_000
        for name in ("aten::clone", "aten::mul_") * 40:
            builder.op(name, now + 1_000, now + 1_000 + TAKES)
            now += PERIOD
        builder.note("perfscope::forward", now, now + 100_000).op("aten::mm", now, now + 90_000)
        builder.note("perfscope::backward", now + 100_000, now + 300_000).op("aten::mm", now + 100_000, now + 290_000)
        builder.note("Optimizer.step#Custom.step", now + 310_000, now + 320_000)
        builder.op("aten::add_", now + 311_000, now + 319_000)
        now += 330_000
        builder.step(step, begin, now)
    partial = analyze_rank(builder.build())
    assert [part.name for part in partial.loops.parts] == [where]
    of_copies = 4 if where == BETWEEN else 2
    assert spared_us(partial, "loop") == pytest.approx(79 * 6 + 39.5 * (2 + of_copies), rel=0.02)


def test_a_thread_without_a_core_loses_time_in_proportion() -> None:
    partial = recorded(lost_core_in=1)
    share = 39 * (6 + 2) / (39 * 10 + 50)
    assert spared_us(partial, "clipping", 0) == pytest.approx(39 * 8, rel=0.02)
    assert spared_us(partial, "clipping", 1) == pytest.approx(share * (39 * 10 + 50 + 1000), rel=0.02)


def test_a_few_calls_are_no_loop() -> None:
    assert recorded(REPEATED - 1).loops.parts == ()
    assert len(recorded(REPEATED).loops.parts) == 2


@pytest.mark.parametrize(
    ("between", "name"),
    [("c10d::allreduce_", "aten::div_"), ("", "aten::linear")],
    ids=["gradients reduced by hand", "layers of a model"],
)
def test_what_no_call_for_all_tensors_takes_over(between: str, name: str) -> None:
    builder = TraceBuilder().step(1, 0, 2_000_000).note("perfscope::forward", 0, 10_000)
    builder.note("perfscope::backward", 20_000, 100_000).note("Optimizer.step#SGD.step", 1_500_000, 1_600_000)
    for number in range(40):
        begin = 200_000 + 10_000 * number
        builder.op(name, begin, begin + 2_000)
        if between:
            builder.op(between, begin + 4_000, begin + 8_000)
    assert analyze_rank(builder.build()).loops.parts == ()


def test_the_backward_is_no_loop_where_no_range_marks_it() -> None:
    """Autograd's functions show it; what follows the last of them is the loop's."""
    builder = TraceBuilder().step(1, 0, 2_000_000).note("perfscope::forward", 0, 10_000)
    for number in range(40):
        begin = 20_000 + 10_000 * number
        builder.op("autograd::engine::evaluate_function: MulBackward0", begin, begin + 5_000)
        builder.op("aten::copy_", begin + 6_000, begin + 8_000)
        builder.op("aten::mul_", 600_000 + begin, 600_000 + begin + 2_000)
    builder.note("Optimizer.step#SGD.step", 1_500_000, 1_600_000)
    (row,) = analyze_rank(builder.build()).loops.parts
    assert (row.name, row.operators) == ("the loop between backward and optimizer", ("aten::mul_",))


def test_on_a_device_its_kernels_count() -> None:
    """Each is launched every 20 µs and takes 3; the shortest one's time and what lies between them is spared."""
    builder = TraceBuilder().step(1, 0, 3_000_000).note("perfscope::forward", 0, 10_000)
    builder.note("perfscope::backward", 20_000, 100_000).launched("gemm", 30_000, 35_000, 90_000)
    for number in range(40):
        begin = 200_000 + 20_000 * number
        builder.op("aten::mul_", begin - 4_000, begin + 4_000).launched("mul", begin, begin + 5_000, begin + 8_000)
    builder.note("Optimizer.step#SGD.step", 1_500_000, 1_600_000)
    partial = analyze_rank(builder.launched("gemm", 1_700_000, 1_710_000, 1_800_000).build())
    (row,) = partial.loops.parts
    assert (row.name, row.count.tolist()) == ("the loop between backward and optimizer", [30])
    assert partial.loops.others.device.measure() == 30 * 20_000


def test_a_model_that_is_evaluated_there_is_no_loop() -> None:
    """Its residual additions have layers between them; an average of parameters after it is a loop."""
    builder = TraceBuilder().step(1, 0, 6_000_000).note("perfscope::forward", 0, 10_000)
    builder.note("Optimizer.step#SGD.step", 20_000, 50_000).launched("adam", 30_000, 35_000, 40_000)
    for number in range(40):
        for name, begin in (("aten::linear", 200_000 + 40_000 * number), ("aten::add", 220_000 + 40_000 * number)):
            builder.op(name, begin - 4_000, begin + 4_000).launched(name, begin, begin + 5_000, begin + 8_000)
        begin = 2_000_000 + 20_000 * number
        builder.op("aten::lerp_", begin - 4_000, begin + 4_000).launched("lerp", begin, begin + 5_000, begin + 8_000)
    builder.note("perfscope::forward", 5_000_000, 5_100_000).launched("gemm", 5_010_000, 5_020_000, 5_090_000)
    (row,) = analyze_rank(builder.build()).loops.parts
    assert row.operators == ("aten::lerp_",)


@pytest.mark.parametrize("arrives", ["before", "after"])
def test_what_follows_a_batch_prepares_it(arrives: str) -> None:
    """Two steps; between optimizer and forward 40 operators, before or after a batch is taken from the loader."""
    builder, now = TraceBuilder(), 0
    for step in range(3):
        begin = now
        if arrives == "before":
            builder.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", now, now + 5_000)
        now += 10_000
        for _ in range(40):
            builder.op("aten::mul", now + 1_000, now + 1_000 + TAKES)
            now += PERIOD
        if arrives == "after":
            builder.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", now, now + 5_000)
        now += 10_000
        builder.note("perfscope::forward", now, now + 100_000).op("aten::mm", now, now + 90_000)
        builder.note("perfscope::backward", now + 100_000, now + 300_000).op("aten::mm", now + 100_000, now + 290_000)
        builder.note("Optimizer.step#Custom.step", now + 310_000, now + 320_000).op(
            "aten::add_", now + 311_000, now + 319_000
        )
        now += 330_000
        builder.step(step, begin, now)
    (part,) = analyze_rank(builder.build()).loops.parts
    assert part.name == (OF_BATCH if arrives == "before" else BETWEEN)
    assert part.count[1:].tolist() == [39, 39]
