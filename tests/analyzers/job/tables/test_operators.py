"""The tables of operators and of named ranges: by hand, and against plain loops over real traces."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from perfscope.analyzers.job.aligned import AlignedJob, align_job
from perfscope.analyzers.job.tables.operators import LISTED, operator_rows
from perfscope.analyzers.job.tables.tables import module_rows
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.nesting import Nested
from perfscope.analyzers.rank.work.tables import OTHER_OPERATORS
from perfscope.analyzers.readers import chrome
from perfscope.trace.hardware import peaks_of
from perfscope.trace.trace import NONE, Category
from tests.analyzers.job.tables.test_kernels import GEMM, PRODUCT, REAL, TRACES, needs_traces
from tests.analyzers.rank import oracle
from tests.traces import AUTOGRAD, MAIN, TraceBuilder

A100 = peaks_of("NVIDIA A100-SXM4-80GB")
THREADS = strategies.sampled_from((MAIN, AUTOGRAD))


def compared(*builders: TraceBuilder) -> AlignedJob:
    return align_job({rank: analyze_rank(builder.build()) for rank, builder in enumerate(builders)})


def one_rank() -> TraceBuilder:
    """Two steps; in each a linear of 3 µs around a product of 2 µs, launching 10 µs, and an addition of 1 µs."""
    builder = TraceBuilder().step(1, 0, 100_000).step(2, 100_000, 200_000)
    for at in (0, 100_000):
        builder.op("aten::linear", at, at + 3_000).op("aten::mm", at + 500, at + 2_500, **PRODUCT)
        builder.launched(GEMM, at + 1_000, at + 20_000, at + 30_000)
        builder.op("aten::add", at + 5_000, at + 6_000).launched("elementwise", at + 5_100, at + 30_000, at + 33_000)
        builder.launched("alone", at + 8_000, at + 40_000, at + 41_000)
    return builder


def test_operators_by_hand():
    rows = {row.name: row for row in operator_rows(compared(one_rank()), A100)}
    assert list(rows) == ["aten::mm", "aten::add", "aten::linear"]
    product = rows["aten::mm"]
    assert (product.operator_class, product.dtype) == ("matrix", "bfloat16")
    assert (product.count_per_step, product.kernels_per_step) == (1, 1)
    assert (product.host_us_per_step, product.device_us_per_step) == (2, 10)
    assert product.flops_per_step == 2e9
    assert product.tflops == pytest.approx(200)
    assert product.share_of_peak == pytest.approx(200 / 312)
    around = rows["aten::linear"]
    assert (around.host_us_per_step, around.device_us_per_step, around.flops_per_step) == (1, 0, None)
    assert (rows["aten::add"].operator_class, rows["aten::add"].device_us_per_step) == ("elementwise", 3)


def test_a_call_that_an_operator_passes_on_to_its_overload_is_one():
    """sort() calls sort(stable=...): 1 µs around 8 µs, twice. Another operator between them calls it anew."""
    builder = TraceBuilder().step(1, 0, 100_000)
    for at in (0, 20_000):
        builder.op("aten::sort", at, at + 9_000).op("aten::sort", at + 500, at + 8_500)
    builder.op("aten::argsort", 40_000, 49_000).op("aten::sort", 41_000, 48_000)
    builder.op("aten::unique", 60_000, 64_000).op("my::walk", 61_000, 63_000).op("aten::unique", 61_500, 62_500)
    rows = {row.name: row for row in operator_rows(compared(builder), None)}
    counts = {name: row.count_per_step for name, row in rows.items()}
    assert counts == {"aten::sort": 3, "aten::argsort": 1, "aten::unique": 2, "my::walk": 1}
    assert rows["aten::sort"].host_us_per_step == 2 * 9 + 7


def test_without_a_device_an_operator_s_rate_is_over_its_own_call():
    builder = TraceBuilder().step(1, 0, 100_000)
    builder.op("aten::linear", 0, 30_000).op("aten::addmm", 5_000, 25_000, shapes=[[5], [10, 100], [100, 5]])
    rows = {row.name: row for row in operator_rows(compared(builder), None)}
    assert rows["aten::addmm"].flops_per_step == 10_000
    assert rows["aten::addmm"].tflops == pytest.approx(10_000 / 20e-6 / 1e12)
    assert (rows["aten::linear"].host_us_per_step, rows["aten::linear"].flops_per_step) == (10, None)


def test_operators_that_are_not_listed_are_added_up():
    builder = TraceBuilder().step(1, 0, 1_000_000)
    for number in range(LISTED + 20):
        builder.op(f"my::op_{number}", number * 1_000, number * 1_000 + 100 + number)
    rows = operator_rows(compared(builder), None)
    assert len(rows) == LISTED + 1
    (others,) = [row for row in rows if row.name == OTHER_OPERATORS]
    assert others.count_per_step == 20
    assert others.host_us_per_step == pytest.approx(sum(100 + number for number in range(20)) / 1e3)


def test_ranges_by_hand():
    builder = TraceBuilder().step(1, 0, 200_000)
    builder.note("perfscope::forward", 0, 50_000).event("nn.Module: Block_0", Category.PYTHON, 1_000, 20_000)
    builder.event("my_file.py(3): helper", Category.PYTHON, 2_000, 19_000)
    # Two kernels that overlap by 4 µs were launched in the block, a third in the forward only.
    builder.launched("a", 3_000, 100_000, 110_000).launched("b", 4_000, 106_000, 112_000, stream=8)
    builder.launched("c", 30_000, 120_000, 125_000)
    # On another thread: in no range.
    builder.call("cudaLaunchKernel", 10_000, 10_001, 99, AUTOGRAD)
    builder.event("d", Category.KERNEL, 130_000, 131_000, correlation=99, device=0, stream=7)
    builder.note("perfscope::collective#all_reduce|0|4|17||float32|288", 60_000, 61_000)
    forward, block = module_rows(compared(builder))
    assert (forward.name, forward.depth, forward.kernels_per_step) == ("perfscope::forward", 0, 3)
    assert (forward.host_us_per_step, forward.device_us_per_step) == (50, 12 + 5)
    assert (block.name, block.depth, block.kernels_per_step) == ("nn.Module: Block_0", 1, 2)
    assert (block.host_us_per_step, block.device_us_per_step, block.count_per_step) == (19, 12, 1)


def test_a_range_in_another_of_its_name_counts_its_work_once():
    builder = TraceBuilder().step(1, 0, 100_000).note("walk", 0, 9_000).note("walk", 1_000, 5_000)
    builder.launched("a", 2_000, 50_000, 60_000)
    (row,) = module_rows(compared(builder))
    assert (row.count_per_step, row.kernels_per_step, row.device_us_per_step) == (2, 1, 10)


def test_rounded_ends_do_not_break_the_nesting():
    # A child that ends a moment after its parent, and what follows.
    builder = TraceBuilder().op("p", 0, 100).op("a", 10, 40).op("b", 50, 101).op("c", 100, 400).op("d", 120, 130)
    trace = builder.build()
    nested = Nested.of(trace, trace.rows(Category.CPU_OP))
    named = [trace.name_of(int(row)) for row in nested.row]
    parents = {name: named[at] if at != NONE else None for name, at in zip(named, nested.parent, strict=True)}
    assert parents == {"p": None, "a": "p", "b": "p", "c": None, "d": "c"}
    assert dict(zip(named, nested.own_ns().tolist(), strict=True)) == {"p": 20, "a": 30, "b": 50, "c": 290, "d": 10}


@hypothesis.given(
    strategies.lists(
        strategies.tuples(strategies.integers(0, 60), strategies.integers(0, 40), THREADS), min_size=1, max_size=40
    ),
    strategies.lists(strategies.tuples(strategies.integers(0, 110), THREADS)),
)
def test_nesting_is_what_a_stack_finds(ranges, moments):
    builder = TraceBuilder()
    for number, (start, length, thread) in enumerate(ranges):
        builder.op(f"op{number}", start, start + length, thread)
    trace = builder.build()
    nested = Nested.of(trace, trace.rows(Category.CPU_OP))
    stacks: dict[int, list[tuple[int, int]]] = {MAIN: [], AUTOGRAD: []}
    expected = {}
    for row in trace.rows(Category.CPU_OP).tolist():
        start, length = int(trace.start_ns[row]), int(trace.duration_ns[row])
        stack = stacks[int(trace.thread[row])]
        while stack and stack[-1][1] <= start + length // 2:
            stack.pop()
        expected[row] = stack[-1][0] if stack else NONE
        stack.append((row, start + length))
    rows = np.append(nested.row, NONE)
    assert {int(row): int(rows[parent]) for row, parent in zip(nested.row, nested.parent, strict=True)} == expected
    times, threads = (np.array([moment[at] for moment in moments], dtype=np.int64) for at in (0, 1))
    innermost = nested.innermost(threads.astype(np.int32), times)
    ends = {int(row): int(end) for row, end in zip(nested.row, nested.end - nested.start, strict=True)}
    for place, time, thread in zip(innermost.tolist(), times.tolist(), threads.tolist(), strict=True):
        found = int(rows[place])
        last = max(
            (row for row in expected if trace.thread[row] == thread and trace.start_ns[row] <= time), default=NONE
        )
        while last != NONE and trace.start_ns[last] + ends[last] <= time:
            last = expected[last]
        assert found == last


@needs_traces
@pytest.mark.scale
@pytest.mark.parametrize("name", REAL)
def test_real_traces_have_the_times_that_a_stack_finds(name):
    path = TRACES / f"{name}.json.gz"
    partial = analyze_rank(chrome.read(path))
    windows = list(zip(partial.steps.host_start_ns.tolist(), partial.steps.host_end_ns.tolist(), strict=True))
    expected = oracle.own_time(oracle.events(path), windows)
    rows = operator_rows(align_job({0: partial}), None)
    for row in rows:
        if row.name != OTHER_OPERATORS:
            calls, own_ns = expected.get(row.name, (0, 0))
            assert row.count_per_step * len(windows) == pytest.approx(calls)
            assert row.host_us_per_step * len(windows) == pytest.approx(own_ns / 1e3, abs=1e-6)
    assert sum(row.count_per_step for row in rows) * len(windows) == pytest.approx(sum(n for n, _ in expected.values()))


@needs_traces
@pytest.mark.parametrize(
    "name", ["a100_ddp_rank0of2/rank0", "h100_eager_single/trace", "mi300x_ddp_ckpt_rank0of8/rank0"]
)
def test_real_kernels_go_to_the_operator_that_kineto_names(name):
    """Kineto writes the operator's id on the kernel where it knows it; the tables look by time."""
    path = TRACES / f"{name}.json.gz"
    partial = analyze_rank(chrome.read(path))
    windows = list(zip(partial.steps.start_ns.tolist(), partial.steps.end_ns.tolist(), strict=True))
    expected = oracle.launched_by(oracle.events(path), windows)
    rows = {row.name: row for row in operator_rows(align_job({0: partial}), None)}
    assert expected
    for operator, total in expected.items():
        assert rows[operator].device_us_per_step * len(windows) == pytest.approx(total / 1e3, abs=1e-6)
