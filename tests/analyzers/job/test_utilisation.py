"""MFU by hand: one type, several, and every reason for which there is none."""

from __future__ import annotations

import pytest

from perfscope.analyzers.job.aligned import align_job
from perfscope.analyzers.job.utilisation import utilisation
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.recording.metadata import DeviceMetadata, RunMetadata
from perfscope.results.rows import Utilisation
from tests.traces import AUTOGRAD, TraceBuilder

GEMM = "ampere_bf16_s16816gemm_bf16_128x256"
NODE = "autograd::engine::evaluate_function: "
SIDE = 1000
"""Products are 1000 by 1000 by 1000: 2 10^9 FLOPs."""


def job(
    *kernels: tuple[str, str], device: str = "NVIDIA A100-SXM4-80GB", run: RunMetadata | None = None, again: int = 0
) -> Utilisation:
    """One rank, one step of 1 ms, a product for each (recorded type, kernel); ``again`` of them recomputed too."""
    builder = TraceBuilder(device_name=device).step(1, 0, 1_000_000)
    shapes = [[SIDE, SIDE], [SIDE, SIDE]]
    for number, (dtype, kernel) in enumerate(kernels):
        at = number * 1_000
        builder.op("aten::mm", at, at + 900, shapes=shapes, types=[dtype, dtype])
        builder.launched(kernel, at + 100, 100_000 + at, 100_900 + at)
    for number in range(again):
        at = 500_000 + number * 1_000
        builder.op(f"{NODE}CheckpointFunctionBackward", at, at + 900, AUTOGRAD)
        builder.op("CheckpointFunctionBackward", at + 10, at + 890, AUTOGRAD)
        builder.op("aten::mm", at + 100, at + 800, AUTOGRAD, shapes=shapes, types=["c10::BFloat16"] * 2)
        builder.call("cudaLaunchKernel", at + 200, at + 210, 10**6 + number, AUTOGRAD)
        builder.event(GEMM, 5, 700_000 + at // 50, 700_100 + at // 50, correlation=10**6 + number, device=0, stream=7)
    # The window runs from the first kernel to the end of the last: these two make it a round ms.
    builder.launched("begin", 0, 100_000, 100_001).launched("end", 900_000, 1_099_000, 1_100_000)
    result = align_job({0: analyze_rank(builder.build())})
    assert result.step_ns == 1_000_000
    return utilisation(result, {0: run} if run else {})


def test_one_type():
    found = job(*[("c10::BFloat16", GEMM)] * 10)
    assert found.model_flops_per_step == 2e10
    assert found.mfu == found.hfu == pytest.approx(2e10 / (1e-3 * 312e12))
    assert (found.dtype, found.peak_tflops, found.flops_by_dtype) == ("bfloat16", 312.0, {"bfloat16": 1.0})
    assert (found.why_absent, found.flops_coverage) == (None, 1.0)


def test_several_types_are_each_held_against_their_own_peak():
    kernels = [("float", "ampere_sgemm_128x64_nn"), ("float", "ampere_s1688gemm_128x128_nn"), ("c10::BFloat16", GEMM)]
    found = job(*kernels)
    ideal_s = 2e9 / 19.5e12 + 2e9 / 156e12 + 2e9 / 312e12
    assert found.mfu == pytest.approx(ideal_s / 1e-3)
    assert found.flops_by_dtype == {name: pytest.approx(1 / 3) for name in ("float32", "tf32", "bfloat16")}
    assert found.peak_tflops == pytest.approx(6e9 / ideal_s / 1e12)


def test_recomputation_counts_to_the_hardware_only():
    found = job(*[("c10::BFloat16", GEMM)] * 3, again=1)
    assert (found.model_flops_per_step, found.hardware_flops_per_step) == (6e9, 8e9)
    assert found.hfu == pytest.approx(found.mfu * 4 / 3)


def test_the_run_s_own_count_is_divided_as_the_shapes_are():
    run = RunMetadata(model_flops_per_step=1.6e10, device=DeviceMetadata(type="cuda"))
    found = job(*[("c10::BFloat16", GEMM)] * 3, again=1, run=run)
    assert (found.model_flops_per_step, found.hardware_flops_per_step) == (pytest.approx(1.2e10), pytest.approx(1.6e10))
    assert found.flops_coverage == 1.0


@pytest.mark.parametrize(
    ("kernels", "device", "expected"),
    [
        ([("float", "matmul_kernel")], "NVIDIA A100-SXM4-80GB", "whether they used TF32"),
        ([("c10::BFloat16", "volta_gemm")], "Tesla V100-SXM2-16GB", "no bfloat16 peak is listed for V100 SXM"),
        ([("", "matmul_kernel")], "NVIDIA A100-SXM4-80GB", "type of the matrix products is not recorded"),
        ([("c10::BFloat16", GEMM)], "NVIDIA Unheard 1000", "no peak is listed for 'NVIDIA Unheard 1000'"),
        ([("c10::BFloat16", GEMM)], "GRID A100DX-40C", "no peak is listed"),
        ([("c10::BFloat16", GEMM)] * 200, "NVIDIA A100-SXM4-80GB", "cannot be: the products ran in another type"),
        ([], "NVIDIA A100-SXM4-80GB", "shapes were not recorded"),
    ],
)
def test_the_reason_without_mfu(kernels, device, expected):
    found = job(*kernels, device=device)
    assert found.mfu is None
    assert found.hfu is None
    assert expected in (found.why_absent or "")


def test_single_precision_on_a_device_without_tf32_needs_no_telling():
    found = job(("float", "matmul_kernel"), device="Tesla V100-SXM2-16GB")
    assert (found.dtype, found.mfu) == ("float32", pytest.approx(2e9 / (1e-3 * 15.7e12)))


def test_a_negligible_share_in_a_type_without_a_peak_is_left_out():
    found = job(*[("c10::BFloat16", GEMM)] * 100, ("long", "int_gemm"))
    assert found.mfu == pytest.approx(2e11 / (1e-3 * 312e12))
    assert found.peak_tflops == 312.0


def test_a_recording_without_device_events_is_of_no_job_on_cpus():
    """CUPTI belonged to another tool, say: operators are recorded, and the rank's metadata names its device."""
    builder = TraceBuilder().step(1, 0, 1_000_000)
    builder.op("aten::mm", 0, 900_000, shapes=[[SIDE, SIDE]] * 2, types=["float"] * 2)
    result = align_job({0: analyze_rank(builder.build())})
    on_device = RunMetadata(device=DeviceMetadata(type="cuda", name="NVIDIA H200"))
    assert utilisation(result, {0: on_device}).why_absent == "the recording has no device events"
    # The trace of a training on CPUs lists the devices of its host, too.
    assert "ran on CPUs" in str(utilisation(result, {0: RunMetadata()}).why_absent)
