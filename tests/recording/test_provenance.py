"""What inductor itself writes of its kernels: read, found in a folder, and no trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfscope.analyzers.job.aligned import align_job
from perfscope.analyzers.job.tables.compiled import compiled_tables, kernels_with_sources
from perfscope.analyzers.job.tables.kernels import kernel_rows
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.recording import provenance
from perfscope.recording.job import open_job
from tests.traces import TraceBuilder

STACK = '  File "/job/model.py", line 8, in forward\n    h = F.gelu(self.fc1(h))\n'
KERNEL = "triton_poi_fused_gelu_0"
INFORMATION = {
    f"{KERNEL}:1": {"stack_traces": [STACK], "post_grad_nodes": ["mul"], "pre_grad_nodes": ["gelu"]},
    "extern_kernels.mm:2": {"stack_traces": [], "post_grad_nodes": ["mm"], "pre_grad_nodes": []},
}


@pytest.mark.parametrize("document", [INFORMATION, {f"{KERNEL}:1": [STACK], "extern_kernels.mm:2": []}])
def test_kernels_are_led_back_to_lines(tmp_path: Path, document: object) -> None:
    path = tmp_path / "kernel_information.json"
    path.write_text(json.dumps(document))
    code = provenance.read(path)
    assert [(line.file, line.line, line.code) for line in code.lines] == [
        ("/job/model.py", 8, "h = F.gelu(self.fc1(h))")
    ]
    assert [(call.name, call.lines) for graph in code.graphs for call in graph.calls] == [(KERNEL, (0,))]


def test_a_file_of_nodes_alone_has_no_lines_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "inductor_provenance_tracking_node_mappings.json"
    path.write_text(
        json.dumps({"preToPost": {"gelu": ["mul"]}, "cppCodeToPost": {f"{KERNEL}:1": ["mul"]}, "version": 2.0})
    )
    assert provenance.read(path).graphs == ()
    path.write_text('{"a": [')
    with pytest.raises(ValueError, match="node_mappings"):
        provenance.read(path)


def test_it_lies_beside_traces_and_is_none(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text("{}")
    beside = tmp_path / "kernel_information.json"
    beside.write_text(json.dumps(INFORMATION))
    job = open_job(tmp_path)
    assert [source.path.name for source in job.sources] == ["rank0.json"]
    assert job.provenance == (beside,)


@pytest.mark.parametrize("graph", ["", "## Call CompiledFxGraph fwd ##"])
def test_it_names_the_lines_of_kernels_that_no_rank_noted(tmp_path: Path, graph: str) -> None:
    path = tmp_path / "kernel_information.json"
    path.write_text(json.dumps(INFORMATION))
    builder = TraceBuilder().step(1, 0, 100_000).launched(KERNEL, 2_000, 10_000, 20_000)
    if graph:
        builder.op(graph, 1_000, 5_000)
    result = align_job({0: analyze_rank(builder.build())})
    found = compiled_tables({}, result, (path,))
    (row,) = kernels_with_sources(kernel_rows(result, None), found)
    assert (row.lines, row.modules) == (("/job/model.py:8",), ("forward()",))
    assert [(call.name, call.lines) for call in found.calls] == [(KERNEL, ("/job/model.py:8",))] * bool(graph)
    assert found.notes == ()
