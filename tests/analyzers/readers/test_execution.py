"""Execution traces complete traces without shapes, are found by content, and are never taken for broken traces."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

import perfscope
from perfscope.analyzers.cached import read_trace
from perfscope.analyzers.readers.execution import complete, read
from perfscope.errors import TraceError, UnusableInput
from perfscope.recording import execution_traces
from perfscope.recording.job import open_job
from perfscope.trace.trace import NONE, Category, Trace
from tests.analyzers.measured import measured
from tests.collectors.harness import needs_torch
from tests.generator import JobSpec, cpu_job, simulate
from tests.traces import TraceBuilder

MM = ([[1, 2, 0, 2048, 4, "cpu"], [3, 4, 0, 64, 4, "cpu"]], [[32, 64], [64, 1]], ["Tensor(float)", "Tensor(float)"])
ADD = ([[1, 2, 0, 9, 4, "cpu"], 2, "<None>", "cpu"], [[9], [], [], []], ["Tensor(float)", "Int", "None", "Device"])
CAT = ([[[1], [2]], -1], [[[2, 3], [2, 4]], []], ["GenericList[Tensor(float),Tensor(float)]", "Int"])


def node(number: int, name: str, given: tuple[Any, Any, Any] = ([], [], [])) -> dict[str, Any]:
    inputs = dict(zip(("values", "shapes", "types"), given, strict=True))
    attributes = [{"name": "rf_id", "type": "uint64", "value": number}]
    return {"id": 100 + number, "name": name, "ctrl_deps": 1, "inputs": inputs, "outputs": {}, "attrs": attributes}


def write(path: Path, *nodes: dict[str, Any], pid: int = 7) -> Path:
    text = json.dumps({"schema": "1.1.1-chakra.0.0.4", "pid": pid, "time": "now", "start_ts": 1, "nodes": nodes})
    path.write_bytes(gzip.compress(text.encode()) if path.name.endswith(".gz") else text.encode())
    return path


def described(trace: Trace) -> list[tuple[str, str, str, str]]:
    """Name, dimensions, types and concrete inputs of each operator."""
    texts = (*trace.strings, "")
    return [
        (trace.name_of(row), *(texts[column[row]] for column in (trace.shapes, trace.types, trace.inputs)))
        for row in trace.rows(Category.CPU_OP).tolist()
    ]


def operators(*ids: int) -> Trace:
    builder = TraceBuilder()
    for place, (name, number) in enumerate(zip(("aten::mm", "aten::add", "aten::cat"), ids, strict=True)):
        builder.op(name, 100 * place, 100 * place + 50, external_id=number)
    return builder.build()


@pytest.mark.parametrize("ids", [(4, 5, 6), (904, 905, 906), (NONE, NONE, NONE)])
def test_inputs_are_those_that_kineto_would_have_written(ids: tuple[int, int, int], tmp_path: Path) -> None:
    path = write(
        tmp_path / "et.json",
        node(0, "[pytorch|profiler|execution_trace|thread]"),
        node(5, "aten::add", ADD),
        node(4, "aten::mm", MM),
        node(6, "aten::cat", CAT),
        node(7, "aten::not_in_the_trace", MM),
    )
    trace = complete(operators(*ids), read(path))
    assert described(trace) == [
        ("aten::mm", "[[32, 64], [64, 1]]", '["float", "float"]', '["", ""]'),
        ("aten::add", "[[9], [], [], []]", '["float", "Scalar", "", ""]', '["", "2", "", ""]'),
        ("aten::cat", "[[[2, 3], [2, 4]], []]", '["TensorList", "Scalar"]', '["", "-1"]'),
    ]
    assert trace.has_shapes
    assert trace.parse_report.notes == ("shapes of 3 operators are from the execution trace et.json",)
    trace.self_check()


def test_names_that_differ_in_number_are_not_paired_by_order(tmp_path: Path) -> None:
    path = write(tmp_path / "et.json", node(1, "aten::mm", MM), node(2, "aten::mm", MM), node(3, "aten::add", ADD))
    shapes = {name: dims for name, dims, *_ in described(complete(operators(901, 902, 903), read(path)))}
    assert shapes == {"aten::mm": "", "aten::add": "[[9], [], [], []]", "aten::cat": ""}


def test_process_groups_come_from_it_where_the_trace_lists_none(tmp_path: Path) -> None:
    groups = json.dumps(
        [{"pg_name": "3", "pg_desc": "tp", "ranks": [0, 2]}, {"pg_name": "0", "ranks": [], "group_size": 4}]
    )
    path = write(tmp_path / "et.json", node(1, "## process_group:init ##", ([groups], [[]], ["String"])))
    trace = complete(operators(4, 5, 6), read(path))
    assert [(group.name, group.description, group.ranks) for group in trace.groups] == [
        ("3", "tp", (0, 2)),
        ("0", "", (0, 1, 2, 3)),
    ]


def test_one_that_is_cut_short_costs_nothing_but_the_shapes(tmp_path: Path) -> None:
    simulate(cpu_job()).write(tmp_path)
    cut = tmp_path / "et_rank0.json"
    write(cut, node(1, "aten::mm", MM))
    cut.write_text(cut.read_text()[:-30])
    with pytest.raises(TraceError, match=r"et_rank0\.json: is cut short or damaged"):
        read(cut)
    summary = perfscope.analyze(tmp_path, workers=1)
    assert summary.job.failures == ()
    assert any("et_rank0.json" in note.text and "cut short" in note.text for note in summary.notes)


def test_files_are_recognized_by_content_and_belong_to_the_rank_in_their_names(tmp_path: Path) -> None:
    simulate(JobSpec(ranks=2, steps=3)).write(tmp_path)
    first = write(tmp_path / "et_rank0.json")
    second = write(tmp_path / "whatever.rank1.json.gz")
    lost = write(tmp_path / "nobody.json")
    job = open_job(tmp_path)
    assert {source.named_rank: source.execution for source in job.sources} == {0: first, 1: second}
    (problem,) = job.problems
    assert problem.path == lost
    assert "name it et_rank<N>.json" in problem.error
    assert set(execution_traces.find(tmp_path.iterdir())) == {first, second, lost}


def test_the_process_in_the_name_of_a_trace_is_that_of_its_execution_trace(tmp_path: Path) -> None:
    for pid in (41, 42):
        (tmp_path / f"node0_{pid}.1717000000123.pt.trace.json").write_text('{"traceEvents": []}')
        write(tmp_path / f"tmp{pid}.et.json", pid=pid)
    pairs = {source.path.name[:8]: source.execution for source in open_job(tmp_path).sources}
    assert pairs == {"node0_41": tmp_path / "tmp41.et.json", "node0_42": tmp_path / "tmp42.et.json"}


def test_alone_it_is_named_for_what_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "et_rank0.json")
    for place in (path, tmp_path):
        with pytest.raises(UnusableInput, match="has operators but no times"):
            open_job(place)


@needs_torch
@pytest.mark.frameworks
def test_flops_are_those_of_a_trace_with_shapes(tmp_path: Path) -> None:
    torch: Any = importlib.import_module("torch")
    profiler: Any = importlib.import_module("torch.profiler")
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for place in ("with", "without"):
        (tmp_path / place).mkdir()
    path = tmp_path / "with" / "trace.json"
    observer = profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "without" / "et.json"))
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], record_shapes=True) as recorded:
        observer.start()
        for _ in range(3):
            model(torch.ones(4, 3, 8, 8)).sum().backward()
            optimizer.step()
            recorded.step()
        observer.unregister_callback()
    recorded.export_chrome_trace(str(path))
    document = json.loads(path.read_text())
    for event in document["traceEvents"]:
        for key in ("Input Dims", "Input type", "Concrete Inputs", "Input Strides"):
            event.get("args", {}).pop(key, None)
    bare = tmp_path / "without" / "trace.json"
    bare.write_text(json.dumps(document))
    assert measured(bare).utilisation.model_flops_per_step is None
    whole, completed = (measured(tmp_path / place).utilisation for place in ("with", "without"))
    assert completed.model_flops_per_step == whole.model_flops_per_step
    assert (whole.model_flops_per_step or 0) > 0
    trace = read_trace(bare, None, tmp_path / "without" / "et.json")
    assert (trace.shapes[trace.rows(Category.CPU_OP)] != NONE).sum() > 100
