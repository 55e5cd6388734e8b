"""FLOPs against products worked out by hand, and against torch's own counter where torch is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.flops.calls import flops_of
from perfscope.analyzers.rank.work.flops import product_type
from perfscope.analyzers.rank.work.tables import SINGLE_OR_TF32, RankFlops
from perfscope.errors import PerfscopeError
from perfscope.trace.custom_flops import CustomFlops
from tests.traces import AUTOGRAD, TraceBuilder

HALF = {"types": ["c10::BFloat16", "c10::BFloat16"]}
SINGLE = {"types": ["float", "float"]}
EVERY_STEP = slice(None)


def count(name: str, shapes: list, inputs: list | None = None, types: list | None = None) -> tuple[float, float]:
    found = flops_of(name, json.dumps(shapes), json.dumps(types or ["float"] * len(shapes)), json.dumps(inputs or []))
    assert found is not None
    return found[0].model, found[0].hardware


def by_type(flops: RankFlops) -> dict[str | None, float]:
    return {name: float(row.sum()) for name, row in zip(flops.types, flops.model, strict=True) if row.any()}


def totals(flops: RankFlops) -> tuple[int, int]:
    return int(flops.model.sum()), int(flops.hardware.sum())


@pytest.mark.parametrize(
    ("name", "shapes", "expected"),
    [
        ("aten::mm", [[2, 3], [3, 5]], 2 * 2 * 3 * 5),
        ("aten::addmm", [[5], [2, 3], [3, 5], [], []], 60),
        ("aten::addmm_", [[2, 5], [2, 3], [3, 5], [], []], 60),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], 7 * 60),
        ("aten::baddbmm", [[7, 2, 5], [7, 2, 3], [7, 3, 5], [], []], 7 * 60),
        ("aten::mv", [[2, 3], [3]], 2 * 2 * 3),
        ("aten::addmv_", [[2], [2, 3], [3], [], []], 2 * 2 * 3),
        ("aten::linear", [[4, 2, 3], [5, 3], [5]], 4 * 60),
        ("aten::matmul", [[7, 1, 2, 3], [4, 3, 5]], 7 * 4 * 60),
        ("aten::matmul", [[3], [3]], 6),
        ("aten::matmul", [[7, 2, 3], [3]], 7 * 12),
        ("aten::_scaled_mm", [[2, 3], [3, 5], [], []], 60),
        ("aten::_grouped_mm", [[4, 2, 3], [4, 3, 5], []], 4 * 60),
        # 10 rows in 4 groups, each with a matrix of its own; the offsets' values do not matter.
        ("aten::_grouped_mm", [[10, 3], [4, 3, 5], [4]], 2 * 10 * 3 * 5),
        ("aten::_grouped_mm", [[4, 2, 3], [3, 20], [4]], 2 * 2 * 3 * 20),
        ("aten::_scaled_grouped_mm", [[2, 12], [12, 5], [2, 4], [4, 5], [4]], 2 * 2 * 12 * 5),
        # 2 batches, 4 heads, 8 queries, 16 keys of head size 32: QK^T and PV.
        ("aten::_scaled_dot_product_flash_attention", [[2, 4, 8, 32], [2, 4, 16, 32], [2, 4, 16, 32]], 2 * 65536),
        # The same, 4 query heads sharing one key head.
        ("aten::_scaled_dot_product_cudnn_attention", [[2, 4, 8, 32], [2, 1, 16, 32], [2, 1, 16, 32]], 2 * 65536),
        # Values of size 64.
        ("aten::_scaled_dot_product_efficient_attention", [[2, 4, 8, 32], [2, 4, 16, 32], [2, 4, 16, 64]], 3 * 65536),
        ("aten::_flash_attention_forward", [[2, 8, 4, 32], [2, 16, 4, 32], [2, 16, 4, 32], [], []], 2 * 65536),
        ("aten::_efficient_attention_forward", [*[[2, 8, 4, 32]] * 3, [], [], []], 65536),
        ("flash_attn::_flash_attn_forward", [[2, 8, 4, 32], [2, 16, 4, 32], [2, 16, 4, 32]], 2 * 65536),
        ("flash_attn_3::fwd", [[2, 8, 4, 32], [2, 16, 4, 32], [2, 16, 4, 32], *[[]] * 20], 2 * 65536),
    ],
)  # fmt: skip
def test_products(name, shapes, expected):
    assert count(name, shapes) == (expected, expected)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("aten::_scaled_dot_product_flash_attention_backward", [[2, 4, 8, 32], [2, 4, 8, 32], *[[2, 4, 16, 32]] * 2]),
        ("aten::_flash_attention_backward", [[2, 8, 4, 32], [2, 8, 4, 32], *[[2, 16, 4, 32]] * 2]),
        ("flash_attn_3::bwd", [[2, 8, 4, 32], [2, 8, 4, 32], *[[2, 16, 4, 32]] * 2]),
    ],
)
def test_attention_s_backward_counts_its_recomputation_as_hardware_work_only(name, shapes):
    # Four products for the model; the fused kernel computes QK^T once more.
    assert count(name, shapes) == (4 * 65536, 5 * 65536)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("aten::_flash_attention_forward", [*[[40, 4, 32]] * 3, [3], [3]]),
        ("aten::_efficient_attention_forward", [*[[1, 40, 4, 32]] * 3, [], [3], [3]]),
        ("flash_attn_3::fwd", [*[[40, 4, 32]] * 3, *[[]] * 4, [3], [3]]),
        ("aten::_scaled_dot_product_flash_attention", [[], [], []]),
    ],
)
def test_attention_over_packed_sequences_is_not_guessed(name, shapes):
    assert flops_of(name, json.dumps(shapes), "", "") is None


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


def test_dilated_convolution_in_one_dimension():
    inputs = ["", "", "", "[1]", "[2]", "[2]", "False", "[0]", "1"]
    # (10 + 2*2 - 2*(3 - 1) - 1) + 1 = 10 outputs.
    assert count("aten::convolution", [[2, 4, 10], [6, 4, 3], []], inputs)[0] == 2 * 2 * 10 * 6 * 4 * 3


@pytest.mark.parametrize(
    ("operator", "inputs"),
    [
        ("aten::conv2d", ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "1"]),
        ("aten::cudnn_convolution", ["", "", "[1, 1]", "[2, 2]", "[1, 1]", "1", "True", "False", "True"]),
        ("aten::miopen_convolution", ["", "", "", "[1, 1]", "[2, 2]", "[1, 1]", "1", "True", "False"]),
        ("aten::mkldnn_convolution", ["", "", "", "[1, 1]", "[2, 2]", "[1, 1]", "1"]),
    ],
)
def test_a_convolution_by_any_of_its_operators(operator: str, inputs: list[str]) -> None:
    """Stride 2 and padding 1 of a kernel of 3 halve 32 to 16."""
    expected = 2 * 8 * 16 * 16 * 16 * 3 * 3 * 3
    assert count(operator, [[8, 3, 32, 32], [16, 3, 3, 3], []], inputs) == (expected, expected)


def test_cudnn_s_recurrent_layers():
    # Two LSTM layers, both directions, 5 times, 2 sequences, 8 features, 16 hidden: the second is fed both directions.
    first, second = 4 * 16 * (8 + 16), 4 * 16 * (32 + 16)
    expected = 2 * 5 * 2 * 2 * (first + second)
    weights = [[64, 8], [64, 16], [64], [64]] * 4
    shapes = [[5, 2, 8], weights, [], [], [4, 2, 16], [4, 2, 16]]
    settings = ["2", "16", "0", "2", "False", "0.", "True", "True", "[]"]
    assert count("aten::_cudnn_rnn", shapes, [""] * 6 + settings)[0] == expected
    backward = [""] * 10 + settings + ["", "", "[True, True, True, True]"]
    assert count("aten::_cudnn_rnn_backward", shapes, backward)[0] == 2 * expected
    # A GRU has three gates and MIOpen no projections.
    gru = ["3", "16", "1", "False", "0.", "True", "False", "[]"]
    assert count("aten::miopen_rnn", [[5, 2, 8]], [""] * 5 + gru)[0] == 2 * 5 * 2 * 3 * 16 * (8 + 16)


def test_what_is_no_product_or_has_no_usable_shape_counts_nothing():
    assert flops_of("aten::add", "[[2, 3], [2, 3]]", '["float"]', "") is None
    assert flops_of("aten::mm", "", "", "") is None
    assert flops_of("aten::mm", "[[], []]", '["float", "float"]', "") is None
    assert flops_of("aten::mm", "[[2, 3], [4, 5]]", '["float", "float"]', "") is None
    assert flops_of("aten::mm", "[[-2, 3], [3, 5]]", "", "") is None
    assert flops_of("aten::mm", f"[[{10**400}, 3], [3, 5]]", "", "") is None
    assert flops_of("aten::mm", f"[[{10**160}, {10**160}], [{10**160}, {10**160}]]", "", "") is None


def test_a_rank_s_flops_by_step_type_and_coverage():
    builder = TraceBuilder().step(1, 0, 100).step(2, 100, 200)
    builder.op("aten::mm", 10, 30, shapes=[[2, 3], [3, 5]], **HALF)
    builder.op("aten::linear", 110, 150).op("aten::mm", 115, 145, shapes=[[4, 3], [3, 5]], **HALF)
    builder.op("aten::linear", 160, 172).op("aten::mm", 161, 171)
    flops = analyze_rank(builder.build()).flops
    assert flops.types == ("bfloat16",)
    assert flops.model.tolist() == flops.hardware.tolist() == [[60, 120]]
    # 50 of 62 ns of matrix operators have shapes: linear counts once, with what it calls.
    assert flops.coverage(EVERY_STEP) == pytest.approx(50 / 62)


def test_a_sharded_tensor_s_operator_counts_its_local_part():
    # DTensor: the outer call has the whole's shapes, the one inside it this rank's quarter.
    builder = TraceBuilder().step(1, 0, 100)
    builder.op("aten::mm", 10, 50, shapes=[[8, 3], [3, 20]], **HALF)
    builder.op("aten::mm", 20, 40, shapes=[[8, 3], [3, 5]], **HALF)
    assert totals(analyze_rank(builder.build()).flops) == (2 * 8 * 3 * 5,) * 2


def test_operators_without_one_that_can_be_counted_inside_count_themselves():
    builder = TraceBuilder().step(1, 0, 100)
    builder.op("aten::linear", 10, 50, shapes=[[2, 3], [5, 3], [5]], **HALF).op("vendor::matmul", 20, 40)
    assert totals(analyze_rank(builder.build()).flops) == (60, 60)


def device_rank(kernel: str, *, recorded: dict[str, list[str]] = SINGLE, second: str = "") -> RankFlops:
    builder = TraceBuilder().step(1, 0, 1000)
    builder.op("aten::mm", 10, 30, shapes=[[2, 3], [3, 5]], **recorded).launched(kernel, 15, 100, 200)
    if second:
        builder.op("aten::mm", 40, 60, shapes=[[2, 3], [3, 5]], **recorded).launched(second, 45, 200, 300)
    return analyze_rank(builder.build()).flops


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("ampere_sgemm_128x64_nn", "float32"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_16x4_nn_align4>(int)", "tf32"),
        ("sm80_xmma_gemm_tf32f32_tf32f32_f32_nn_n_tilesize128x128x16_stage4_tensor16x8x8_execute_kernel__5x", "tf32"),
        ("Cijk_Ailk_Bljk_SB_MT64x64x16_MI16x16x4x1_SN", "float32"),
        ("matmul_kernel", SINGLE_OR_TF32),
    ],
)
def test_the_kernel_distinguishes_single_precision_from_tf32(kernel, dtype):
    assert by_type(device_rank(kernel)) == {dtype: 60}


def test_every_kernel_has_its_own_type():
    flops = device_rank("ampere_sgemm_128x64_nn", second="ampere_s1688gemm_128x128_nn")
    assert by_type(flops) == {"float32": 60, "tf32": 60}
    # A recorded type that is not float32 decides it, whatever accumulators the name has.
    assert product_type("bfloat16", "sm90_xmma_gemm_f32") == "bfloat16"
    assert product_type(None, "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN") == "float16"
    assert product_type(None, "matmul_kernel") is None


def test_coverage_is_of_the_kernels_in_the_steps():
    builder = TraceBuilder().step(1, 0, 1000)
    builder.op("aten::mm", 10, 30, shapes=[[2, 3], [3, 5]], **HALF).launched("ampere_bf16_s16816gemm", 15, 100, 400)
    builder.op("my::fused", 40, 60).launched("my_gemm", 45, 400, 500)
    assert analyze_rank(builder.build()).flops.coverage(EVERY_STEP) == pytest.approx(0.75)


def test_what_a_graph_computes_whose_kernels_are_not_recorded_is_not_covered():
    builder = TraceBuilder().step(1, 0, 1000)
    builder.op("aten::mm", 10, 30, shapes=[[2, 3], [3, 5]], **HALF).launched("ampere_bf16_s16816gemm", 15, 100, 400)
    builder.launched("CUDA graph 5", 45, 400, 1000)
    assert analyze_rank(builder.build()).flops.coverage(EVERY_STEP) == pytest.approx(1 / 3)


NODE = "autograd::engine::evaluate_function: "


def test_reentrant_checkpoints_compute_again():
    builder = TraceBuilder().step(1, 0, 1000)
    shapes = {"shapes": [[2, 3], [3, 5]], **HALF}
    builder.op("aten::mm", 10, 20, **shapes)
    builder.op(f"{NODE}CheckpointFunctionBackward", 100, 200, AUTOGRAD)
    builder.op("CheckpointFunctionBackward", 101, 199, AUTOGRAD)
    builder.op("aten::mm", 110, 120, AUTOGRAD, **shapes)
    builder.op(f"{NODE}MmBackward0", 130, 190, AUTOGRAD).op("MmBackward0", 131, 189, AUTOGRAD)
    builder.op("aten::mm", 140, 150, AUTOGRAD, **shapes).op("aten::mm", 160, 170, AUTOGRAD, **shapes)
    assert totals(analyze_rank(builder.build()).flops) == (3 * 60, 4 * 60)


def test_saved_tensor_hooks_compute_again_within_the_first_node_that_needs_them():
    builder = TraceBuilder().step(1, 0, 1000)
    shapes = {"shapes": [[2, 3], [3, 5]], **HALF}
    builder.op(f"{NODE}MmBackward0", 100, 300, AUTOGRAD).op("MmBackward0", 101, 299, AUTOGRAD)
    # Recomputed: a product called by itself, and a layer that shows that this is a forward pass.
    builder.op("aten::mm", 110, 120, AUTOGRAD, **shapes)
    builder.op("aten::linear", 130, 150, AUTOGRAD).op("aten::mm", 135, 145, AUTOGRAD, **shapes)
    # The node's own gradients come after.
    builder.op("aten::mm", 160, 170, AUTOGRAD, **shapes).op("aten::mm", 180, 190, AUTOGRAD, **shapes)
    assert totals(analyze_rank(builder.build()).flops) == (2 * 60, 4 * 60)


def test_a_custom_backward_may_call_layers():
    builder = TraceBuilder().step(1, 0, 1000)
    builder.op(f"{NODE}MyLinearBackward", 100, 300, AUTOGRAD).op("MyLinearBackward", 101, 299, AUTOGRAD)
    builder.op("aten::matmul", 110, 150, AUTOGRAD).op("aten::mm", 120, 140, AUTOGRAD, shapes=[[2, 3], [3, 5]], **HALF)
    assert totals(analyze_rank(builder.build()).flops) == (60, 60)


def test_selective_checkpoints_replay_without_computing():
    builder = TraceBuilder().step(1, 0, 1000)
    shapes = {"shapes": [[2, 3], [3, 5]], **HALF}
    builder.op("aten::mm", 10, 30, **shapes).launched("ampere_bf16_s16816gemm", 15, 100, 200)
    builder.op(f"{NODE}CheckpointFunctionBackward", 300, 400).op("CheckpointFunctionBackward", 301, 399)
    builder.op("aten::mm", 310, 320, **shapes)
    assert totals(analyze_rank(builder.build()).flops) == (60, 60)


def formulas(text: str) -> CustomFlops:
    return CustomFlops("my_flops.py", "import perfscope\n" + text)


MLP = """
@perfscope.flops("my_ext::mlp", typed=1)
def mlp(shapes, types, inputs):
    return 1000 * len(shapes) if shapes[1] else None
"""


def test_a_formula_of_the_user_s_covers_everything_inside():
    builder = TraceBuilder().step(1, 0, 100)
    builder.op("my_ext::mlp", 10, 50, shapes=[[], [3, 5]], types=["", "c10::Half"])
    builder.op("aten::mm", 20, 40, shapes=[[8, 3], [3, 5]], **HALF)
    builder.op("my_ext::mlp", 60, 70, shapes=[[], []], types=["", ""])
    trace = builder.build()
    flops = analyze_rank(trace, formulas(MLP)).flops
    assert by_type(flops) == {"float16": 2000}
    assert flops.coverage(EVERY_STEP) == pytest.approx(40 / 50)
    assert by_type(analyze_rank(trace).flops) == {"bfloat16": 240}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('@perfscope.flops("aten::mm")\ndef f(s, t, i):\n    return s[7]\n', r"aten::mm failed on shapes \[\[2, 3\]"),
        ('@perfscope.flops("aten::mm")\ndef f(s, t, i):\n    return -1\n', "returned -1"),
        ("import no_such_module_at_all\n", "cannot be executed"),
    ],
)
def test_a_failing_formula_is_an_error_with_its_file(text, message):
    trace = TraceBuilder().step(1, 0, 100).op("aten::mm", 10, 30, shapes=[[2, 3], [3, 5]], **SINGLE).build()
    with pytest.raises(PerfscopeError, match=rf"my_flops\.py.*{message}"):
        analyze_rank(trace, formulas(text))


def test_a_file_of_formulas_is_tried_before_anything_is_read(tmp_path):
    with pytest.raises(PerfscopeError, match=r"nowhere\.py.*cannot be read"):
        CustomFlops.read(tmp_path / "nowhere.py")
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(PerfscopeError, match=r"empty\.py.*@perfscope\.flops"):
        CustomFlops.read(tmp_path / "empty.py")
    (tmp_path / "fine.py").write_text("import perfscope\n" + MLP)
    assert CustomFlops.read(tmp_path / "fine.py").get("my_ext::mlp") is not None


def recorded(train, path: Path, *, stacks: bool = False) -> RankFlops:
    """What is counted of one step of ``train``, as torch's profiler records it."""
    import torch

    from perfscope.analyzers.readers import chrome

    cpu = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=cpu, record_shapes=True, with_stack=stacks) as profiler,
        torch.profiler.record_function("ProfilerStep#1"),
    ):
        train()
    profiler.export_chrome_trace(str(path / "trace.json"))
    return analyze_rank(chrome.read(path / "trace.json")).flops


def counted_by_torch(train) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        train()
    return counter.get_total_flops()


def layers(case):
    """(model, data): No groups, of which torch's counter takes a convolution's weight gradient groups times."""
    import torch

    nn = torch.nn

    class Einsum(nn.Module):
        def forward(self, data):
            return torch.einsum("bij,bkj->bik", data, data) @ torch.ones(6, 3)

    return {
        "linear": (nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, bias=False)), torch.randn(3, 5, 8)),
        "einsum": (Einsum(), torch.randn(5, 6, 7, requires_grad=True)),
        "conv1d": (nn.Conv1d(3, 4, 5, dilation=2, padding=3), torch.randn(2, 3, 20)),
        "conv2d": (
            nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, stride=2)),
            torch.randn(2, 3, 16, 16),
        ),
        "conv3d": (nn.Conv3d(2, 3, 3), torch.randn(1, 2, 6, 6, 6)),
        "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), torch.randn(2, 4, 7, 7)),
        "attention": (nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 10, 32)),
        "gru": (nn.GRU(8, 16), torch.randn(5, 2, 8)),
    }[case]


@pytest.mark.parametrize("case", ["linear", "einsum", "conv1d", "conv2d", "conv3d", "transposed", "attention", "gru"])
def test_agrees_with_torch_s_own_counter(case, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.manual_seed(0)
    model, data = layers(case)

    def train() -> None:
        # Attention by plain products: torch's counter knows no fused attention on a CPU.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = model(data, data, data, need_weights=False) if case == "attention" else model(data)
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    expected = counted_by_torch(train)
    assert expected > 0
    flops = recorded(train, tmp_path)
    assert totals(flops) == (expected, expected)
    assert flops.coverage(EVERY_STEP) == 1.0


@pytest.mark.parametrize("stacks", [False, True], ids=["operators", "stacks"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_what_real_checkpoints_compute_again(reentrant, stacks, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.utils.checkpoint import checkpoint

    nn = torch.nn
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, bias=False), nn.LayerNorm(8)) for _ in range(3)
    )
    head, data = nn.Linear(8, 4), torch.randn(5, 8, requires_grad=True)

    def train(block) -> None:
        hidden = data
        for one in blocks:
            hidden = block(one, hidden)
        head(hidden).square().sum().backward()

    plain = counted_by_torch(lambda: train(lambda one, hidden: one(hidden)))

    def checkpointed() -> None:
        train(lambda one, hidden: checkpoint(one, hidden, use_reentrant=reentrant))

    everything = counted_by_torch(checkpointed)
    assert everything > plain
    assert totals(recorded(checkpointed, tmp_path, stacks=stacks)) == (plain, everything)


def test_fused_attention_on_a_cpu_counts_as_its_plain_products(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    query = torch.randn(2, 4, 8, 32, requires_grad=True)
    key, value = (torch.randn(2, 4, 16, 32, requires_grad=True) for _ in range(2))

    def train() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = counted_by_torch(train)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        model, hardware = totals(recorded(train, tmp_path))
    assert model == expected == 6 * 65536
    assert hardware == 7 * 65536


def test_a_real_lstm(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN, which runs a layer in one operator, is not in this torch")
    model, data = torch.nn.LSTM(8, 16, num_layers=2, bidirectional=True), torch.randn(5, 2, 8)
    flops = recorded(lambda: model(data)[0].sum().backward(), tmp_path)
    # As for cuDNN above: 5 times, 2 sequences, both directions; the gradients take twice the forward.
    forward = 2 * 5 * 2 * 2 * (4 * 16 * (8 + 16) + 4 * 16 * (32 + 16))
    assert totals(flops) == (3 * forward, 3 * forward)


def test_a_real_sharded_model_counts_this_rank_s_part(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    fake = pytest.importorskip(
        "torch.testing._internal.distributed.fake_pg", reason="no fake process group in this torch"
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    nn = torch.nn
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=fake.FakeStore())
    try:
        model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))
        parallelize_module(model, init_device_mesh("cpu", (4,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        data = torch.randn(16, 64)
        # The first call works out how to shard each operator, by running it on shapes alone.
        model(data).sum().backward()
        flops = recorded(lambda: model(data).sum().backward(), tmp_path)
    finally:
        torch.distributed.destroy_process_group()
    # A quarter of 128 hidden units; the first layer wants no gradient of its input.
    assert totals(flops) == ((2 + 3) * 2 * 16 * 64 * 32,) * 2
