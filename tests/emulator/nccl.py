"""Collectives and messages as torch issues them through NCCL."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.emulator.chance import normal
from tests.emulator.machine import Meeting, Work
from tests.emulator.rank import COMPUTE, Communicator, Rank
from tests.emulator.spec import US, Job

_KINDS = {
    "broadcast": ("c10d::broadcast_", "nccl:broadcast", "Broadcast"),
    "reduce": ("c10d::reduce_", "nccl:reduce", "Reduce_Sum_{}"),
    "allreduce": ("c10d::allreduce_", "nccl:all_reduce", "AllReduce_Sum_{}"),
    "_allgather_base": ("c10d::_allgather_base_", "nccl:_all_gather_base", "AllGather"),
    "_reduce_scatter_base": ("c10d::_reduce_scatter_base_", "nccl:_reduce_scatter_base", "ReduceScatter_Sum_{}"),
}
"""Kind -> c10d's operator, ProcessGroupNCCL's range, the middle of the kernel's name."""
_KERNEL = "ncclDevKernel_{}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_TYPES = {2: ("BFloat16", "bf16"), 4: ("Float", "f32")}


def communicators(job: Job) -> list[dict[str, Communicator]]:
    """Each rank's communicators by role."""
    known: dict[tuple[str, tuple[int, ...]], Communicator] = {}
    found = []
    for rank in range(job.ranks):
        mine = {}
        for index, (role, ranks) in enumerate(job.groups_of(rank).items()):
            if role == "data" and len(ranks) == job.ranks:
                mine[role] = mine["world"]
                continue
            if (role, ranks) not in known:
                described = {"world": "default_pg", "data": "mesh_dp", "tensor": "mesh_tp"}[role]
                known[role, ranks] = _communicator(job, str(len(known)), described, ranks, 30 + 4 * index)
            mine[role] = known[role, ranks]
        found.append(mine)
    return found


def _communicator(job: Job, name: str, described: str, ranks: tuple[int, ...], stream: int) -> Communicator:
    network = job.network
    far = len({job.host_of(rank) for rank in ranks}) > 1
    latency, gbps = (network.between_latency_ns, network.between_gbps) if far else (network.latency_ns, network.gbps)
    return Communicator(name, described, ranks, stream, latency, gbps)


def wire_share(kind: str, ranks: int) -> float:
    """f(n), nccl-tests' ``PERFORMANCE.md``."""
    if kind in ("message", "broadcast", "reduce"):
        return 1.0
    return (2.0 if kind == "allreduce" else 1.0) * (ranks - 1) / ranks


def transfer_ns(job: Job, group: Communicator, kind: str, size: int, step: int, number: int | str) -> int:
    """t(S) = latency + S f(n) / B, with the network's jitter.

    A slow link (the host's memory instead of NVLink, sockets instead of InfiniBand, a worn cable) above all has less
    bandwidth: four GPUs take 42 us and 5 GB/s over PCIe (NCCL issue 445), 17 us over NVLink (nccl-tests issue 123).
    """
    slower = job.factor("slow link", -1)
    busy = job.network.busy_every and step % job.network.busy_every == 0
    of_bytes = slower * (job.network.busy_times if busy else 1.0)
    ns = group.latency_ns * math.sqrt(slower) + size * wire_share(kind, len(group.ranks)) / group.gbps * of_bytes
    jitter = 1 + job.network.jitter * abs(normal(job.seed, step, group.name, kind, number))
    return round(ns * jitter)


@dataclass(frozen=True)
class Issue:
    """What is sent: ``elements`` of the whole message, each of ``element_bytes``."""

    kind: str
    elements: int
    element_bytes: int


def collective(
    rank: Rank, group: Communicator, issue: Issue, label: str, after: Sequence[Work] | None = None
) -> Generator[Any, None, Work]:
    """Issue a collective behind the compute stream (or ``after``); who needs it has to wait for the work."""
    operator, title, kernel = _KINDS[issue.kind]
    sequence = group.next(rank.number)
    meeting = group.meetings.get(sequence)
    size = issue.elements * issue.element_bytes
    if meeting is None:
        ns = transfer_ns(rank.job, group, issue.kind, size, rank.step, label)
        meeting = group.meetings[sequence] = Meeting(len(group.ranks), ns)
    args = _metadata(rank, group, issue, sequence)
    behind = rank.last(COMPUTE) if after is None else after
    with rank.operator(operator):
        rank.spend(0.4 * rank.job.cpu.collective_ns)
        own = args if rank.job.recording.metadata in ("kernel", "operator") else {}
        with rank.operator("record_param_comms", **own):
            rank.spend(0.2 * rank.job.cpu.collective_ns)
            with rank.annotation(title):
                rank.spend(0.2 * rank.job.cpu.collective_ns)
                work = Work(
                    rank.number,
                    group.stream,
                    "kernel",
                    _KERNEL.format(kernel.format(_TYPES[issue.element_bytes][1])),
                    0,
                    0,
                )
                work.duration_ns = round(2 * US * abs(normal(rank.job.seed, rank.number, rank.step, label)))
                work.meetings = (meeting,)
                work.args = dict(args) if rank.job.recording.metadata == "kernel" else {}
                yield from rank.launch(work, behind, "cudaLaunchKernelExC")
        rank.spend(0.2 * rank.job.cpu.collective_ns)
    return work


def _metadata(rank: Rank, group: Communicator, issue: Issue, sequence: int) -> dict[str, Any]:
    ranks = len(group.ranks)
    part = issue.elements // ranks
    return {
        "Collective name": issue.kind,
        "dtype": _TYPES[issue.element_bytes][0],
        "In msg nelems": part if issue.kind == "_allgather_base" else issue.elements,
        "Out msg nelems": part if issue.kind == "_reduce_scatter_base" else issue.elements,
        "Group size": ranks,
        "Process Group Name": group.name,
        "Process Group Description": group.description,
        "Process Group Ranks": str(list(group.ranks)),
        "In split size": "[]",
        "Out split size": "[]",
        "Seq": sequence,
    }
