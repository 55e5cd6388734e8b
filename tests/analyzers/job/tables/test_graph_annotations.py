"""Kernels of CUDA graphs are led back to what the program said of them: in the trace, beside it, and in a recording.

What torch itself writes is written by torch: its registry of annotations, and the script that puts them into a trace.
The graphs are this file's own: no driver that annotates is needed for that.
"""

from __future__ import annotations

import gzip
import json
import pickle
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from perfscope import analyze
from perfscope.analyzers.readers import read as read_trace
from perfscope.collectors.compiled.names import CompiledNames
from perfscope.recording.compiled import SourceLine, load, of_annotation
from perfscope.recording.kernel_annotations import find
from perfscope.results.summary import Summary

MODULES = ("layers.0.attention.wq", "layers.1.attention.wq", "layers.0.mlp", "norm", "")
"""The last one: nothing is said of the kernel."""
KERNELS = ("gemm", "flash_fwd", "layer_norm", "elementwise")

Annotated = dict[int, list[Any]]


def folded(module: str) -> str:
    """Layers that differ in numbers as one."""
    return re.sub(r"\d", "*", module)


class Job:
    """Steps that replay one CUDA graph; which kernel is of which module is drawn, and the truth added up as it is."""

    def __init__(self, seed: int = 1, graph: int = 7, steps: int = 5, nodes: int = 24) -> None:
        draw = random.Random(seed)
        self.annotations: Annotated = {}
        self.truth: defaultdict[tuple[str, str | None], int] = defaultdict(int)
        """(module, direction) -> µs of a step."""
        self.kernels: defaultdict[str, set[str]] = defaultdict(set)
        """Kernel -> modules."""
        self.events = [self._event("ProfilerStep#1", "user_annotation", 0, 10)]
        drawn = []
        for number in range(1, nodes + 1):
            module, kernel = draw.choice(MODULES), draw.choice(KERNELS)
            backward = draw.random() < 0.5
            node = (graph << 32) | number
            drawn.append((node, kernel, draw.randrange(2, 40)))
            if module:
                said = {"module_fqn": module, "name": "not this"} if draw.random() < 0.5 else {"name": module}
                self.annotations[node] = [said | ({"autograd_phase": "backward"} if backward else {})]
                self.kernels[kernel].add(folded(module))
            self.truth[module, "backward" if backward and module else None] += drawn[-1][2]
        self.events = []
        at = 100
        for step in range(1, steps + 1):
            begin = at
            self.events.append(self._event("cudaGraphLaunch", "cuda_runtime", at, 5, correlation=step))
            at += 10
            for node, kernel, length in drawn:
                # As kineto writes them; the eager kernels of a trace have zeros there.
                place = {"device": 0, "stream": 7, "correlation": step, "graph id": graph, "graph node id": node}
                self.events.append(self._event(kernel, "kernel", at, length, **place))
                at += length
            eager = {"device": 0, "stream": 7, "correlation": 100 + step, "graph id": 0, "graph node id": 0}
            self.events.append(self._event("cudaLaunchKernel", "cuda_runtime", at, 2, correlation=100 + step))
            self.events.append(self._event("eager", "kernel", at + 2, 8, **eager))
            at += 20
            self.events.append(self._event(f"ProfilerStep#{step}", "user_annotation", begin, at - begin))

    @staticmethod
    def _event(name: str, cat: str, start: int, length: int, **args: Any) -> dict[str, Any]:
        device = cat == "kernel"
        place = {"pid": 0, "tid": 7} if device else {"pid": 1, "tid": 1}
        return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": length, **place, "args": args}

    def trace(self) -> dict[str, Any]:
        """The document that kineto writes."""
        device = {"id": 0, "name": "NVIDIA H100"}
        return {"schemaVersion": 1, "deviceProperties": [device], "traceEvents": self.events}

    def write(self, folder: Path) -> Path:
        """The trace of rank 0 as torchtitan names it."""
        path = folder / "rank0_trace.json"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.trace()))
        return path


def check(summary: Summary, job: Job) -> None:
    """The analysis tells each module's time as it was planted, and of each kernel the modules."""
    found: defaultdict[tuple[str, str | None], float] = defaultdict(float)
    for row in summary.compiled:
        (module,) = row.modules
        found[folded(module), row.direction] += row.device_us_per_step
    planted: defaultdict[tuple[str, str | None], float] = defaultdict(float)
    for (module, direction), us in job.truth.items():
        if module:
            planted[folded(module), direction] += us
    assert found == pytest.approx(planted)
    for row in summary.kernels:
        assert set(map(folded, row.modules)) == job.kernels[row.name]
    unknown = sum(us for (module, _), us in job.truth.items() if not module) / sum(job.truth.values())
    notes = [each for each in summary.notes if each.kind == "graphs_not_annotated"]
    assert [each.values["share"] for each in notes] == pytest.approx([unknown] if unknown > 0.1 else [])


@pytest.mark.parametrize("seed", range(5))
def test_annotations_beside_the_trace(tmp_path: Path, seed: int) -> None:
    """Where torchtitan puts them: the run's pickle beside the folders of its steps."""
    job = Job(seed)
    job.write(tmp_path / "step_000000000014")
    (tmp_path / "kernel_annotations_rank0_0.pkl").write_bytes(pickle.dumps(job.annotations))
    check(analyze(tmp_path / "step_000000000014"), job)
    check(analyze(tmp_path), job)


def test_annotations_that_torch_has_put_into_the_trace(tmp_path: Path) -> None:
    script = pytest.importorskip("torch.cuda._annotate_cuda_graph_trace", reason="torch 2.12 or newer")
    job = Job(11)
    trace = job.trace()
    count = script.annotate_trace(trace, job.annotations)
    assert count == 5 * len(job.annotations)
    script.save_trace(trace, tmp_path / "rank0.json.gz")
    assert gzip.decompress((tmp_path / "rank0.json.gz").read_bytes()).count(b"module_fqn")
    check(analyze(tmp_path), job)


def test_a_recording_keeps_what_torch_has_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = pytest.importorskip("torch.cuda._graph_annotations", reason="torch 2.12 or newer")
    job = Job(12)
    monkeypatch.setattr(registry, "_kernel_annotations", job.annotations)
    CompiledNames().write(tmp_path, 0)
    job.write(tmp_path).rename(tmp_path / "rank-00000.capture-0.trace.json")
    check(analyze(tmp_path), job)
    (tmp_path / "rank-00000.compiled.json").unlink()
    registered = CompiledNames()
    registered.write(tmp_path, 0)
    before = (tmp_path / "rank-00000.compiled.json").stat().st_mtime_ns
    registered.write(tmp_path, 0)
    assert (tmp_path / "rank-00000.compiled.json").stat().st_mtime_ns == before, "nothing new"
    # A graph that is gone leaves torch's registry; it has been recorded.
    monkeypatch.setattr(registry, "_kernel_annotations", {99: ["head"]})
    registered.write(tmp_path, 0)
    nodes = {each.node for each in load(tmp_path / "rank-00000.compiled.json").nodes}
    assert nodes == job.annotations.keys() | {99}


def test_where_it_was_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.15 can record the calls, innermost first."""
    registry = pytest.importorskip("torch.cuda._graph_annotations", reason="torch 2.12 or newer")
    stacks = {5: "/job/model.py:12:forward\n/job/train.py:40:main", 6: "nothing that is a place"}
    monkeypatch.setattr(registry, "get_kernel_py_stacks", lambda: stacks, raising=False)
    monkeypatch.setattr(registry, "_kernel_annotations", {5: [{"name": "attention"}]})
    CompiledNames().write(tmp_path, 0)
    code = load(tmp_path / "rank-00000.compiled.json")
    assert [(each.node, code.lines[each.line]) for each in code.nodes] == [
        (5, SourceLine(module="attention", file="/job/model.py", line=12, function="forward"))
    ]


@pytest.mark.parametrize(
    ("said", "module", "backward"),
    [
        ([{"str": "attention"}], "attention", None),  # torch 2.12 and 2.13
        ([{"name": "attention", "autograd_phase": "backward"}], "attention", True),  # 2.14
        ([{"name": "wq", "module_fqn": "layers.0.wq"}], "layers.0.wq", None),
        (["outer", {"autograd_phase": "forward"}], "outer", False),
        ({"annotation": "loss"}, "loss", None),
    ],
)
def test_what_annotations_say(said: Any, module: str, backward: bool | None) -> None:
    assert of_annotation(said) == (SourceLine(module=module), backward)


@pytest.mark.parametrize("said", [[], {}, [{"stream": 60}], [{"name": 7}], None, 3, [[["x"]]]])
def test_annotations_that_name_nothing(said: Any) -> None:
    assert of_annotation(said) is None


def test_what_is_no_annotation_of_kernels_is_refused_by_name(tmp_path: Path) -> None:
    job = Job(13)
    job.write(tmp_path)
    path = tmp_path / "kernel_annotations_rank0.pkl"
    path.write_bytes(pickle.dumps(defaultdict(list, job.annotations)))
    (said,) = [each for each in analyze(tmp_path).notes if each.kind == "compiled_unreadable"]
    assert str(path) in said.text
    assert "pickle it as dict(get_kernel_annotations())" in said.text
    path.write_bytes(pickle.dumps([1, 2]))
    assert analyze(tmp_path).compiled == ()
    assert find([path, tmp_path / "kernel_annotations_rank12_x.pkl", tmp_path / "kernel_annotations_rankx.pkl"]) == {
        0: path,
        12: tmp_path / "kernel_annotations_rank12_x.pkl",
    }


def test_ids_of_graph_and_node_that_are_apart_are_one(tmp_path: Path) -> None:
    job = Job(14)
    for event in job.events:
        if event["args"].get("graph node id"):
            event["args"]["graph node id"] &= (1 << 32) - 1
    (tmp_path / "kernel_annotations_rank0.pkl").write_bytes(pickle.dumps(job.annotations))
    trace = read_trace(job.write(tmp_path))
    assert set(trace.graph_nodes.node.tolist()) >= job.annotations.keys()
    check(analyze(tmp_path), job)
