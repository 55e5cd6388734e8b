"""What is communication, and what a trace says about each collective.

Recognised by collective metadata first, then by a table of name patterns.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from perfscope.analyzers.launches import DeviceWork
from perfscope.trace import Bool, Category, Int32, Int64, Trace

DEVICE_PATTERNS: Final = (
    (r"^nccl(Dev)?Kernel", "NCCL and RCCL device functions: nccl src/device"),
    (r"^ncclSymk?(Dev)?Kernel|^ncclSym", "NCCL >= 2.27 symmetric-memory kernels: nccl src/device/symmetric"),
    (r"^mscclKernel|^msccl_", "MSCCL in RCCL: rccl src/device/msccl_kernel_impl.h"),
    (r"nvshmem(x|i)?_", "NVSHMEM device and host-launched collectives"),
    (r"deep_ep::|\bdeep_ep\b", "DeepEP expert-parallel dispatch and combine: DeepEP csrc/kernels"),
    (r"(^|::)(intranode|internode|internode_ll)::(notify_)?(dispatch|combine|cached_notify)", "DeepEP csrc/kernels"),
    (r"cross_device_reduce_(1|2)stage", "vLLM and SGLang custom all-reduce: csrc/custom_all_reduce.cuh"),
    (r"(one|two)_?shot_all_?reduce|multimem_all_reduce|multimem_(one|two)_shot", "PyTorch symmetric memory"),
    (r"quickreduce|allreduce_prototype", "AMD quick all-reduce: vllm csrc/quickreduce"),
    (r"^(void )?(flashinfer::)?trtllm_(allreduce|moe_alltoall)|allreduce_fusion_kernel", "TensorRT-LLM, FlashInfer"),
)
"""Device kernels that are communication, by name, each with where the name comes from."""

HOST_PATTERNS: Final = (
    (r"^gloo:", "c10d ProcessGroupGloo.cpp"),
    (r"^mpi:", "c10d ProcessGroupMPI.cpp"),
    (r"^nccl:", "c10d ProcessGroupNCCL.cpp; host range, used only where no device work is recorded"),
    (r"^ucc:", "c10d ProcessGroupUCC.cpp"),
    (r"^(ALLREDUCE|ALLGATHER|BROADCAST|ALLTOALL|REDUCESCATTER)$", "Horovod Timeline: horovod common/common.h"),
)
"""Host ranges in which a backend's threads carry out a collective."""

_DEVICE = re.compile("|".join(pattern for pattern, _ in DEVICE_PATTERNS))
_HOST = re.compile("|".join(pattern for pattern, _ in HOST_PATTERNS))

_KINDS: Final = {
    "allreduce": "all_reduce",
    "allreducecoalesced": "all_reduce",
    "allreducesparse": "all_reduce",
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgatherintotensor": "all_gather",
    "allgatherintotensorcoalesced": "all_gather",
    "allgathercoalesced": "all_gather",
    "allgatherv": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter",
    "reducescatterv": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallv": "all_to_all",
    "broadcast": "broadcast",
    "broadcastoop": "broadcast",
    "reduce": "reduce",
    "reduceoop": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "recvanysource": "recv",
    "barrier": "barrier",
    "allreducebarrier": "barrier",
    "coalesced": "coalesced",
    "sendrecv": "send_recv",
}
"""Names of collectives in the wild (letters only, lower case) -> the kind as torch.distributed calls it."""

_KNOWN_KINDS: Final = frozenset(_KINDS.values())

DTYPE_BYTES: Final = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "complex64": 8,
    "complex128": 16,
}  # fmt: skip

_DTYPES: Final = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "c10::half": "float16",
    "bfloat16": "bfloat16",
    "c10::bfloat16": "bfloat16",
    "long": "int64",
    "long int": "int64",
    "int": "int32",
    "short": "int16",
    "short int": "int16",
    "char": "int8",
    "signed char": "int8",
    "byte": "uint8",
    "unsigned char": "uint8",
    "bool": "bool",
    "float8_e4m3fn": "float8_e4m3fn",
    "c10::float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "c10::float8_e5m2": "float8_e5m2",
    "c10::float8_e4m3fnuz": "float8_e4m3fnuz",
    "c10::float8_e5m2fnuz": "float8_e5m2fnuz",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}
"""Type names in recordings (lower case) -> torch's."""


def dtype_of(text: str) -> str | None:
    """Torch's name of a recorded type (``c10::BFloat16`` -> ``bfloat16``); None when unknown."""
    lowered = text.strip().lower()
    return lowered if lowered in DTYPE_BYTES else _DTYPES.get(lowered)


def kind_of(text: str) -> str:
    """The kind of a collective by any of its names: ``_allgather_base`` and ``gloo:all_gather`` are ``all_gather``."""
    letters = re.sub(r"[^a-z]", "", text.rsplit(":", maxsplit=1)[-1].lower())
    return _KINDS.get(letters, letters or "unknown")


def is_known_kind(kind: str) -> bool:
    """Is it a kind that torch.distributed knows?"""
    return kind in _KNOWN_KINDS


def kind_of_kernel(name: str) -> str:
    """The kind by a kernel's name: ``ncclDevKernel_AllReduce_Sum_f32_RING_LL`` is ``all_reduce``; else ``unknown``."""
    match = re.search(r"(AllReduce|AllGather|ReduceScatter|SendRecv|Broadcast|Reduce|AllToAll)", name)
    if match:
        return kind_of(match[1])
    lowered = name.lower()
    if "dispatch" in lowered or "combine" in lowered or "alltoall" in lowered:
        return "all_to_all"
    return "all_reduce" if "reduce" in lowered else "unknown"


@functools.lru_cache(maxsize=1 << 16)
def is_device_communication(name: str) -> bool:
    """Does a kernel of this name move data between ranks?"""
    return _DEVICE.search(name) is not None


def is_host_communication(name: str) -> bool:
    """Is a host range of this name a collective being carried out?"""
    return _HOST.match(name) is not None


POINT_TO_POINT: Final = ("send", "recv", "send_recv")
"""Kinds that pass between two ranks of a group; ``send_recv`` is both at once, or either where nothing says which."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ranks that take part in a collective, as far as the recording tells.

    ``ranks`` is empty when they are not listed; ``size`` None when not even their number is known. ``name`` is what the
    process itself calls the group: another process may call another group so. ``description`` is what it was made for,
    where its maker said so.
    """

    name: str
    ranks: tuple[int, ...]
    size: int | None
    description: str = ""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle. Every rank of a large job lists the same thousands of ranks: they share one tuple."""
        self.__dict__.update(state, ranks=_shared(state["ranks"]))


@functools.lru_cache(maxsize=4096)
def _shared(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The first tuple seen that is equal to this one."""
    return ranks


@dataclass(frozen=True, eq=False)
class Messages:
    """What a rank's sends and receipts carry: parallel arrays, one entry a message, in the order of issue.

    ``collective`` is the row in ``Collectives`` that carries it out: one kernel may carry several messages. ``peer`` is
    the global rank at the other end (NONE: not said), ``bytes`` the length (NONE: not said).
    """

    collective: Int64
    peer: Int64
    sends: Bool
    bytes: Int64

    def __len__(self) -> int:
        return len(self.collective)

    @classmethod
    def none(cls) -> Messages:
        """No message at all."""
        nothing = np.empty(0, dtype=np.int64)
        return cls(nothing, nothing, np.empty(0, dtype=np.bool_), nothing)


@dataclass(frozen=True, eq=False)
class Collectives:
    """One rank's communication events in order of start: parallel arrays of equal length.

    ``group``, ``kind`` and ``dtype`` index the tuples of the same name (``dtype`` NONE: unknown). ``bytes`` follows
    nccl-tests: the larger of the two buffers for all-gather and reduce-scatter, else the input; NONE when unknown.
    ``sequence`` is the recorded number within the group (NONE: not recorded); ``step`` the index of the step in whose
    host window the collective was issued (-1: outside all). ``messages`` describe those that are point to point; on the
    host these begin with the operator that issued them.
    """

    start_ns: Int64
    end_ns: Int64
    group: Int32
    kind: Int32
    dtype: Int32
    bytes: Int64
    sequence: Int64
    step: Int64
    stream: Int64
    groups: tuple[Group, ...]
    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    messages: Messages = field(default_factory=Messages.none)
    on_host: bool = False
    """Ranges of host threads, which end when somebody notices, rather than a device's kernels."""

    def __len__(self) -> int:
        return len(self.start_ns)


def device_communication(trace: Trace, work: DeviceWork) -> Bool:
    """For each piece of device work: is it communication? By metadata on the kernel, else by name."""
    named = trace.names_where(is_device_communication)[work.row]
    described = np.isin(work.row, trace.collectives.row)
    return np.asarray((named | described) & (trace.category[work.row] == Category.KERNEL))


def parse_ranks(text: str) -> tuple[int, ...]:
    """Ranks from a recorded list such as ``[0, 1]``; empty when it is cut short (``...``) or not a list."""
    try:
        values = json.loads(text)
    except ValueError:
        return ()
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        return ()
    return tuple(values)
