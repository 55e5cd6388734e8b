"""The tables of kernels and launches: by hand, against plain loops over real traces, and on generated jobs."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers.job.aligned import AlignedJob, align_job
from perfscope.analyzers.job.tables import kernels as kernel_table
from perfscope.analyzers.job.tables.kernels import kernel_rows, worth_a_look
from perfscope.analyzers.job.tables.tables import launch_rows
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.analyzers.rank.kernel_classes import (
    Precision,
    class_alone,
    class_of_kernel,
    class_of_operator,
    precision,
)
from perfscope.analyzers.rank.work import per_step
from perfscope.analyzers.rank.work.tables import OTHER_KERNELS
from perfscope.analyzers.readers import chrome
from perfscope.results.tables import KernelRow
from perfscope.trace.hardware import peaks_of
from perfscope.trace.trace import Category
from tests.analyzers.measured import measured
from tests.analyzers.rank import oracle
from tests.generator import JobSpec, ModelSpec, simulate
from tests.traces import TraceBuilder

TRACES = Path(__file__).parents[5] / "shared" / "traces"
REAL = (
    "a100_ddp_rank0of2/rank0", "a100_rank3of8/rank3", "h100_eager_single/trace", "mi300x_ddp_ckpt_rank0of8/rank0",
    "mi300x_eager_single/trace", "recsys_ranks0-1of128/rank0", "v100_ddp_rank1of2/rank1", "quirks/gpu_events_only",
)  # fmt: skip
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="no folder of real traces beside the checkout")

A100 = peaks_of("NVIDIA A100-SXM4-80GB")
GEMM, FILL, NCCL = "ampere_bf16_s16816gemm_bf16_128x256", "vectorized_elementwise_kernel", "ncclDevKernel_AllReduce_Sum"
PRODUCT = {"shapes": [[1000, 1000], [1000, 1000]], "types": ["c10::BFloat16", "c10::BFloat16"]}


def one_rank(rank: int = 0, *, gemm_ns: int = 10_000) -> TraceBuilder:
    """Two steps of 100 µs: a product, a fill, a copy and a collective each."""
    builder = TraceBuilder(rank=rank, world_size=2)
    for step in (1, 2):
        at = (step - 1) * 100_000
        builder.step(step, at, at + 100_000)
        builder.op("aten::linear", at + 100, at + 3_000).op("aten::mm", at + 200, at + 2_000, **PRODUCT)
        builder.launched(GEMM, at + 300, at + 10_000, at + 10_000 + gemm_ns)
        builder.op("aten::fill_", at + 4_000, at + 5_000)
        builder.launched(FILL, at + 4_100, at + 40_000, at + 41_000 + step * 100)
        builder.launched("Memcpy HtoD (Pageable -> Device)", at + 6_000, at + 50_000, at + 52_000, Category.MEMCPY)
        builder.launched(NCCL, at + 7_000, at + 60_000, at + 65_000, stream=20)
    return builder


def compared(*builders: TraceBuilder) -> AlignedJob:
    return align_job({rank: analyze_rank(builder.build()) for rank, builder in enumerate(builders)})


def test_kernels_by_hand():
    rows = {row.name: row for row in kernel_rows(compared(one_rank(0), one_rank(1, gemm_ns=30_000)), A100)}
    gemm = rows[GEMM]
    assert (gemm.category, gemm.operator, gemm.operator_class) == ("compute", "aten::mm", "matrix")
    assert (gemm.count_per_step, gemm.us_per_step, gemm.mean_us, gemm.min_us, gemm.max_us) == (1, 20, 20, 10, 30)
    assert (gemm.slowest_rank, gemm.slowest_over_median) == (1, 1.5)
    assert (gemm.dtype, gemm.tensor_cores) == ("bfloat16", True)
    # 2 10^9 FLOPs in 20 µs of 312 TFLOP/s.
    assert gemm.tflops == pytest.approx(100)
    assert gemm.share_of_peak == pytest.approx(100 / 312)
    fill = rows[FILL]
    assert (fill.operator_class, fill.dtype, fill.tflops, fill.share_of_peak) == ("elementwise", None, None, None)
    assert (fill.mean_us, fill.min_us, fill.max_us) == (1.15, 1.1, 1.2)
    assert {row.name: row.category for row in rows.values() if row.category != "compute"} == {
        "Memcpy HtoD (Pageable -> Device)": "copy",
        NCCL: "communication",
    }
    assert sum(row.share for row in rows.values()) == pytest.approx(1)
    assert gemm.share == pytest.approx(20 / (20 + 1.15 + 2 + 5))


def test_used_steps_are_chosen_when_ranks_are_compared():
    result = align_job({0: analyze_rank(one_rank().build())}, first_step=2)
    assert {row.name: row.mean_us for row in kernel_rows(result, None)}[FILL] == 1.2


def test_an_operator_s_flops_go_to_the_kernels_that_multiply_by_time():
    builder = TraceBuilder().step(1, 0, 1_000_000)
    builder.op("aten::mm", 0, 10_000, **PRODUCT)
    for name, start, end in ((GEMM, 0, 30_000), ("splitKreduce_kernel", 30_000, 40_000), (f"{GEMM}_2", 40_000, 50_000)):
        builder.launched(name, 1_000 + start // 10, 20_000 + start, 20_000 + end)
    rows = {row.name: row for row in kernel_rows(compared(builder), A100)}
    # 2 10^9 FLOPs over 40 µs: both ran at 50 TFLOP/s. The reduction belongs to the operator, but multiplies nothing.
    assert rows[GEMM].tflops == rows[f"{GEMM}_2"].tflops == pytest.approx(50)
    assert (rows["splitKreduce_kernel"].operator_class, rows["splitKreduce_kernel"].tflops) == ("matrix", None)


def test_an_operator_whose_kernels_have_unknown_names_shares_among_all():
    builder = TraceBuilder().step(1, 0, 1_000_000)
    builder.op("aten::mm", 0, 10_000, **PRODUCT).launched("mystery", 1_000, 20_000, 40_000)
    (row,) = kernel_rows(compared(builder), A100)
    assert (row.tflops, row.tensor_cores) == (pytest.approx(100), None)


def test_what_a_share_above_the_peak_would_be_is_not_claimed():
    (row,) = [row for row in kernel_rows(compared(one_rank(gemm_ns=2_000)), A100) if row.name == GEMM]
    assert row.tflops == pytest.approx(1000)
    assert row.share_of_peak is None


def test_the_cheap_ones_are_added_up(monkeypatch):
    builder = TraceBuilder().step(1, 0, 1_000_000)
    for number in range(12):
        builder.launched(
            f"kernel_{number}", 1_000 * number, 20_000 * number + 10_000, 20_000 * number + 11_000 + number
        )
    whole = compared(builder)
    monkeypatch.setattr(per_step, "KEPT", 8)
    folded = compared(builder)
    assert folded.partials[0].tables.kernels.names == (*(f"kernel_{at}" for at in range(11, 3, -1)), OTHER_KERNELS)
    monkeypatch.setattr(kernel_table, "LISTED", 5)
    for result in (whole, folded):
        rows = kernel_rows(result, None)
        assert [row.name for row in rows if row.name != OTHER_KERNELS] == [f"kernel_{at}" for at in range(11, 6, -1)]
        (others,) = [row for row in rows if row.name == OTHER_KERNELS]
        assert (others.count_per_step, others.min_us) == (7, 1.0)
        assert sum(row.us_per_step for row in rows) == pytest.approx(12 + sum(range(12)) / 1000)


def test_the_optimizer_s_kernels_are_known_by_its_step():
    builder = TraceBuilder().step(1, 0, 1_000_000).note("Optimizer.step#AdamW.step", 0, 50_000)
    builder.op("aten::mul_", 100, 900).launched("elementwise_a", 200, 20_000, 30_000)
    builder.op("aten::mm", 1_000, 2_000, **PRODUCT).launched("some_gemm", 1_100, 30_000, 40_000)
    builder.op("aten::mul_", 60_000, 61_000).launched("elementwise_b", 60_100, 90_000, 95_000)
    classes = {row.name: row.operator_class for row in kernel_rows(compared(builder), A100)}
    assert classes == {"elementwise_a": "optimizer", "some_gemm": "matrix", "elementwise_b": "elementwise"}


def test_a_class_comes_from_the_operators_around_but_not_from_autograd_s_nodes():
    builder = TraceBuilder().step(1, 0, 1_000_000)
    builder.op("aten::embedding", 100, 900).op("aten::index_select", 200, 800).launched("gather_a", 300, 20_000, 30_000)
    node = "autograd::engine::evaluate_function: ConvolutionBackward0"
    builder.op(node, 1_000, 2_000).op("aten::relu", 1_100, 1_900).launched("elementwise", 1_200, 30_000, 40_000)
    builder.op("aten::linear", 3_000, 4_000).op("aten::copy_", 3_100, 3_900).launched("cast", 3_200, 50_000, 60_000)
    classes = {row.name: row.operator_class for row in kernel_rows(compared(builder), A100)}
    assert classes == {"gather_a": "embedding", "elementwise": "elementwise", "cast": "copy"}


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "tensor_cores"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "matrix", "bfloat16", True),
        ("nvjet_sm90_hsh_64x8_64x16_1x1_h_bz_splitK_NNT", "matrix", "float16", True),
        ("nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT", "matrix", "float8_e4m3fn", True),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", "matrix", "bfloat16", True),
        ("volta_h884gemm_256x64_ldg8_nn", "matrix", "float16", True),
        ("turing_s8_i8816gemm_int8_256x128_ldg16_relu_stages_64x3_tn", "matrix", "int8", True),
        ("volta_sgemm_128x64_nn", "matrix", "float32", False),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(int)", "matrix", "float32", False),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_ffma_execute_kernel", "matrix", "float32", False),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", "matrix", "bfloat16", True),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_tensor16x8x8", "convolution", "tf32", True),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT128x64x32_MI32x32x1_SN", "matrix", "bfloat16", True),
        ("Cijk_Ailk_Bljk_S_MX_B_Bias_HA_S_SAV_UserArgs_MT16x16x128_MI16x16x1", "matrix", "tf32", True),
        ("Cijk_Ailk_Bljk_S_B_Bias_HA_S_SAV_UserArgs_MT16x16x128_MI16x16x1", "matrix", "float32", True),
        ("Custom_Cijk_Alik_Bljk_F8B8BS_BH_Bias_AS_MT256x256x128_MI16x16x1", "matrix", "float8_e4m3fn", True),
        ("igemm_wrw_gtcx3_nhwc_bf16_bx0_ex1_bt64x64x64_wt32x32x8", "convolution", "bfloat16", True),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, cutlass::half_t>>", "attention", "float16", True),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(AttentionKernel<float>)", "attention", "tf32", True),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6", "attention", "float16", True),
        ("triton_tem_fused_mm_3", "matrix", None, None),
        ("triton_red_fused_add_mul_sum_7", "reduction", None, None),
        ("triton_poi_fused_native_layer_norm_2", "normalisation", None, None),
        ("void fbgemm_gpu::permute_2D_data_kernel<false>(int)", "other", None, None),
        # cuDNN: of Volta (in the recordings of tests/real), of Turing, with and without tensor cores.
        ("volta_scudnn_128x128_stridedB_splitK_small_nn_v1", "convolution", "float32", False),
        ("volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1", "convolution", "float32", False),
        ("volta_scudnn_128x32_sliced1x4_ldg4_relu_exp_medium_nhwc_tn_v1", "convolution", "float32", False),
        ("maxwell_scudnn_128x64_relu_interior_nn", "convolution", "float32", False),
        ("maxwell_fp16_scudnn_fp16_128x128_relu_small_nn_v1", "convolution", "float16", False),
        ("volta_fp16_s884cudnn_fp16_256x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1", "convolution", "float16", True),
        ("turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_interior_nhwc_tn_v1", "convolution", "float16", True),
        ("volta_h884cudnn_256x64_ldg8_relu_exp_small_nhwc_tn_v1", "convolution", "float16", True),
        ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int)", "convolution", "float32", False),
        ("void cudnn::cnn::wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false>(int)", "convolution", "float32", False),
        ("void explicit_convolve_sgemm<float, int, 1024, 5, 5, 3, 3, 3>(int)", "convolution", "float32", False),
        ("void fft2d_r2c_32x32<float, false, 1u, false>(float2*)", "convolution", "float32", None),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(int)", "copy", "float32", None),
        ("void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512>(float)", "normalisation", "float32", None),
        # MIOpen and Composable Kernel.
        ("miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3_stride1", "convolution", "float32", None),
        ("gridwise_convolution_implicit_gemm_v4r1_nchw_kcyx_nkhw_lds_double_buffer", "convolution", None, None),
        ("_ZN2ck16tensor_operation6device37kernel_batched_gemm_xdlops_bwd_weightINS_47Grid", "convolution", None, True),
        ("MIOpenBatchNormFwdTrainSpatial", "normalisation", None, None),
        # Native depthwise convolutions, Mamba's; but not what converts.
        ("void at::native::conv_depthwise2d_forward_kernel<1, float, int>(int)", "convolution", "float32", None),
        ("void causal_conv1d_fwd_kernel<Causal_conv1d_fwd_kernel_traits<128, 4>>", "convolution", None, None),
        ("void at::native::convert_indices_from_coo_to_csr_cuda_kernel<long, int>(int)", "other", None, None),
        # FlashAttention 3; inductor's kernels, which are named after products but do none.
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<int>>>", "attention", None, None),
        ("triton_poi_fused_convolution_0", "elementwise", None, None),
        ("triton_red_fused_native_layer_norm_convolution_4", "normalisation", None, None),
        ("triton_poi_fused__scaled_dot_product_attention_mul_3", "elementwise", None, None),
    ],
)  # fmt: skip
def test_what_names_of_kernels_say(name, kind, dtype, tensor_cores):
    assert class_of_kernel(name) == kind
    assert precision(name) == Precision(dtype, tensor_cores)


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::addmm", "matrix"), ("aten::_scaled_mm", "matrix"), ("aten::convolution_backward", "convolution"),
        ("aten::miopen_convolution", "convolution"), ("aten::_flash_attention_forward", "attention"),
        ("aten::native_layer_norm_backward", "normalisation"), ("aten::_softmax", "normalisation"),
        ("aten::embedding_dense_backward", "embedding"), ("aten::_fused_adamw_", "optimizer"),
        ("aten::_foreach_addcdiv_", "optimizer"), ("aten::mul", None), ("aten::mean", None),
    ],
)  # fmt: skip
def test_what_names_of_operators_say(operator, kind):
    assert class_of_operator(operator) == kind


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::mm", "matrix"), ("aten::copy_", "copy"), ("aten::gelu_backward", "elementwise"),
        ("aten::add_", "elementwise"),
        ("aten::sum", "reduction"), ("c10d::allreduce_", "communication"), ("aten::empty", "other"),
        ("MyFunctionBackward", "other"),
    ],
)  # fmt: skip
def test_operators_that_launch_nothing_have_a_class_too(operator, kind):
    assert class_alone(operator) == kind


def kernel(**values) -> KernelRow:
    given = {
        "name": "some_kernel", "category": "compute", "operator": None, "operator_class": "other",
        "count_per_step": 10.0, "us_per_step": 1000.0, "mean_us": 100.0, "min_us": 90.0, "max_us": 110.0, "share": 0.1,
        "slowest_rank": None, "slowest_over_median": None, "dtype": None, "tensor_cores": None, "tflops": None,
        "share_of_peak": None,
    }  # fmt: skip
    return KernelRow(**{**given, **values})


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (kernel(operator_class="matrix", dtype="bfloat16", share_of_peak=0.12), "10% of the device's work at 12%"),
        (kernel(operator_class="matrix", dtype="float32", tensor_cores=False), "TF32 has 8 times the peak"),
        (kernel(count_per_step=400.0, mean_us=2.5), "400 launches per step of 2.5 µs"),
        (kernel(slowest_rank=3, slowest_over_median=1.3), "rank 3 takes 1.30 times"),
        (kernel(operator_class="copy"), "another layout"),
        (kernel(name="batched_transpose_16x32_half", operator_class="convolution"), "another layout"),
        (kernel(name="Memcpy HtoD (Pageable -> Device)", category="copy", operator_class="copy"), "pinned"),
        (kernel(), None),
        (kernel(operator_class="matrix", dtype="bfloat16", share_of_peak=0.7, tensor_cores=True), None),
        (kernel(category="communication", slowest_rank=3, slowest_over_median=9.0), None),
    ],
)
def test_worth_a_look(row, expected):
    reason = worth_a_look(row, 0.1, A100)
    assert reason is None if expected is None else expected in (reason or "")
    assert worth_a_look(row, 0.001, A100) is None


def test_launches_by_hand():
    builder = TraceBuilder().step(1, 0, 100_000)
    # Calls of 1 µs. The first finds nothing before it; the second queues 29 µs; the third finds an empty device.
    builder.launched("a", 0, 10_000, 40_000, call_takes=1_000)
    builder.launched("b", 10_000, 40_000, 45_000, call_takes=1_000)
    builder.launched("c", 60_000, 61_500, 81_500, call_takes=1_000)
    (row,) = launch_rows(compared(builder))
    assert (row.launches_per_step, row.call_us_mean) == (3, 1)
    assert (row.delay_us_median, row.delay_us_p95) == (9, 29)
    assert row.starved_share == pytest.approx(1 / 3)
    assert row.short_kernels_share == pytest.approx(1 / 3)
    # The window is 10 to 81.5 µs: one piece waits for 29 of 71.5 µs, and none the rest.
    assert row.queue_depth_median == 0


def test_the_queue_of_a_host_that_runs_ahead():
    builder = TraceBuilder().step(1, 0, 100_000)
    for number in range(5):
        builder.launched(f"k{number}", number * 100, 10_000 + number * 20_000, 30_000 + number * 20_000)
    (row,) = launch_rows(compared(builder))
    # From 10 µs on, 4, 3, 2, 1 and 0 wait, 20 µs each.
    assert (row.queue_depth_median, row.starved_share) == (2, 0)


@needs_traces
@pytest.mark.scale
@pytest.mark.parametrize("name", REAL)
def test_real_traces_have_the_counts_and_times_that_plain_loops_find(name):
    path = TRACES / f"{name}.json.gz"
    partial = analyze_rank(chrome.read(path))
    result = align_job({0: partial})
    windows = list(zip(partial.steps.start_ns.tolist(), partial.steps.end_ns.tolist(), strict=True))
    expected = oracle.device_work(oracle.events(path), windows)
    steps = len(windows)
    rows = kernel_rows(result, None)
    listed = [row for row in rows if row.name != OTHER_KERNELS]
    for row in listed:
        lengths = expected[row.name]
        assert row.count_per_step * steps == pytest.approx(len(lengths))
        assert row.us_per_step * steps == pytest.approx(sum(lengths) / 1e3, abs=0.001 * len(lengths))
        assert (row.min_us, row.max_us) == pytest.approx((min(lengths) / 1e3, max(lengths) / 1e3), abs=0.001)
        assert row.mean_us == pytest.approx(statistics.mean(lengths) / 1e3, abs=0.001)
    whole = sum(map(sum, expected.values())) / 1e3
    assert sum(row.us_per_step for row in rows) * steps == pytest.approx(
        whole, abs=0.001 * sum(map(len, expected.values()))
    )
    assert len(listed) == min(len(expected), kernel_table.LISTED)


@needs_traces
@pytest.mark.scale
def test_real_flops_are_those_of_the_recorded_shapes():
    path = TRACES / "a100_rank3of8/rank3.json.gz"
    partial = analyze_rank(chrome.read(path))
    windows = list(zip(partial.steps.host_start_ns.tolist(), partial.steps.host_end_ns.tolist(), strict=True))
    first = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1}
    expected = np.zeros(len(windows))
    for index, event in oracle.within(oracle.events(path), windows):
        if event.category == "cpu_op" and event.name in first:
            left, right = event.args["Input Dims"][first[event.name] :][:2]
            expected[index] += 2 * np.prod(left) * right[-1]
    assert partial.flops.model.sum(axis=0).tolist() == expected.tolist()


@needs_traces
def test_a_real_checkpoint_is_found_with_and_without_stacks():
    trace = chrome.read(TRACES / "mi300x_ddp_ckpt_rank0of8/rank0.json.gz")
    events = oracle.events(TRACES / "mi300x_ddp_ckpt_rank0of8/rank0.json.gz")
    frames = [event for event in events if event.name.endswith(": recompute_fn")]
    convolutions = [event for event in events if event.name == "aten::convolution"]
    again = [
        event
        for event in convolutions
        if any(frame.track == event.track and frame.start <= event.start < frame.end for frame in frames)
    ]
    assert len(again) == 57  # 19 of a ResNet-18's 20 convolutions, in three steps
    flops = analyze_rank(trace).flops
    assert flops.hardware.sum() > flops.model.sum()
    # The same without the Python frames: by the shape of what runs in autograd's nodes.
    kept = {row: event for row, event in enumerate(trace.category) if event != Category.PYTHON}
    without = _only(trace, np.array(list(kept), dtype=np.int64))
    again_without = analyze_rank(without).flops
    assert again_without.model.tolist() == flops.model.tolist()
    assert again_without.hardware.tolist() == flops.hardware.tolist()


def _only(trace, rows):
    """The trace with these rows only; collectives, which lie on rows, left out."""
    import dataclasses

    columns = {
        field.name: getattr(trace, field.name)[rows]
        for field in dataclasses.fields(trace)
        if isinstance(getattr(trace, field.name), np.ndarray)
    }
    nothing = {
        field.name: getattr(trace.collectives, field.name)[:0] for field in dataclasses.fields(trace.collectives)
    }
    return dataclasses.replace(trace, **columns, collectives=dataclasses.replace(trace.collectives, **nothing))


@pytest.mark.parametrize("recompute", ["none", "reentrant", "non_reentrant"])
def test_a_generated_job_s_utilisation(recompute, tmp_path):
    spec = JobSpec(ranks=2, model=ModelSpec(layers=3, tokens=2048), recompute=recompute)
    job = simulate(spec)
    job.write(tmp_path)
    summary = measured(tmp_path)
    found, truth = summary.utilisation, job.truth
    assert found.model_flops_per_step == truth.flops_per_step
    assert found.hardware_flops_per_step == truth.hardware_flops_per_step
    assert found.mfu == pytest.approx(truth.flops_per_step / (truth.step_time_ns * 1e-9 * 2 * 312e12), rel=0.03)
    assert found.hfu == pytest.approx(found.mfu * truth.hardware_flops_per_step / truth.flops_per_step)
    gemm = next(row for row in summary.kernels if row.operator_class == "matrix")
    products = truth.hardware_flops_per_step / 2 / gemm.count_per_step
    assert gemm.tflops == pytest.approx(products / (spec.model.matrix_ns * 1e-9) / 1e12, rel=0.03)
    assert {row.rank for row in summary.launches} == {0, 1}
