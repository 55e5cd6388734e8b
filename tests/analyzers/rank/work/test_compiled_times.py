"""Calls in compiled graphs of one rank: a trace small enough to check by eye."""

from __future__ import annotations

import numpy as np

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.trace.trace import Category
from tests.traces import AUTOGRAD, TraceBuilder


def lines(builder: TraceBuilder) -> dict[tuple[str, str, int, str], tuple[int, int, int, int]]:
    """(graph, call, number, kernel) -> (calls, ns on the host, kernels, ns on the device), of all steps."""
    times = analyze_rank(builder.build()).tables.compiled
    tables = (table.sum(axis=1).tolist() for table in (times.count, times.host_ns, times.kernels, times.device_ns))
    keys = zip(times.graphs, times.calls, times.number.tolist(), times.names, strict=True)
    return dict(zip(keys, zip(*tables, strict=True), strict=True))


def graph(builder: TraceBuilder, key: str, start: int, end: int) -> TraceBuilder:
    return builder.op(f"## Call CompiledFxGraph {key} ##", start, end)


def test_each_call_has_its_number_in_the_run_of_its_graph():
    builder = TraceBuilder().step(1, 0, 10_000)
    for begin in (1_000, 3_000):  # two runs of one graph
        graph(builder, "fwd", begin, begin + 1_000)
        builder.op("triton_poi_fused_gelu_0", begin + 100, begin + 150)
        builder.launched("triton_poi_fused_gelu_0", begin + 110, begin + 400, begin + 430)
        builder.op("aten::mm", begin + 200, begin + 300).op("aten::empty", begin + 210, begin + 220)
        builder.launched("ampere_sgemm", begin + 250, begin + 500, begin + 600)
        builder.op("triton_poi_fused_gelu_0", begin + 300, begin + 350)
        builder.launched("triton_poi_fused_gelu_0", begin + 310, begin + 600, begin + 605)
    builder.op("aten::mm", 5_000, 5_100).launched("ampere_sgemm", 5_050, 5_200, 5_300)  # outside of compiled code
    assert lines(builder) == {
        ("fwd", "triton_poi_fused_gelu_0", 0, ""): (2, 100, 0, 0),
        ("fwd", "triton_poi_fused_gelu_0", 1, ""): (2, 100, 0, 0),
        ("fwd", "aten::mm", 0, ""): (2, 200, 0, 0),
        # 1000 ns less the 50, 100 and 50 of its calls.
        ("fwd", "", 0, ""): (2, 1_600, 0, 0),
        ("fwd", "triton_poi_fused_gelu_0", 0, "triton_poi_fused_gelu_0"): (0, 0, 2, 60),
        ("fwd", "triton_poi_fused_gelu_0", 1, "triton_poi_fused_gelu_0"): (0, 0, 2, 10),
        ("fwd", "aten::mm", 0, "ampere_sgemm"): (0, 0, 2, 200),
    }


def test_kernels_of_a_cuda_graph_are_calls_of_their_own_names_in_the_order_of_the_device():
    builder = graph(TraceBuilder().step(1, 0, 10_000), "bwd", 1_000, 2_000)
    builder.call("cudaGraphLaunch", 1_100, 1_200, correlation=77)
    for name, start, end in (("triton_red_0", 1_300, 1_310), ("gemm", 1_310, 1_330), ("triton_red_0", 1_330, 1_370)):
        builder.event(name, Category.KERNEL, start, end, correlation=77, device=0, stream=7)
    times = analyze_rank(builder.build()).tables.compiled
    places = dict(zip(zip(times.calls, times.number.tolist(), strict=True), times.order.tolist(), strict=True))
    assert places == {("", 0): -1, ("triton_red_0", 0): 0, ("gemm", 0): 1, ("triton_red_0", 1): 2}
    assert lines(builder) == {
        ("bwd", "", 0, ""): (1, 1_000, 0, 0),
        ("bwd", "triton_red_0", 0, "triton_red_0"): (0, 0, 1, 10),
        ("bwd", "triton_red_0", 1, "triton_red_0"): (0, 0, 1, 40),
        ("bwd", "gemm", 0, "gemm"): (0, 0, 1, 20),
    }


def test_graphs_on_several_threads_and_in_each_other_stay_apart():
    builder = graph(TraceBuilder().step(1, 0, 10_000), "outer", 1_000, 3_000)
    graph(builder, "inner", 1_500, 2_500)
    builder.op("aten::mm", 1_600, 1_700).op("aten::mm", 2_600, 2_700)
    builder.op("## Call CompiledFxGraph bwd ##", 1_000, 3_000, thread=AUTOGRAD)
    builder.op("aten::mm", 1_200, 1_300, thread=AUTOGRAD)
    found = {key: host for key, (_, host, _, _) in lines(builder).items()}
    assert found == {
        ("outer", "aten::mm", 0, ""): 100,
        ("inner", "aten::mm", 0, ""): 100,
        ("bwd", "aten::mm", 0, ""): 100,
        ("outer", "", 0, ""): 900,
        ("inner", "", 0, ""): 900,
        ("bwd", "", 0, ""): 1_900,
    }


def test_what_is_not_compiled_has_no_lines():
    times = analyze_rank(TraceBuilder().step(1, 0, 10_000).op("aten::mm", 10, 20).build()).tables.compiled
    assert times.calls == ()
    assert times.host_ns.shape == (0, 1)
    assert times.number.dtype == np.int64
