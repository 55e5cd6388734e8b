"""Kernel names, shortened."""

from __future__ import annotations

import pytest

from perfscope.reports.kernel_names import LONGEST, short_name

FUNCTOR = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, char*>"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_128x64_nn"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        (
            f"{FUNCTOR}(int, at::native::CUDAFunctor_add<c10::BFloat16>)",
            "vectorized_elementwise_kernel<CUDAFunctor_add>",
        ),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x4_nn_align4>(cutlass_80::Params)",
            "cutlass_80_tensorop_s1688gemm_128x128_16x4_nn_align4",
        ),
        (
            "_ZN2ck16tensor_operation6device12_GLOBAL__N_139kernel_grouped_conv_fwd_xdl_cshuffle_v3INS_28Gridwise",
            "kernel_grouped_conv_fwd_xdl_cshuffle_v3",
        ),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_Generic"),
        ("void at::native::(anonymous namespace)::max_pool_forward_nchw<c10::BFloat16>(int)", "max_pool_forward_nchw"),
        (
            "void at::native::batch_norm_backward_kernel<float, int>(at::GenericPackedTensorAccessor<float>)",
            "batch_norm_backward_kernel",
        ),
        ("Cijk_" + "x" * 200, "Cijk_" + "x" * (LONGEST - 6) + "…"),
        ("<", "<"),
        ("", ""),
    ],
)
def test_short_names(name, short):
    assert short_name(name) == short
