"""Jobs of a few ranks by hand: what each rank's communication kernels are, and when they run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from perfscope.analyzers.job.collectives.matched import MatchedCollectives
from perfscope.analyzers.job.collectives.matching import match
from perfscope.analyzers.job.collectives.unmatched import Mismatch
from perfscope.analyzers.rank.analyze import analyze_rank
from perfscope.trace.clock import Clocks
from perfscope.trace.trace import Category, ProcessGroup
from tests.traces import TraceBuilder

KERNELS = {
    "allreduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "reduce": "ncclDevKernel_Reduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_reduce_scatter_base": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all_to_allv": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "send": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "recv": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}
STEP = 1_000_000


@dataclass
class Rank:
    """One rank's trace. Kernels are added with their times in the step; ``describe`` chooses what describes them:
    ``kernel`` (their own metadata), ``operator`` (``record_param_comms`` around the launch) or ``nothing``."""

    number: int
    world_size: int
    groups: Mapping[str, tuple[int, ...]]
    descriptions: Mapping[str, str] = field(default_factory=dict)
    describe: str = "kernel"
    steps: int = 1
    host: str = ""
    builder: TraceBuilder = field(init=False)

    def __post_init__(self) -> None:
        listed = tuple(
            ProcessGroup(name, self.descriptions.get(name, "undefined"), ranks) for name, ranks in self.groups.items()
        )
        self.builder = TraceBuilder(rank=self.number, world_size=self.world_size, groups=listed, host=self.host)
        for step in range(self.steps):
            self.builder.step(step, step * STEP, (step + 1) * STEP)
            self.builder.launched("gemm", step * STEP + 1, step * STEP + 2, step * STEP + 50)

    def args(self, kind: str, group: str, elements: int, **more: object) -> dict[str, object]:
        ranks = self.groups[group]
        return {
            "kind": kind, "group": group, "ranks": json.dumps(list(ranks)), "dtype": "BFloat16",
            "elements_in": elements, "elements_out": elements, "group_size": len(ranks), **more,
        }  # fmt: skip

    def kernel(
        self, kind: str, group: str, start: int, end: int, elements: int = 100, *, launch: int | None = None,
        step: int = 0, stream: int = 20, **more: object,
    ) -> Rank:  # fmt: skip
        """A kernel over ``[start, end)`` of the step, launched a little before it."""
        at = step * STEP
        launch = at + (max(start - 60, 60) if launch is None else launch)
        args = self.args(kind, group, elements, **more)
        own = {"collective": args} if self.describe == "kernel" else {}
        if self.describe == "operator":
            self.builder.op("record_param_comms", launch - 2, launch + 3, collective=args)
        self.builder.launched(KERNELS[kind], launch, at + start, at + end, stream=stream, **own)
        return self

    def batch(
        self, group: str, start: int, end: int, legs: Sequence[tuple[str, int]], elements: int = 100, *, launch: int
    ) -> Rank:
        """One kernel for several ``legs`` (``send`` or ``recv``, and the peer), as ``batch_isend_irecv`` makes it: the
        operators come before the launch, and the kernel itself has no description."""
        for place, (kind, peer) in enumerate(legs):
            at = launch - 20 + 4 * place
            args = self.args(kind, group, elements, peer=peer)
            self.builder.event("record_param_comms", Category.CPU_OP, at, at + 2, collective=args)
        self.builder.launched(KERNELS["send"], launch, start, end, stream=30)
        return self


def matched(
    ranks: Sequence[Rank], hosts: Mapping[int, str] | None = None
) -> tuple[MatchedCollectives, Clocks, tuple[Mismatch, ...]]:
    """The ranks' collectives, matched."""
    partials = {rank.number: analyze_rank(rank.builder.build()) for rank in ranks}
    steps = reduce(np.intersect1d, [partial.steps.number for partial in partials.values()])
    return match(partials, steps, hosts)


def instances(found: MatchedCollectives) -> list[tuple[str, str, tuple[int, ...], bool]]:
    """(group, kind, ranks present, complete) of every instance, in their order."""
    instances = found.instances
    return [
        (
            instances.groups[instances.group[at]].name,
            instances.kinds[instances.kind[at]],
            tuple(found.rank[found.instance == at].tolist()),
            bool(instances.complete[at]),
        )
        for at in range(len(instances))
    ]


def line(found: MatchedCollectives, instance: int, rank: int) -> int:
    """The line of a rank in an instance."""
    (at,) = np.flatnonzero((found.instance == instance) & (found.rank == rank))
    return int(at)
