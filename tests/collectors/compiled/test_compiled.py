"""What is noted of compiled code: nodes of graphs, code from torch's cache, and a stand-in for torch's compiler."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perfscope.collectors.compiled import cached, kept, names, watch
from perfscope.collectors.compiled.cost import compile_cost
from perfscope.collectors.compiled.sources import line_of, line_of_node, module_path
from perfscope.collectors.problems import Problems
from perfscope.recording.compiled import FROM_CODE, FROM_COMPILER, FROM_PROVENANCE, CompileCost, SourceLine, load
from perfscope.recording.paths import compiled_file
from tests.schemas import follows

STACK = (
    '  File "/job/train.py", line 14, in forward\n    x = layer(x)\n        ^^^^^^^^\n'
    '  File "/job/train.py", line 8, in forward\n    h = F.gelu(self.fc1(h))\n        ^^^^^^^^^^^^^\n'
)
MODULES = {
    "1": ("L['self'].layers[0]", "train.Mlp"),
    "2": ("L['self'].layers[0].fc1", "torch.nn.modules.linear.Linear"),
}
FC1 = SourceLine(
    module="layers.0.fc1",
    kind="Linear",
    file="/job/train.py",
    line=8,
    function="forward",
    code="h = F.gelu(self.fc1(h))",
)


def node(name: str = "linear", **meta: Any) -> Any:
    return SimpleNamespace(name=name, op="call_function", stack_trace=None, meta={"stack_trace": STACK, **meta})


@pytest.mark.parametrize(
    ("spelled", "path"),
    [
        ("L['self'].layers.1.fc2", "layers.1.fc2"),
        ("L['self']._modules['layers'][0].fc", "layers.0.fc"),
        ("L['self']._orig_mod.module.layers[0]", "layers.0"),
        ("G['model'].head", "head"),
        ("L['self']", ""),
        ("L['model'].module", ""),
        ("", ""),
    ],
)
def test_paths_are_those_of_named_modules(spelled: str, path: str) -> None:
    assert module_path(spelled) == path


def test_a_node_is_led_back_to_the_innermost_line_and_module() -> None:
    assert line_of_node(node(nn_module_stack=MODULES)) == FC1
    assert line_of_node(node(fwd_nn_module_stack=MODULES)) == FC1  # a backward's
    inside = STACK + '  File "/env/site-packages/torch/nn/functional.py", line 99, in gelu\n    return torch._C\n'
    assert line_of(inside, MODULES) == FC1
    assert line_of("", None) is None


CODE = """
# Topologically Sorted Source Nodes: [gelu], Original ATen: [aten.gelu]
# Source node to ATen node mapping:
#   gelu => mul
triton_poi_fused_gelu_0 = async_compile.triton('triton_poi_fused_gelu_0', \'\'\'
# Topologically Sorted Source Nodes: [nothing], Original ATen: []
def triton_poi_fused_gelu_0(in_ptr0):
    x.run(1)
\'\'\', device_str='cuda')

class Runner:
    def call(self, args):
        buf0 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
        # Topologically Sorted Source Nodes: [linear, permute], Original ATen: [aten.t, aten.addmm]
        # [Provenance debug handles] extern_kernels.addmm:1
        extern_kernels.addmm(arg1_1, arg0_1, out=buf0)
        stream0 = get_raw_stream(0)
        triton_poi_fused_gelu_0.run(buf0, 64, stream=stream0)
        # Source Nodes: [attn], Original ATen: [aten.bmm]
        buf2 = torch.ops.aten.bmm.default(buf0, buf1)
        return (buf2, )
"""


def test_code_from_the_cache_names_operations_of_the_model() -> None:
    captured = {"linear": (FC1, STACK), "gelu": (SourceLine(module="act"), "")}
    known_from, calls = cached.calls_of_cached(SimpleNamespace(source_code=CODE), captured)
    assert known_from == FROM_CODE
    assert calls == [
        ("extern_kernels.addmm", [FC1], ("aten.t", "aten.addmm")),
        ("triton_poi_fused_gelu_0", [SourceLine(module="act")], ("aten.gelu",)),
        ("torch.ops.aten.bmm.default", [], ("aten.bmm",)),
    ]


def test_provenance_in_the_cache_has_the_lines_of_each_call() -> None:
    moved = STACK.replace("line 8", "line 99")
    stacks = {
        "triton_poi_fused_gelu_0:10": [STACK],
        "extern_kernels.mm:2": [STACK, moved],
        "of_another_graph:1": [STACK],
    }
    code = "".join(f"    # [Provenance debug handles] {name}\n    call()\n" for name in [*stacks][:2])
    graph = SimpleNamespace(inductor_provenance_stack_traces_str=json.dumps(stacks), source_code=code)
    captured = {
        f"linear_{layer}": (SourceLine(**{**vars(FC1), "module": f"layers.{layer}.fc1"}), STACK) for layer in range(2)
    }
    # Of two layers, one line. Line 99 is not in the model any more: the program has changed since.
    both = SourceLine(**{**vars(FC1), "module": "layers.*.fc1"})
    assert cached.calls_of_cached(graph, captured) == (
        FROM_PROVENANCE,
        [("triton_poi_fused_gelu_0", [both], ()), ("extern_kernels.mm", [both], ())],
    )


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Modules that look like inductor's, of which each compilation generates one call, or takes it from a cache."""

    class CompiledFxGraph:
        _fx_graph_cache_key = "f" * 40
        source_code = CODE

        def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: dict[str, Any]) -> None:
            graph_kwargs["posted"] = True

    def set_kernel_post_grad_provenance_tracing(node_schedule: Any, kernel_name: str, is_extern: bool = False) -> None:
        return None

    def compile_fx(model: Any, options: dict[str, Any]) -> str:
        if options["hit"] is False:
            sys.modules["torch._inductor.codegen.triton"].set_kernel_post_grad_provenance_tracing(  # type: ignore[attr-defined]
                [node("addmm", nn_module_stack=MODULES), node("mul")], "triton_poi_fused_gelu_0"
            )
        CompiledFxGraph().post_compile([], None, options)
        return "compiled"

    noting = set_kernel_post_grad_provenance_tracing
    contents: dict[str, dict[str, Any]] = {
        "torch._inductor.compile_fx": {"compile_fx": compile_fx},
        "torch._inductor.debug": {"set_kernel_post_grad_provenance_tracing": noting},
        "torch._inductor.codegen.triton": {"set_kernel_post_grad_provenance_tracing": noting},
        "torch._inductor.output_code": {"CompiledFxGraph": CompiledFxGraph},
        "torch._inductor.utils": {"aggregate_origins": lambda schedule: schedule},
        "torch._inductor.runtime.cache_dir_utils": {"cache_dir": lambda: str(tmp_path)},
    }
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(watch, "_watching", [])
    noted = names.CompiledNames()
    monkeypatch.setattr(watch, "NAMES", noted)
    problems = Problems()
    watch.watch(lambda: problems)
    model = SimpleNamespace(graph=SimpleNamespace(nodes=[node("linear", nn_module_stack=MODULES), node("gelu")]))

    def run(*, hit: bool, backward: bool = False) -> dict[str, Any]:
        options = {"hit": hit, "is_backward": backward}
        assert sys.modules["torch._inductor.compile_fx"].compile_fx(model, options) == "compiled"  # type: ignore[attr-defined]
        assert options["posted"]
        return options

    return SimpleNamespace(run=run, noted=noted, problems=problems, model=model, cache=tmp_path)


def test_what_is_compiled_is_noted_and_written_once(compiler: SimpleNamespace, tmp_path: Path) -> None:
    compiler.run(hit=False)
    compiler.run(hit=False, backward=True)
    compiler.noted.write(tmp_path, 3)
    written = load(compiled_file(tmp_path, 3))
    follows("compiled", json.loads(compiled_file(tmp_path, 3).read_text(encoding="utf-8")))
    assert written.lines == (FC1, SourceLine(**{**vars(FC1), "module": "", "kind": ""}))
    assert [(graph.key, graph.backward, graph.known_from) for graph in written.graphs] == [
        ("f" * 40, False, FROM_COMPILER),
        ("f" * 40, True, FROM_COMPILER),
    ]
    assert [(call.name, call.lines) for call in written.graphs[0].calls] == [("triton_poi_fused_gelu_0", (0, 1))]
    compiled_file(tmp_path, 3).unlink()
    compiler.noted.write(tmp_path, 3)
    assert not compiled_file(tmp_path, 3).exists()  # nothing is new
    assert compiler.problems.as_tuple() == ()


def test_what_was_noted_serves_the_next_process_that_takes_the_graph_from_the_cache(
    compiler: SimpleNamespace, tmp_path: Path
) -> None:
    compiler.run(hit=False)
    compiler.run(hit=True)
    compiler.noted.write(tmp_path, 0)
    first, second = load(compiled_file(tmp_path, 0)).graphs
    assert (second.known_from, second.calls) == (FROM_COMPILER, first.calls)


def test_what_was_kept_of_another_version_of_the_program_is_not_used(compiler: SimpleNamespace) -> None:
    compiler.run(hit=False)
    for moved in compiler.model.graph.nodes:
        moved.meta["stack_trace"] = STACK.replace("line 8", "line 9")
    now = line_of_node(compiler.model.graph.nodes[0])
    assert now is not None
    assert kept.recall("f" * 40, [now]) == []
    assert kept.recall("f" * 40, [FC1]) != []
    assert kept.recall("../../elsewhere", []) == []


def test_a_compiler_that_has_changed_costs_nothing_but_the_names(
    compiler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(sys.modules["torch._inductor.utils"], "aggregate_origins")
    compiler.run(hit=False)
    compiler.run(hit=False)
    (problem,) = compiler.problems.as_tuple()
    assert "noting where compiled code comes from failed" in problem
    assert capsys.readouterr().err.count("\n") == 1


def test_parts_of_a_graph_that_name_nodes_alike_are_not_mixed_up(compiler: SimpleNamespace, tmp_path: Path) -> None:
    """DDP has a model compiled in parts, each of which has a node ``linear``; the backwards come last."""
    compiler.run(hit=True)
    other = STACK.replace("line 8", "line 9")
    compiler.model.graph.nodes[0].meta["stack_trace"] = other
    compiler.run(hit=True)
    graph = sys.modules["torch._inductor.output_code"].CompiledFxGraph()  # type: ignore[attr-defined]
    graph.post_compile([], None, {"is_backward": True})
    compiler.noted.write(tmp_path, 0)
    code = load(compiled_file(tmp_path, 0))
    lines = [[code.lines[place].line for place in graph.calls[0].lines] for graph in code.graphs]
    assert lines == [[8], [9], []]


def test_what_compiling_took_is_the_sum_of_torchs_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: dict[str, list[float]] = {}
    utils = types.ModuleType("torch._dynamo.utils")
    utils.compilation_time_metrics = timers  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    assert compile_cost() is None
    timers["_compile.compile_inner"] = [10.0, 2.0]  # a frame, with its forward
    timers["compile_fx_inner"] = [7.0, 1.0, 3.0]
    timers["backward._backward_impl"] = [3.5]  # compiled when it was first called
    assert compile_cost() == CompileCost(whole_s=15.5, inductor_s=11.0, graphs=3)
    monkeypatch.delattr(utils, "compilation_time_metrics")
    assert compile_cost() is None
