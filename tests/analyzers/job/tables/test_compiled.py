"""Compiled code is led back to modules and lines: by hand, with what ranks note of it, and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.job.aligned import align_job
from perfscope.analyzers.job.tables.compiled import (
    UNSHOWN,
    CompiledTables,
    compiled_tables,
    folded_modules,
    kernels_with_sources,
)
from perfscope.analyzers.job.tables.kernels import kernel_rows
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.recording.compiled import (
    FROM_CODE,
    CompileCost,
    CompiledCall,
    CompiledCode,
    CompiledGraph,
    SourceLine,
    save,
)
from perfscope.trace.trace import Category
from tests.traces import TraceBuilder

GELU, FUSED = "triton_poi_fused_gelu_0", "triton_per_fused_add_norm_1"
CODE = CompiledCode(
    lines=(
        SourceLine(module="layers.0.mlp", kind="Mlp", file="/job/train.py", line=12, code="F.gelu(self.fc1(x))"),
        SourceLine(module="layers.1.mlp", kind="Mlp", file="/job/train.py", line=12, code="F.gelu(self.fc1(x))"),
        SourceLine(module="norm", kind="LayerNorm", file="/job/train.py", line=30, code="self.norm(x)"),
        SourceLine(file="/job/train.py", line=30, code="self.norm(x)"),
        SourceLine(file="/job/train.py", line=44, function="loss", code="return (x - y).abs()"),
    ),
    graphs=(
        CompiledGraph(
            key="fwd",
            calls=(
                CompiledCall(name=GELU, lines=(0,), operators=("aten.gelu",)),
                CompiledCall(name="extern_kernels.mm", lines=(0,), operators=("aten.mm",)),
                CompiledCall(name=GELU, lines=(1,), operators=("aten.gelu",)),
                CompiledCall(name=FUSED, lines=(3, 2, 1, 4), operators=("aten.add",)),
            ),
        ),
    ),
)


def job(*, key: str = "fwd") -> TraceBuilder:
    """One step: two calls of one kernel in two layers (10 and 20 µs), a product (40 µs), a fused kernel (30 µs)."""
    builder = TraceBuilder().step(1, 0, 1_000_000).op(f"## Call CompiledFxGraph {key} ##", 1_000, 90_000)
    for at, (call, kernel, start, end) in enumerate((
        (GELU, GELU, 100_000, 110_000), ("aten::mm", "gemm", 110_000, 150_000), (GELU, GELU, 150_000, 170_000),
        (FUSED, FUSED, 170_000, 200_000),
    )):  # fmt: skip
        builder.op(call, 2_000 + at * 2_000, 3_000 + at * 2_000)
        builder.launched(kernel, 2_100 + at * 2_000, start, end)
    return builder


def tables(builder: TraceBuilder, files: dict[int, Path]) -> CompiledTables:
    return compiled_tables(files, align_job({0: analyze_rank(builder.build())}))


@pytest.fixture
def files(tmp_path: Path) -> dict[int, Path]:
    path = tmp_path / "rank-00000.compiled.json"
    save(CODE, path)
    return {0: path}


def test_calls_are_led_back_to_module_and_line(files: dict[int, Path]) -> None:
    rows = {row.name: row for row in tables(job(), files).calls}
    gelu = rows[GELU]  # of both layers: one row
    assert (gelu.modules, gelu.lines, gelu.code) == (("layers.*.mlp",), ("/job/train.py:12",), ("F.gelu(self.fc1(x))",))
    assert (gelu.direction, gelu.operators, gelu.count_per_step) == ("forward", ("aten.gelu",), 2)
    assert (gelu.device_us_per_step, gelu.host_us_per_step, gelu.share) == (30, 2, pytest.approx(0.3))
    product = rows["aten::mm"]
    assert (product.kernels, product.modules, product.device_us_per_step) == (("gemm",), ("layers.0.mlp",), 40)
    # Line 30 has its module, so that it is not counted as code outside all modules besides.
    assert rows[FUSED].modules == ("norm", "layers.1.mlp", "loss()")
    assert rows[FUSED].lines == ("/job/train.py:30", "/job/train.py:12", "/job/train.py:44")


def test_modules_have_the_time_of_what_computes_them(files: dict[int, Path]) -> None:
    rows = {row.module: row for row in tables(job(), files).modules}
    mlp = rows["layers.*.mlp"]
    assert (mlp.kind, mlp.instances) == ("Mlp", 2)
    # 10 + 20 + 40 alone, 30 together with others.
    assert (mlp.forward_us_per_step, mlp.backward_us_per_step, mlp.shared_us_per_step) == (100, 0, 30)
    assert (rows["norm"].forward_us_per_step, rows["loss()"].shared_us_per_step) == (30, 30)


def test_kernels_have_the_lines_of_their_calls(files: dict[int, Path]) -> None:
    result = align_job({0: analyze_rank(job().build())})
    rows = {row.name: row for row in kernels_with_sources(kernel_rows(result, None), compiled_tables(files, result))}
    assert rows[GELU].modules == ("layers.*.mlp",)
    assert (rows["gemm"].modules, rows["gemm"].lines) == (("layers.0.mlp",), ("/job/train.py:12",))


@pytest.mark.parametrize("key", ["other", "None"])
def test_graphs_that_were_not_noted_are_not_known(files: dict[int, Path], key: str) -> None:
    found = tables(job(key=key), files)
    assert {row.name: (row.modules, row.lines, row.direction) for row in found.calls} == dict.fromkeys(
        (GELU, FUSED, "aten::mm"), ((), (), None)
    )
    assert [(note.kind, note.values["share"]) for note in found.notes] == [("compiled_unknown", 1.0)]


def test_without_keys_calls_are_looked_up_by_name_among_all_graphs(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.compiled.json"
    (graph,) = CODE.graphs
    backward = CompiledGraph(key="None", backward=True, calls=(CompiledCall(name="extern_kernels.mm", lines=(2,)),))
    save(CompiledCode(lines=CODE.lines, graphs=(CompiledGraph(key="None", calls=graph.calls), backward)), path)
    rows = {row.name: row for row in tables(job(key="None"), {0: path}).calls}
    assert (rows["aten::mm"].modules, rows["aten::mm"].direction) == (("layers.0.mlp", "norm"), None)


def test_a_graph_from_a_cache_that_does_not_hold_lines_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.compiled.json"
    calls = tuple(CompiledCall(name=call.name) for call in CODE.graphs[0].calls)
    save(CompiledCode(graphs=(CompiledGraph(key="fwd", known_from=FROM_CODE, backward=True, calls=calls),)), path)
    (note,) = tables(job(), {0: path}).notes
    assert "INDUCTOR_PROVENANCE=1" in note.text


def test_a_damaged_file_costs_its_lines_and_is_named(files: dict[int, Path]) -> None:
    files[0].write_text('{"schema": "perfscope.compiled/1", "lines": [')
    found = tables(job(), files)
    assert [row.lines for row in found.calls] == [(), (), ()]
    assert found.notes[0].kind == "compiled_unreadable"
    assert str(files[0]) in found.notes[0].text


def test_kernels_of_a_cpu_that_no_event_shows_are_one_row(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.compiled.json"
    calls = (CompiledCall(name="cpp_fused_gelu_0", lines=(0,)), CompiledCall(name="extern_kernels.mm", lines=(2,)))
    save(CompiledCode(lines=CODE.lines, graphs=(CompiledGraph(key="fwd", calls=calls),)), path)
    builder = TraceBuilder().step(1, 0, 100_000).op("## Call CompiledFxGraph fwd ##", 1_000, 51_000)
    builder.op("aten::mm", 2_000, 12_000)
    rows = {row.name: row for row in tables(builder, {0: path}).calls}
    assert (rows[UNSHOWN].host_us_per_step, rows[UNSHOWN].modules) == (40, ("layers.0.mlp",))
    assert rows[UNSHOWN].share == pytest.approx(0.4)
    builder.op("graph_3_cpp_fused_gelu_0", 12_000, 22_000)
    listed = tables(builder, {0: path})
    assert {row.name: row.host_us_per_step for row in listed.calls} == {"aten::mm": 10, "cpp_fused_gelu_0": 10}
    assert listed.notes == ()


def test_modules_that_differ_in_numbers_are_one() -> None:
    assert folded_modules(["layers.0.mlp", "head", "layers.1.mlp", "block.3"]) == ("layers.*.mlp", "head", "block.3")
    assert folded_modules(["fc1", "fc2"]) == ("fc1", "fc2")


def cuda_graph(*kernels: str) -> TraceBuilder:
    """One launch of a CUDA graph, whose kernels take 1, 2, 3 … µs one after another."""
    builder = TraceBuilder().step(1, 0, 1_000_000).op("## Call CompiledFxGraph fwd ##", 1_000, 90_000)
    builder.call("cudaGraphLaunch", 2_000, 3_000, correlation=9)
    at = 10_000
    for number, name in enumerate(kernels, 1):
        builder.event(name, Category.KERNEL, at, at + number * 1_000, correlation=9, device=0, stream=7)
        at += number * 1_000
    return builder


@pytest.mark.parametrize(
    ("kernels", "known"),
    [
        ((GELU, "gemm", GELU, FUSED), {"gemm": "layers.0.mlp"}),
        # One operator is called there, so both are its.
        ((GELU, "gemm", "splitK", GELU, FUSED), {"gemm": "layers.0.mlp", "splitK": "layers.0.mlp"}),
        # No operator is called at the end.
        ((GELU, GELU, FUSED, "gemm"), {}),
        # Not the order of the code: on several streams.
        ((FUSED, GELU, "gemm", GELU), {}),
    ],
)
def test_kernels_of_operators_in_a_cuda_graph_are_known_by_their_place(
    files: dict[int, Path], kernels: tuple[str, ...], known: dict[str, str]
) -> None:
    found = tables(cuda_graph(*kernels), files)
    assert {row.name: row.modules[0] for row in found.calls if row.modules and row.name in ("gemm", "splitK")} == known
    gelu = next(row for row in found.calls if row.name == GELU)
    assert (gelu.modules, gelu.count_per_step) == (("layers.*.mlp",), 0)


def test_operators_without_a_generated_kernel_between_them_need_as_many_kernels(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.compiled.json"
    calls = (CompiledCall(name="extern_kernels.mm", lines=(0,)), CompiledCall(name="extern_kernels.mm", lines=(2,)))
    save(CompiledCode(lines=CODE.lines, graphs=(CompiledGraph(key="fwd", calls=calls),)), path)
    found = tables(cuda_graph("gemm", "gemm"), {0: path})
    assert {row.modules: row.device_us_per_step for row in found.calls} == {("layers.0.mlp",): 1, ("norm",): 2}
    (note,) = tables(cuda_graph("gemm", "splitK", "gemm"), {0: path}).notes
    assert (note.kind, note.values["share"]) == ("compiled_in_graphs", 1.0)


def test_what_compiling_took_is_told_of_the_rank_that_it_took_most_of(tmp_path: Path) -> None:
    files = {}
    for rank, whole in ((0, 12.34), (1, 40.0)):
        files[rank] = tmp_path / f"rank-{rank:05d}.compiled.json"
        save(replace(CODE, cost=CompileCost(whole_s=whole, inductor_s=whole / 2, graphs=2)), files[rank])
    ranks = {rank: analyze_rank(job().build()) for rank in files}
    (told,) = [each for each in compiled_tables(files, align_job(ranks)).notes if each.kind == "compile_cost"]
    assert told.ranks == (1,)
    assert told.text.startswith("torch.compile took 40.0 s of rank 1, 20.0 s of it in inductor for 2 graphs;")
