"""Which kernels are communication, and of which kind, by the names that libraries give them."""

from __future__ import annotations

import pytest

from perfscope.analyzers.rank.collectives.communication import is_device_communication, kind_of_kernel


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "send_recv"),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "all_reduce"),  # before 2.8
        ("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)", "unknown"),
        ("pcclKernel_twoShotAllReduceKernel", "all_reduce"),
        ("AllReduce", "all_reduce"),
        ("NCCL AllReduce", "all_reduce"),
        ("nccl:all_gather", "all_gather"),
        ("DDP_allreduce_bucket_0", "all_reduce"),
        ("c10d::reduce_scatter_", "reduce_scatter"),
        ("hcom_allReduce__844_2_1", "all_reduce"),
        ("hcom_allGather__612_0_1", "all_gather"),
        ("hcom_reduceScatter__1_0_1", "reduce_scatter"),
        ("hcom_broadcast__1_0_1", "broadcast"),
        ("hcom_send__1_0_1", "send"),
        ("hcom_receive__1_0_1", "recv"),
        ("oneccl_reduce_base<float, 2, 16, 1, 1, 2>", "all_reduce"),
        ("all-reduce.12", "all_reduce"),
        ("all-gather-start.3", "all_gather"),
        ("collective-permute-done", "send_recv"),
        (
            "void flashinfer::trtllm_mnnvl_allreduce::twoshotAllreduceKernel<(unsigned char)2, __nv_bfloat16>",
            "all_reduce",
        ),
        ("void tensorrt_llm::oneShotAllReduceKernel<__half, (int)8>(AllReduceParams)", "all_reduce"),
        ("void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>", "all_reduce"),
        ("void deep_ep::intranode::dispatch<8, 768>", "all_to_all"),
        ("void hybrid_ep::dispatch_kernel<true, 8>", "all_to_all"),
        ("void a2a_combine_recv_kernel<true, 16, 8>(unsigned long)", "all_to_all"),
        ("EpDispatchInterNodeKernel_bf16", "all_to_all"),
        ("void (anonymous namespace)::all_reduce_one_shot_push_kernel<__nv_bfloat16, 8u, true>", "all_reduce"),
        ("void aiter::reduce_scatter_cross_device_store<__hip_bfloat16, 8>", "reduce_scatter"),
        ("void c10d::symmetric_memory::multimem_all_gather_kernel<16>(char*, char*)", "all_gather"),
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)", "unknown"),
        ("void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<4>(int, int, int)", "reduce_scatter"),
        ("void userbuffers_fp16_sum_inplace_gpu_mc_rs_oop_fp8<4, __nv_fp8_e4m3>(int)", "reduce_scatter"),
        ("void userbuffers_fp16_sum_inplace_gpu_rw_ag<2>(int, int, int)", "all_gather"),
        ("void userbuffers_fp16_sum_inplace_gpu_rw<8>(int, int, int)", "all_reduce"),
        ("kuserbuffers_pushsend(int*, int*, int4*, int4*, int)", "send_recv"),
        ("kuserbuffers_pushrecv(int, int, int*, int*, int, unsigned long)", "send_recv"),
    ],
)
def test_communication(name: str, kind: str) -> None:
    assert is_device_communication(name)
    assert kind_of_kernel(name) == kind


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::reduce_kernel<512, 1, ReduceOp>", "softmax_broadcast", "hipblaslt_gemm", "MatMulV2",
        "all_gather_index_kernel", "fusion.all-reduce", "accl_gemm", "reduce.4",
    ],
)  # fmt: skip
def test_work(name: str) -> None:
    assert not is_device_communication(name)
