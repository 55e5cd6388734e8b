"""What a collective is called, how big it is and how long it takes."""

from __future__ import annotations

from dataclasses import dataclass

from tests.generator.layout import Group
from tests.generator.spec import JobSpec
from tests.generator.work import Collective

ALL_REDUCE = "allreduce"
ALL_GATHER = "_allgather_base"
REDUCE_SCATTER = "_reduce_scatter_base"
SEND_RECV = "send_recv"
"""A send with its receive; each half is called by its own name in the trace."""

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
_LISTED = 30
SEND_RECV_KERNEL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


@dataclass(frozen=True)
class Transfer:
    """One rank's half of a send: ``peer`` is the rank at the other end."""

    send: bool
    peer: int
    elements: int
    forward: bool = True
    """Activations, towards the next stage; else gradients, towards the previous one."""

    @property
    def name(self) -> str:
        """As torch calls it."""
        return "send" if self.send else "recv"

    def ends(self, rank: int) -> tuple[int, int]:
        """(sender, receiver), ``rank`` being the one whose half this is."""
        return (rank, self.peer) if self.send else (self.peer, rank)


def kernel_name(kind: str, element_bytes: int) -> str:
    """NCCL's kernel for it."""
    return _KERNELS[kind].format("bf16" if element_bytes == 2 else "f32")


def wire_factor(kind: str, ranks: int) -> float:
    """f(n): bytes that cross the slowest link per byte of the message (nccl-tests, ``doc/PERFORMANCE.md``)."""
    if kind == SEND_RECV:
        return 1.0
    return (2.0 if kind == ALL_REDUCE else 1.0) * (ranks - 1) / ranks


def transfer_ns(spec: JobSpec, kind: str, size: int, step: int, ranks: tuple[int, ...]) -> int:
    """t(S) = alpha + S f(n) / B."""
    busbw = spec.network.busbw_gbps
    if spec.network.between_hosts_gbps is not None and len({spec.host_of(rank) for rank in ranks}) > 1:
        busbw = spec.network.between_hosts_gbps
    factor = wire_factor(kind, len(ranks)) * spec.link_factor(step, ranks)
    return spec.network.alpha_ns + round(size * factor / busbw)


def describe(spec: JobSpec, group: Group, kind: str, elements: int, step: int, sequence: int) -> Collective:
    """A collective of a group, ``elements`` being the full message: all-gather's output, reduce-scatter's input."""
    size, ranks = elements * spec.model.element_bytes, len(group.ranks)
    return Collective(
        kind=kind,
        ranks=group.ranks,
        sequence=sequence,
        elements_in=elements // ranks if kind == ALL_GATHER else elements,
        elements_out=elements // ranks if kind == REDUCE_SCATTER else elements,
        bytes=size,
        step=step,
        cost_ns=transfer_ns(spec, kind, size, step, group.ranks),
        group=group,
    )


def describe_transfer(
    spec: JobSpec, group: Group, transfer: Transfer, rank: int, step: int, sequence: int
) -> Collective:
    """A send, seen from either end."""
    ends, size = transfer.ends(rank), transfer.elements * spec.model.element_bytes
    return Collective(
        kind=SEND_RECV,
        ranks=ends,
        sequence=sequence,
        elements_in=transfer.elements,
        elements_out=transfer.elements,
        bytes=size,
        step=step,
        cost_ns=transfer_ns(spec, SEND_RECV, size, step, ends),
        group=group,
    )


def metadata(name: str, group: Group, elements_in: int, elements_out: int, dtype: str) -> dict[str, object]:
    """The arguments that kineto writes on a collective's kernel."""
    return {
        "Collective name": name,
        "In msg nelems": elements_in,
        "Out msg nelems": elements_out,
        "Group size": len(group.ranks),
        "dtype": dtype,
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": group.name,
        "Process Group Description": group.description,
        "Process Group Ranks": _listed(group.ranks),
    }


def _listed(ranks: tuple[int, ...]) -> str:
    """As torch writes lists: cut short after 30 (``kTruncatLength`` in torch/csrc/profiler/util.cpp)."""
    if len(ranks) > _LISTED:
        return f"[{', '.join(map(str, ranks[:_LISTED]))}, ...]"
    return str(list(ranks))
