"""FLOPs against products worked out by hand, and against torch's own counter where torch is installed."""

from __future__ import annotations

import json

import pytest

from perfscope.analyzers.flops import flops_of
from perfscope.analyzers.rank import analyze_rank
from tests.traces import TraceBuilder


def count(name: str, shapes: list, inputs: list | None = None, types: list | None = None) -> tuple[float, float]:
    found = flops_of(name, json.dumps(shapes), json.dumps(types or ["float"] * len(shapes)), json.dumps(inputs or []))
    assert found is not None
    return found[0].model, found[0].hardware


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("aten::mm", [[2, 3], [3, 5]], 2 * 2 * 3 * 5),
        ("aten::addmm", [[5], [2, 3], [3, 5], [], []], 60),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], 7 * 60),
        ("aten::baddbmm", [[7, 2, 5], [7, 2, 3], [7, 3, 5], [], []], 7 * 60),
        # 2 batches, 4 heads, 8 queries, 16 keys of head size 32: QK^T and PV.
        ("aten::_scaled_dot_product_flash_attention", [[2, 4, 8, 32], [2, 4, 16, 32], [2, 4, 16, 32]], 2 * 65536),
        ("flash_attn::_flash_attn_forward", [[2, 8, 4, 32], [2, 16, 4, 32], [2, 16, 4, 32]], 2 * 65536),
    ],
)
def test_products(name, shapes, expected):
    assert count(name, shapes) == (expected, expected)


def test_attention_s_backward_counts_its_recomputation_as_hardware_work_only():
    shapes = [[2, 4, 8, 32], [2, 4, 8, 32], [2, 4, 16, 32], [2, 4, 16, 32]]
    # Four products for the model; the fused kernel computes QK^T once more.
    name = "aten::_scaled_dot_product_flash_attention_backward"
    assert count(name, shapes) == (4 * 65536, 5 * 65536)


def test_convolution_and_its_backward():
    # 8 images of 3x32x32, 16 kernels of 3x3, padding 1: 32x32 outputs.
    inputs = ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"]
    one = 2 * 8 * 16 * 32 * 32 * 3 * 3 * 3
    assert count("aten::convolution", [[8, 3, 32, 32], [16, 3, 3, 3], [16]], inputs) == (one, one)
    backward = ["", "", "", "[16]", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[False, True, True]"]
    shapes = [[8, 16, 32, 32], [8, 3, 32, 32], [16, 3, 3, 3]]
    # The first layer wants no gradient of its input: one product, not two.
    assert count("aten::convolution_backward", shapes, backward) == (one, one)


def test_strided_grouped_convolution():
    inputs = ["", "", "", "[2, 2]", "[0, 0]", "[1, 1]", "False", "[0, 0]", "4"]
    # 4 groups of 2 channels each; (9 - 3) // 2 + 1 = 4 outputs a side.
    expected = 2 * 1 * 4 * 4 * 8 * 2 * 3 * 3
    assert count("aten::convolution", [[1, 8, 9, 9], [8, 2, 3, 3], []], inputs) == (expected, expected)


def test_what_is_no_product_or_has_no_usable_shape_counts_nothing():
    assert flops_of("aten::add", "[[2, 3], [2, 3]]", '["float"]', "") is None
    assert flops_of("aten::mm", "", "", "") is None
    assert flops_of("aten::mm", "[[], []]", '["float", "float"]', "") is None


def test_a_rank_s_flops_by_step_type_and_coverage():
    builder = TraceBuilder().step(1, 0, 100).step(2, 100, 200)
    half = {"types": ["c10::BFloat16", "c10::BFloat16"]}
    builder.op("aten::mm", 10, 30, shapes=[[2, 3], [3, 5]], **half)
    builder.op("aten::linear", 110, 150).op("aten::mm", 115, 145, shapes=[[4, 3], [3, 5]], **half)
    builder.op("aten::mm", 160, 170)
    flops = analyze_rank(builder.build()).flops
    assert flops.model.tolist() == [60, 120]
    assert flops.dtype == "bfloat16"
    # 50 of 60 ns of matrix operators have shapes.
    assert flops.coverage == pytest.approx(50 / 60)


@pytest.mark.parametrize("case", ["linear", "conv", "attention"])
def test_agrees_with_torch_s_own_counter(case, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.utils.flop_counter import FlopCounterMode

    from perfscope.analyzers.readers import chrome

    torch.manual_seed(0)
    if case == "linear":
        model, data = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)), torch.randn(5, 8)
    elif case == "conv":
        # No groups: torch's counter takes the weight gradient of a grouped convolution groups times.
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 4, 3, stride=2))
        data = torch.randn(2, 3, 16, 16)
    else:
        model, data = torch.nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 10, 32)

    def train() -> None:
        # Attention by plain products: torch's counter knows no fused attention on a CPU.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = model(data, data, data, need_weights=False)[0] if case == "attention" else model(data)
        out.sum().backward()

    with FlopCounterMode(display=False) as counter:
        train()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=cpu, record_shapes=True) as profiler,
        torch.profiler.record_function("ProfilerStep#1"),
    ):
        train()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    flops = analyze_rank(chrome.read(tmp_path / "trace.json")).flops
    assert int(flops.model.sum()) == int(flops.hardware.sum()) == counter.get_total_flops()
    assert flops.coverage == 1.0
