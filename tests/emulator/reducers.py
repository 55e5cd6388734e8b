"""What becomes of gradients: DDP's reducer, FSDP's units, or all-reduces written by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

from tests.emulator import model as layers
from tests.emulator.machine import Waits, Work
from tests.emulator.nccl import Issue, collective
from tests.emulator.rank import Rank
from tests.emulator.spec import MIB, US, Job

_DECOMPRESSION = 21
"""Stream on which a communication hook's ``then`` runs."""


def _copy_ns(elements: float, size: int) -> float:
    return 2.0 * US + 2 * elements * size / 1500


class Reducer:
    """DDP: gradients become ready from the last parameter to the first; a bucket is closed once it holds its limit."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._group = rank.communicators["data"]
        self.buckets, self._bucket_of = buckets(rank.job)
        self._left: list[int] = []
        self._works: list[Work] = []
        self._next = 0
        self.synchronizing = True

    def prepare(self, synchronizing: bool) -> None:
        """A backward comes; are its gradients to be reduced?"""
        self.synchronizing = synchronizing
        self._left = [count for count, _ in self.buckets]
        self._works, self._next = [], 0

    def send_buffers(self) -> Waits:
        """``_sync_buffers`` at the begin of a forward: in one tensor, and back."""
        rank, elements = self._rank, round(self._rank.job.buffers_mb * MIB / 4)
        after: list[Work] = []
        for operator in ("aten::cat", "aten::copy_") if elements else ():
            with rank.operator(operator):
                rank.spend(rank.job.cpu.operator_ns)
                name = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 1>(float*)"
                yield from rank.kernel(name, _copy_ns(elements, 4), f"buffers.{operator}", after)
            if operator == "aten::cat":
                after = [(yield from collective(rank, self._group, Issue("broadcast", elements, 4), "buffers"))]

    def ready(self, parameter: tuple[int, int]) -> Waits:
        """The hook of a parameter's AccumulateGrad."""
        if not self.synchronizing:
            return
        rank = self._rank
        index, elements = self._bucket_of[parameter]
        with rank.operator("torch::distributed::reducer::mul_out"), rank.operator("aten::mul"):
            rank.spend(rank.job.cpu.operator_ns)
            name = "void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor>(int)"
            yield from rank.kernel(name, _copy_ns(elements, 4), f"copy{parameter}")
        self._left[index] -= 1
        while self._next < len(self._left) and not self._left[self._next]:
            label, elements = f"bucket{self._next}.{rank.micro}", self.buckets[self._next][1]
            send = self._compressed if rank.job.compressed else self._plain
            self._works.append((yield from send(label, elements)))
            self._next += 1

    def _plain(self, label: str, elements: int) -> Generator[Any, None, Work]:
        return collective(self._rank, self._group, Issue("allreduce", elements, self._rank.job.gradient_bytes), label)

    def _compressed(self, label: str, elements: int) -> Generator[Any, None, Work]:
        """``bf16_compress_hook``: ``buffer.to(bf16).div_(n)``, all-reduced, and copied back on a stream of its own."""
        rank = self._rank
        for operator, size in (("aten::to", 3), ("aten::div_", 2)):
            with rank.operator(operator):
                rank.spend(rank.job.cpu.operator_ns)
                yield from rank.kernel(f"{operator} of gradients", _copy_ns(elements, size), f"{operator}.{label}")
        sent = yield from collective(rank, self._group, Issue("allreduce", elements, 2), label)
        with rank.operator("aten::copy_"):
            rank.spend(rank.job.cpu.operator_ns)
            back = Work(
                rank.number, _DECOMPRESSION, "kernel", "copy of gradients", round(_copy_ns(elements, 3)), rank.now
            )
            return (yield from rank.launch(back, [sent]))

    def finish(self) -> list[Work]:
        """At the end of the backward: what the compute stream has to wait for."""
        return self._works if self.synchronizing else []


def buckets(job: Job) -> tuple[list[tuple[int, int]], dict[tuple[int, int], tuple[int, int]]]:
    """((parameters, elements) of each bucket, parameter -> (bucket, elements)), in the order of the backward."""
    limit = job.bucket_mb * MIB
    first = limit if job.one_bucket_limit else min(MIB, limit)
    found: list[tuple[int, int]] = []
    bucket_of = {}
    count = elements = 0
    for unit in range(job.model.blocks // job.stages - 1, -1, -1):
        for number, size in reversed(list(enumerate(layers.parameters(job)))):
            count, elements = count + 1, elements + size
            bucket_of[unit, number] = (len(found), size)
            if elements * job.gradient_bytes >= (limit if found else first):
                found.append((count, elements))
                count = elements = 0
    if count:
        found.append((count, elements))
    return found, bucket_of


class ByHand:
    """``for p in model.parameters(): dist.all_reduce(p.grad); p.grad /= n`` after the backward."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def reduce(self) -> Waits:
        """All gradients, one after the other; each is waited for on the compute stream."""
        rank = self._rank
        if rank.job.strategy == "flat":
            yield from self._reduce_at_once()
            return
        for unit in range(rank.job.model.blocks):
            for number in range(len(layers.parameters(rank.job))):
                yield from self.reduce_one((unit, number))

    def reduce_one(self, parameter: tuple[int, int]) -> Waits:
        """One gradient, also in a hook of the backward; the compute stream waits for it."""
        rank, (unit, number) = self._rank, parameter
        size = layers.parameters(rank.job)[number]
        rank.spend(rank.job.cpu.python_ns)
        kind, group = "reduce" if rank.job.returned else "allreduce", rank.communicators["data"]
        issue = Issue(kind, size, rank.job.gradient_bytes)
        work = yield from collective(rank, group, issue, f"hand{unit}.{number}")
        if not rank.job.returned or rank.number == group.ranks[0]:
            with rank.operator("aten::div_"):
                rank.spend(rank.job.cpu.operator_ns)
                name = "void at::native::vectorized_elementwise_kernel<4, at::native::DivFunctor>(int)"
                yield from rank.kernel(name, _copy_ns(size, 4), f"div{unit}.{number}", [work])
        if rank.job.returned:
            rank.depend([work])
            rank.spend(rank.job.cpu.python_ns)
            back = Issue("broadcast", size, rank.job.gradient_bytes)
            rank.depend([(yield from collective(rank, group, back, f"back{unit}.{number}"))])

    def _reduce_at_once(self) -> Waits:
        """``flat = _flatten_dense_tensors(grads)``, one all-reduce, ``flat /= n``, and back."""
        rank = self._rank
        elements = rank.job.model.blocks * sum(layers.parameters(rank.job))
        kernels = {
            "aten::cat": "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 1>(float*)",
            "aten::div_": "void at::native::vectorized_elementwise_kernel<4, at::native::DivFunctor>(int)",
            "aten::_foreach_copy_": "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<float>(int)",
        }
        after: list[Work] = []
        for operator, name in kernels.items():
            with rank.operator(operator):
                rank.spend(rank.job.cpu.operator_ns)
                yield from rank.kernel(name, _copy_ns(elements, 4), f"flat.{operator}", after)
            after = []
            if operator == "aten::cat":
                issue = Issue("allreduce", elements, rank.job.gradient_bytes)
                after = [(yield from collective(rank, rank.communicators["data"], issue, "flat"))]


class Units:
    """FSDP: a unit's parameters are gathered before they are used and freed after; gradients are scattered."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._group = rank.communicators["data"]
        self._gathered: dict[int, Work] = {}
        self._freed: deque[Sequence[Work]] = deque()
        self._reductions: list[Work] = []
        self._elements = sum(layers.parameters(rank.job))
        self._optimized: list[Work] = []

    def begin(self) -> None:
        """A step begins: gathers come after the optimizer's kernels."""
        self._optimized = self._rank.last()
        self._gathered.clear()

    def _gather(self, unit: int, phase: str) -> Waits:
        if unit in self._gathered:
            return
        rank = self._rank
        if len(self._freed) >= rank.job.in_flight:
            # The rate limiter: no more than so many gathered units that have not been freed.
            freed = self._freed.popleft()
            with rank.annotation("FullyShardedDataParallel.rate_limiter"):
                yield from rank.wait(freed[-1] if freed else None, "cudaEventSynchronize")
        issue = Issue("_allgather_base", self._elements, rank.job.model.element_bytes)
        title = "FSDP::all_gather" if rank.job.version == 2 else "FullyShardedDataParallel._pre_unshard"
        with rank.annotation(title):
            self._gathered[unit] = yield from collective(
                rank, self._group, issue, f"gather{unit}.{phase}.{rank.micro}", self._optimized
            )

    def _free(self, unit: int) -> None:
        self._gathered.pop(unit, None)
        self._freed.append(self._rank.last())

    def forward(self, unit: int) -> Waits:
        """A unit's forward, its hooks included."""
        rank = self._rank
        yield from self._gather(unit, "f")
        self._use(unit)
        if rank.job.forward_prefetch and unit + 1 < rank.job.model.blocks:
            yield from self._gather(unit + 1, "f")
        yield from layers.forward(rank, unit)
        if rank.job.reshard:
            self._free(unit)

    def _use(self, unit: int) -> None:
        self._rank.depend([self._gathered[unit]])

    def backward(self, unit: int) -> Waits:
        """A unit's backward: its parameters and the next one's, its work, its reduction."""
        rank = self._rank
        yield from self._gather(unit, "b")
        self._use(unit)
        if rank.job.backward_prefetch and unit:
            yield from self._gather(unit - 1, "b")
        for step in layers.backward(rank, unit):
            if not isinstance(step, int):
                yield step
        self._free(unit)
        title = (
            "FSDP::post_backward_reduce" if rank.job.version == 2 else "FullyShardedDataParallel._post_backward_hook"
        )
        with rank.annotation(title):
            if rank.job.scatters_once and rank.micro < rank.job.microbatches - 1:
                yield from self._add(unit)
                return
            with rank.operator("aten::copy_"):
                rank.spend(rank.job.cpu.operator_ns)
                name = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>(int)"
                yield from rank.kernel(name, _copy_ns(self._elements, 3), f"cast{unit}")
            issue = Issue("_reduce_scatter_base", self._elements, rank.job.gradient_bytes)
            self._reductions.append((yield from collective(rank, self._group, issue, f"scatter{unit}.{rank.micro}")))

    def _add(self, unit: int) -> Waits:
        """A unit's gradients are added to what earlier micro-batches have left."""
        rank = self._rank
        with rank.operator("aten::add_"):
            rank.spend(rank.job.cpu.operator_ns)
            name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
            yield from rank.kernel(name, _copy_ns(self._elements, 5), f"add{unit}")

    def finish(self) -> list[Work]:
        """What the optimizer has to wait for."""
        done, self._reductions = self._reductions, []
        return done
