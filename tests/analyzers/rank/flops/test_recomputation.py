"""Where forwards run again in the backward: traces small enough to check by eye, and torch's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers import readers
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.flops.recomputation import stretches
from perfscope.analyzers.rank.nesting import Nested
from perfscope.trace.trace import NONE, Category, MemoryCounter, Trace
from tests.collectors.harness import needs_torch
from tests.traces import AUTOGRAD, TraceBuilder

NODE = "autograd::engine::evaluate_function: "


def found(trace: Trace) -> list[tuple[int, int]]:
    every = stretches(trace, Nested.of(trace, trace.rows(Category.CPU_OP)))
    return list(zip(every.start_ns.tolist(), every.end_ns.tolist(), strict=True))


def node(builder: TraceBuilder, name: str, start: int, end: int, *inside: tuple[str, int, int]) -> None:
    """A node of autograd and the operators directly in it."""
    builder.op(NODE + name, start, end, AUTOGRAD).op(name, start, end, AUTOGRAD)
    for operator in inside:
        builder.op(*operator, AUTOGRAD)


def test_a_node_runs_a_forward_until_its_own_backward() -> None:
    builder = TraceBuilder()
    forward = (("aten::linear", 110, 130), ("aten::gelu", 131, 140))
    node(builder, "GeluBackward0", 100, 200, *forward, ("aten::gelu_backward", 150, 190))
    node(builder, "AddmmBackward0", 200, 300, ("aten::mm", 210, 290))
    assert found(builder.build()) == [(100, 150)]


def test_a_node_of_primitives_has_as_many_of_its_own_as_others_of_its_name() -> None:
    builder = TraceBuilder()
    own = (("aten::mul", 140, 150), ("aten::mul", 155, 160))
    node(builder, "MulBackward0", 100, 200, ("aten::linear", 110, 130), ("aten::mul", 131, 139), *own)
    node(builder, "MulBackward0", 200, 300, ("aten::mul", 210, 220), ("aten::mul", 230, 240))
    assert found(builder.build()) == [(100, 140)]


def test_a_node_of_which_no_other_is_known_ends_with_what_only_forwards_call() -> None:
    builder = TraceBuilder()
    node(builder, "MulBackward0", 100, 200, ("aten::linear", 110, 130), ("aten::mul", 140, 150))
    assert found(builder.build()) == [(100, 140)]


def test_a_reentrant_checkpoint_runs_a_forward_until_the_backward_in_it() -> None:
    builder = TraceBuilder().op(NODE + "CheckpointFunctionBackward", 100, 400, AUTOGRAD)
    builder.op("CheckpointFunctionBackward", 101, 400, AUTOGRAD).op("aten::linear", 110, 130, AUTOGRAD)
    node(builder, "AddmmBackward0", 200, 300, ("aten::mm", 210, 290))
    builder.op("aten::detach", 350, 360, AUTOGRAD)
    assert found(builder.build()) == [(101, 130)]


def test_memory_grows_by_what_is_kept_and_kernels_belong_to_their_launches() -> None:
    builder = TraceBuilder().step(0, 0, 1000)
    for launch, start in ((50, 60), (300, 700)):
        builder.launched("gemm", launch, start, start + 50)
    node(builder, "GeluBackward0", 200, 400, ("aten::linear", 250, 330), ("aten::gelu_backward", 350, 390))
    trace = builder.build()
    moments, held = np.array([100, 260, 320, 360]), np.array([1000, 5000, 4000, 9000])
    counter = MemoryCounter(moments, np.zeros(4, dtype=np.int64), held, np.full(4, NONE))
    partial = analyze_rank(replace(trace, memory=counter))
    again = partial.recomputation
    assert again.count.tolist() == [1]
    assert again.grown_bytes is not None
    assert again.grown_bytes.tolist() == [3000], "4000 bytes when the node's own work begins, 1000 before"
    assert (again.device.start_ns.tolist(), again.device.end_ns.tolist()) == ([700], [750])


@needs_torch
@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_own_checkpoints_are_found_one_for_each_block(tmp_path: Path, *, reentrant: bool) -> None:
    """What is found lies between the record_function ranges that the blocks' own code opens and closes again."""
    import torch
    from torch.utils.checkpoint import checkpoint

    class Block(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.profiler.record_function("block"):
                out: torch.Tensor = super().forward(x)
                return out

    layers = (torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64), torch.nn.SiLU())
    blocks = [Block(*layers) for _ in range(3)]
    x = torch.randn(64, 64, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        h = x
        for block in blocks:
            h = h + checkpoint(block, h, use_reentrant=reentrant)
        h.sum().backward()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    trace = readers.read(path)
    spans = found(trace)
    assert len(spans) == len(blocks)
    ranges = trace.rows(Category.ANNOTATION, named="block".__eq__)
    again = [(int(trace.start_ns[row]), int(trace.end_ns[row])) for row in ranges][len(blocks) :]
    assert len(again) == len(blocks)
    for (start, end), (opened, closed) in zip(sorted(spans), again, strict=True):
        inside = min(end, closed) - max(start, opened)
        assert inside > 0.7 * (closed - opened)


def test_a_product_in_which_the_forward_stops_is_not_computed() -> None:
    """On a host: the block's last call saves its input, and torch raises before it multiplies."""
    shapes = [[8], [4, 2], [2, 8]]
    builder = TraceBuilder().step(0, 0, 1000)
    for start in (100, 200):
        builder.op("aten::addmm", start, start + 50, shapes=shapes).op("aten::copy_", start + 5, start + 9)
    for name, start, end in ((NODE + "AddmmBackward0", 300, 500), ("AddmmBackward0", 301, 499)):
        builder.op(name, start, end)
    builder.op("aten::linear", 310, 345)
    builder.op("aten::addmm", 312, 340, shapes=shapes).op("aten::copy_", 314, 320)
    builder.op("aten::linear", 350, 395).op("aten::addmm", 360, 390, shapes=shapes)
    builder.op("aten::mm", 400, 450)
    flops = analyze_rank(builder.build()).flops
    once = 2 * 4 * 2 * 8
    assert (flops.model.sum(), flops.hardware.sum()) == (2 * once, 3 * once)
