"""Which events are communication, and which kind of collective and type their names mean.

A kernel is communication if the trace describes it as a collective (torch's metadata on NCCL kernels), or if its name
matches ``DEVICE_PATTERNS``. On a rank without device work, a host range is communication if its name matches
``HOST_PATTERNS``.
"""

from __future__ import annotations

import functools
import re
from typing import Final
from weakref import WeakKeyDictionary, ref

import numpy as np

from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.trace.trace import Bool, Category, Int64, Trace

DEVICE_PATTERNS: Final = (
    (r"^[a-z]{0,3}ccl\w*Kernel", "NCCL and RCCL device functions, also those before 2.8, and libraries like them"),
    (r"^(?i:[nr]ccl)", "whatever else bears the library's name: its own host calls, or what a program writes itself"),
    (
        (
            r"^(?i:(comm|c10d|ddp|fsdp|zero)?[ _:.-]*(all[ _-]?(reduce|gather|to[ _-]?all)|reduce[ _-]?scatter)"
            r"[ _:.#(-]*(bucket|grad(ient)?s?|sum|avg|base|coalesced)?[ _:.#-]*\d*[_)]*$)"
        ),
        "a collective by its own name, as programs write it",
    ),
    (r"^ncclSymk?(Dev)?Kernel|^ncclSym", "NCCL >= 2.27 symmetric-memory kernels: nccl src/device/symmetric"),
    (r"^mscclKernel|^msccl_", "MSCCL in RCCL: rccl src/device/msccl_kernel_impl.h"),
    (r"nvshmem(x|i)?_", "NVSHMEM device and host-launched collectives"),
    (r"deep_ep(?<!\wdeep_ep)\b", "DeepEP expert-parallel dispatch and combine: DeepEP csrc/kernels"),
    (r"intranode::(notify_)?(dispatch|combine|cached_notify)", "DeepEP csrc/kernels"),
    (r"internode(_ll)?::(notify_)?(dispatch|combine|cached_notify)", "DeepEP csrc/kernels"),
    (r"hybrid_ep::(dispatch|combine|device_sync)", "DeepEP csrc/hybrid_ep"),
    (r"a2a_(dispatch|combine)_(send|recv)", "pplx-kernels and pplx-garden, expert-parallel: a2a_kernels/src"),
    (r"Ep(Dispatch|Combine)(Intra|Inter)Node|Ep(Dispatch|Combine)LowLatency", "MORI of AMD: src/ops/dispatch_combine"),
    (r"cross_device_reduce_(1|2)stage", "vLLM and SGLang custom all-reduce: csrc/custom_all_reduce.cuh"),
    (r"reduce_scatter_cross_device_store", "AITER of AMD: csrc/include/custom_all_reduce.cuh"),
    (
        r"userbuffers_(fp16_sum_|push|pull)",
        "Transformer Engine, tensor parallelism that overlaps: common/comm_gemm_overlap/userbuffers/userbuffers.cu",
    ),
    (
        "|".join(rf"{number}_?(?i:shot_?all_?reduce)" for number in ("one", "One", "two", "Two")),
        "PyTorch symmetric memory, FlashInfer, TensorRT-LLM",
    ),
    (r"multimem_(all_reduce|all_gather|(one|two)_shot)", "PyTorch: CUDASymmetricMemoryOps.cu"),
    (r"symmetric_memory::\w*(barrier|signal)_kernel", "PyTorch: CUDASymmetricMemory.cu"),
    (r"all_?[rR]educe_?([oO]ne|[tT]wo)_?[sS]hot", "SGLang custom all-reduce: all_reduce_one_shot_push_kernel"),
    (r"mscclpp::", "MSCCL++: mscclpp include/mscclpp"),
    (r"^hcom_", "HCCL of Ascend: hccl/hcom.h"),
    (r"^oneccl_", "oneCCL of Intel"),
    (
        r"^(all-(reduce|gather|to-all)|reduce-scatter|collective-(permute|broadcast))(-start|-done)?(\.\d+)*$",
        "XLA: xla/hlo/ir/hlo_opcode.h",
    ),
    (r"quickreduce|allreduce_prototype", "AMD quick all-reduce: vllm csrc/quickreduce"),
    (r"trtllm_(allreduce|moe_alltoall)|allreduce_fusion_kernel", "TensorRT-LLM, FlashInfer"),
)
"""Names of kernels that are communication, each with its source. Those that may stand anywhere in a name begin with a
letter: Python looks for such patterns in a long name twenty times as fast as for others.
"""

HOST_PATTERNS: Final = (
    (r"^gloo:", "c10d ProcessGroupGloo.cpp"),
    (r"^mpi:", "c10d ProcessGroupMPI.cpp"),
    (r"^nccl:", "c10d ProcessGroupNCCL.cpp; host range, used only where no device work is recorded"),
    (r"^ucc:", "c10d ProcessGroupUCC.cpp"),
    (r"^(ALLREDUCE|ALLGATHER|BROADCAST|ALLTOALL|REDUCESCATTER)$", "Horovod Timeline: horovod common/common.h"),
)
"""Names of host ranges in which a backend's threads carry out a collective, each with its source."""

_DEVICE_BEGIN = re.compile("|".join(pattern for pattern, _ in DEVICE_PATTERNS if pattern.startswith("^")))
_DEVICE_WITHIN = re.compile("|".join(pattern for pattern, _ in DEVICE_PATTERNS if not pattern.startswith("^")))
_HOST = re.compile("|".join(pattern for pattern, _ in HOST_PATTERNS))

_NAMES_OF_KINDS: Final = {
    "all_reduce": "allreduce allreducecoalesced allreducesparse",
    "all_gather": "allgather allgatherbase allgatherintotensor allgatherintotensorcoalesced allgathercoalesced "
    "allgatherv",
    "reduce_scatter": "reducescatter reducescatterbase reducescattertensor reducescattertensorcoalesced reducescatterv",
    "all_to_all": "alltoall alltoallbase alltoallv",
    "broadcast": "broadcast broadcastoop",
    "reduce": "reduce reduceoop",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv receive recvanysource",
    "barrier": "barrier allreducebarrier",
    "coalesced": "coalesced",
    "send_recv": "sendrecv",
}
"""torch.distributed's name of a kind -> its names in recordings (letters only, lower case)."""

_KINDS: Final = {name: kind for kind, names in _NAMES_OF_KINDS.items() for name in names.split()}

DTYPE_BYTES: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "complex64": 8,
    "complex128": 16,
}  # fmt: skip

_DTYPES: Final = {
    "double": "float64", "float": "float32", "half": "float16", "c10::half": "float16", "bfloat16": "bfloat16",
    "c10::bfloat16": "bfloat16", "long": "int64", "long int": "int64", "int": "int32", "short": "int16",
    "short int": "int16", "char": "int8", "signed char": "int8", "byte": "uint8", "unsigned char": "uint8",
    "bool": "bool", "float8_e4m3fn": "float8_e4m3fn", "c10::float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2", "c10::float8_e5m2": "float8_e5m2", "c10::float8_e4m3fnuz": "float8_e4m3fnuz",
    "c10::float8_e5m2fnuz": "float8_e5m2fnuz", "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}  # fmt: skip
"""Type names in recordings (lower case) -> torch's."""


_REDUCED: Final = re.compile(r"_(?:Sum|SumPostDiv|PreMulSum|Avg)_([a-z0-9]+)(?:_|\(|$)")
_NCCL_DTYPES: Final = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "half": "float16", "float": "float32",
}  # fmt: skip


def dtype_of(text: str) -> str | None:
    """Torch's name of a recorded type (``c10::BFloat16`` -> ``bfloat16``); None when unknown."""
    lowered = text.strip().lower()
    return lowered if lowered in DTYPE_BYTES else _DTYPES.get(lowered)


def dtype_of_kernel(name: str) -> str | None:
    """What a reduction of NCCL adds, by its kernel (``AllReduce_Sum_f32_RING_LL``); None where that does not tell."""
    found = _REDUCED.search(name)
    return _NCCL_DTYPES.get(found[1]) if found else None


def kind_of(text: str) -> str:
    """The kind of a collective by any of its names: ``_allgather_base`` and ``gloo:all_gather`` are ``all_gather``."""
    letters = re.sub(r"[^a-z]", "", text.rsplit(":", maxsplit=1)[-1].lower())
    return _KINDS.get(letters, letters or "unknown")


def is_known_kind(kind: str) -> bool:
    """Whether torch.distributed has this kind."""
    return kind in _NAMES_OF_KINDS


def kind_of_kernel(name: str) -> str:
    """The kind by a kernel's name: ``ncclDevKernel_AllReduce_Sum_f32_RING_LL`` is ``all_reduce``; else ``unknown``."""
    letters = re.sub(r"[^a-z]", "", name.lower())
    match = _SPELLED.search(letters)
    if match:
        return _KINDS.get(match[1] or match[0], "send_recv")
    match = _USERBUFFERS.search(name)
    if match:
        return _OF_USERBUFFERS[match[1] or match[2]]
    match = re.search(r"(SendRecv|Reduce)", name)
    if match:
        return kind_of(match[1])
    if "dispatch" in letters or "combine" in letters:
        return "all_to_all"
    return "all_reduce" if "reduce" in letters else "unknown"


_SPELLED: Final = re.compile(
    "allreduce|allgather|reducescatter|alltoall|broadcast|collectivepermute|hcom(send|rec(?:v|eive))"
)
"""Kinds in names of kernels without their dashes and capitals."""


_USERBUFFERS: Final = re.compile(r"userbuffers_(?:fp16_sum_inplace_gpu_[a-z]+_?(ag|rs)?|(pu)(?:sh|ll)(?:send|recv))")
_OF_USERBUFFERS: Final = {"ag": "all_gather", "rs": "reduce_scatter", "pu": "send_recv", None: "all_reduce"}
"""Kinds in names of Transformer Engine's kernels, such as ``userbuffers_fp16_sum_inplace_gpu_rr_rs_oop``."""


@functools.lru_cache(maxsize=1 << 16)
def is_device_communication(name: str) -> bool:
    """Whether a kernel of this name is communication."""
    return _DEVICE_BEGIN.match(name) is not None or _DEVICE_WITHIN.search(name) is not None


_KNOWN: Final[WeakKeyDictionary[DeviceWork, tuple[ref[Trace], Bool]]] = WeakKeyDictionary()
"""Work -> what ``device_communication`` found: most analyses of a rank ask for it."""


def device_communication(trace: Trace, work: DeviceWork) -> Bool:
    """For each piece of device work: whether it is communication, by the kernel's metadata or by its name."""
    known = _KNOWN.get(work)
    if known is not None and known[0]() is trace:
        return known[1]
    named = trace.names_where(is_device_communication, work.row)
    described = np.isin(work.row, trace.collectives.row)
    found: Bool = (named | described) & (trace.category[work.row] == Category.KERNEL)
    found.setflags(write=False)  # all who ask get the same array
    _KNOWN[work] = ref(trace), found
    return found


def in_order_of_collectives(work: DeviceWork, is_communication: Bool) -> Int64:
    """Indices of the communication kernels in the order of a rank's ``Collectives``."""
    chosen = np.flatnonzero(is_communication)
    return chosen[np.lexsort((work.end_ns[chosen], work.start_ns[chosen]))]


def host_communication_rows(trace: Trace, *categories: Category) -> Int64:
    """Rows of the host ranges in which a backend carries out a collective; of other categories where any are given."""
    return trace.rows(*(categories or (Category.ANNOTATION, Category.CPU_OP)), named=_HOST.match)
