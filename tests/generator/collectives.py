"""What a collective is called, how big it is and how long it takes."""

from __future__ import annotations

from tests.generator.engine import Collective
from tests.generator.spec import JobSpec

ALL_REDUCE = "allreduce"
ALL_GATHER = "_allgather_base"
REDUCE_SCATTER = "_reduce_scatter_base"

OPERATORS = {
    ALL_REDUCE: "c10d::allreduce_",
    ALL_GATHER: "c10d::_allgather_base_",
    REDUCE_SCATTER: "c10d::_reduce_scatter_base_",
}
ANNOTATIONS = {
    ALL_REDUCE: "nccl:all_reduce",
    ALL_GATHER: "nccl:_all_gather_base",
    REDUCE_SCATTER: "nccl:_reduce_scatter_base",
}
_KERNELS = {
    ALL_REDUCE: "ncclDevKernel_AllReduce_Sum_{}_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ALL_GATHER: "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    REDUCE_SCATTER: "ncclDevKernel_ReduceScatter_Sum_{}_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}


def kernel_name(kind: str, element_bytes: int) -> str:
    """NCCL's kernel for it."""
    return _KERNELS[kind].format("bf16" if element_bytes == 2 else "f32")


def wire_factor(kind: str, ranks: int) -> float:
    """f(n): bytes that cross the slowest link per byte of the message (nccl-tests, ``doc/PERFORMANCE.md``)."""
    return (2.0 if kind == ALL_REDUCE else 1.0) * (ranks - 1) / ranks


def transfer_ns(spec: JobSpec, kind: str, size: int, step: int) -> int:
    """t(S) = alpha + S f(n) / B."""
    busbw = spec.network.busbw_gbps / spec.link_factor(step)
    return spec.network.alpha_ns + round(size * wire_factor(kind, spec.ranks) / busbw)


def describe(spec: JobSpec, kind: str, elements: int, step: int, sequence: int) -> Collective:
    """A collective over all ranks, ``elements`` being the full message: all-gather's output, reduce-scatter's input."""
    size = elements * spec.model.element_bytes
    return Collective(
        kind=kind,
        ranks=tuple(range(spec.ranks)),
        sequence=sequence,
        elements_in=elements // spec.ranks if kind == ALL_GATHER else elements,
        elements_out=elements // spec.ranks if kind == REDUCE_SCATTER else elements,
        bytes=size,
        step=step,
        cost_ns=transfer_ns(spec, kind, size, step),
    )


def metadata(described: Collective, dtype: str) -> dict[str, object]:
    """The arguments that kineto writes on a collective's kernel."""
    return {
        "Collective name": described.kind,
        "In msg nelems": described.elements_in,
        "Out msg nelems": described.elements_out,
        "Group size": len(described.ranks),
        "dtype": dtype,
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": str(list(described.ranks)),
    }
