"""The training scripts: one program for each rank."""

from __future__ import annotations

from contextlib import ExitStack

from tests.emulator import model as layers
from tests.emulator.chance import normal
from tests.emulator.loader import Batches, Queue
from tests.emulator.machine import Waits
from tests.emulator.nccl import Issue, collective
from tests.emulator.pipeline import step as pipeline_step
from tests.emulator.rank import Rank
from tests.emulator.reducers import ByHand, Reducer, Units
from tests.emulator.spec import Cause

_CROSS_ENTROPY = (
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true>(float*, float const*, int)"
)
_LOOP = (
    "aten::mul_", "aten::lerp_", "aten::addcmul_", "aten::addcdiv_", "aten::mul_", "aten::sqrt", "aten::div",
    "aten::add_", "aten::maximum", "aten::copy_",
)  # fmt: skip
"""Operators that a loop runs for each parameter, as many as it has kernels: as torch's AdamW without ``foreach``."""
_ADAM = "void at::native::multi_tensor_apply_kernel<at::native::TensorListMetadata<4>, FusedAdam>(params)"


class Script:
    """``for batch in loader: forward, backward, optimizer.step()``."""

    def __init__(self, rank: Rank, queue: Queue | None = None) -> None:
        self.rank, self._queue = rank, queue
        job = rank.job
        shares = "data" in rank.communicators
        self.reducer = Reducer(rank) if shares and job.strategy in ("ddp", "tensor", "pipeline") else None
        self.units = Units(rank) if shares and job.strategy == "fsdp" else None
        self.by_hand = ByHand(rank) if shares and job.strategy in ("manual", "flat") else None

    def run(self) -> Waits:
        """The whole job."""
        rank, job = self.rank, self.rank.job
        batches = Batches(rank, self._queue)
        for step in range(job.warmup + job.recording.steps):
            rank.begin_step(step)
            name = f"ProfilerStep#{step - job.warmup + job.recording.first}"
            with rank.annotation(name):
                yield from self._step(step, batches)
        rank.end()
        yield from rank.wait(next(iter(rank.last()), None))

    def _step(self, step: int, batches: Batches) -> Waits:
        rank, job = self.rank, self.rank.job
        if job.stages > 1:
            yield from batches.draw()
            yield from pipeline_step(rank, self.reducer)
        else:
            for micro in range(job.microbatches):
                rank.micro = micro
                yield from batches.draw()
                yield from self._forward(micro)
                yield from self._metrics("backward")
                with rank.range("backward"):
                    yield from self._backward()
                if micro < job.microbatches - 1:
                    yield from self._metrics("batch")
        if self.by_hand is not None and not job.averages and not job.in_hooks:
            yield from self.by_hand.reduce()
        yield from self._optimizer()
        if self.by_hand is not None and job.averages:
            yield from self.by_hand.reduce()
        yield from self._metrics("step", "batch")
        if job.item_every and step % job.item_every == 0:
            yield from rank.item()
            rank.spend(30_000)
        for cause in job.struck("pause", rank.number):
            if (step + 1 - cause.offset) % cause.every == 0:
                self._pause(cause)

    def _metrics(self, *places: str) -> Waits:
        """``for value in metrics: dist.all_reduce(value)``, if it is to be in one of these places."""
        rank = self.rank
        for number in range(rank.job.metrics if rank.job.metrics_in in places else 0):
            rank.spend(rank.job.cpu.python_ns)
            label = f"metric{number}.{rank.micro}"
            work = yield from collective(rank, rank.communicators["world"], Issue("allreduce", 1, 4), label)
            rank.depend([work])
            if rank.job.metrics_read:
                yield from rank.item()

    def _pause(self, cause: Cause) -> None:
        rank = self.rank
        ns = cause.value * (1 + 0.1 * normal(rank.job.seed, rank.number, rank.step, cause.how))
        if cause.how == "log":
            rank.idle(ns)
            return
        with rank.range({"gc": "gc", "checkpoint": "save_checkpoint"}[cause.how]):
            rank.idle(ns)

    def _forward(self, micro: int) -> Waits:
        rank, job = self.rank, self.rank.job
        if self.reducer is not None:
            self.reducer.prepare(not job.no_sync or micro == job.microbatches - 1)
        if self.units is not None:
            self.units.begin()
        title = {"ddp": "DistributedDataParallel.forward", "fsdp": "FullyShardedDataParallel.forward"}
        with rank.range("forward"), rank.annotation(title.get(job.strategy, "Module.forward")):
            if self.reducer is not None:
                yield from self.reducer.send_buffers()
            for unit in range(job.model.blocks):
                if self.units is not None:
                    yield from self.units.forward(unit)
                    continue
                yield from layers.forward(rank, unit)
                yield from all_reduce_activations(rank, f"forward{unit}")
                yield from norm(rank, unit)
            yield from self._metrics("forward")
            if job.search_ns and job.strategy == "ddp":
                with rank.operator("torch.distributed.ddp.reducer::search_unused_parameters"):
                    rank.spend(job.search_ns)
        with rank.operator("aten::cross_entropy_loss"):
            rank.spend(job.cpu.operator_ns)
            yield from rank.kernel(_CROSS_ENTROPY, 8_000, "loss")
        for cause in job.struck("sync", rank.number):
            for _ in range(int(cause.value)):
                yield from rank.item()
                rank.spend(20_000)

    def _backward(self) -> Waits:
        rank, job = self.rank, self.rank.job
        rank.spend(15_000)
        rank.thread = "autograd"
        for unit in reversed(range(job.model.blocks)):
            if self.units is not None:
                yield from self.units.backward(unit)
                continue
            yield from norm(rank, unit, backward=True)
            for step in layers.backward(rank, unit):
                if not isinstance(step, int):
                    yield step
                elif self.reducer is not None:
                    yield from self.reducer.ready((unit, step))
                elif self.by_hand is not None and job.in_hooks:
                    yield from self.by_hand.reduce_one((unit, step))
            yield from all_reduce_activations(rank, f"backward{unit}")
        if self.reducer is not None:
            rank.depend(self.reducer.finish())
        if self.units is not None:
            rank.depend(self.units.finish())
        rank.thread = "main"
        rank.spend(10_000)

    def _optimizer(self) -> Waits:
        rank, job = self.rank, self.rank.job
        sizes = layers.parameters(job) * (job.model.blocks // job.stages)
        shard = 1 / job.replicas if job.strategy == "fsdp" else 1.0
        with rank.range("optimizer"), rank.annotation("Optimizer.step#AdamW.step"):
            if job.foreach:
                pieces = [("aten::_foreach_mul_", sum(sizes) / job.optimizer_kernels)] * job.optimizer_kernels
            else:
                each = job.optimizer_kernels
                pieces = [(name, size / each) for size in sizes for name in _LOOP[:each]]
            for number, (name, elements) in enumerate(pieces):
                rank.spend(job.cpu.python_ns)
                with rank.operator(name):
                    rank.spend(job.cpu.operator_ns)
                    yield from rank.kernel(_ADAM, 2_500 + 24 * elements * shard / 1_500, f"adam{number}")
        with rank.annotation("Optimizer.zero_grad#AdamW.zero_grad"):
            rank.spend(20_000)


def norm(rank: Rank, unit: int, *, backward: bool = False) -> Waits:
    """A batch normalization. Of a synchronized one statistics of all ranks are gathered in the forward, and two
    gradients summed in the backward.
    """
    job, width = rank.job, rank.job.model.width
    if not job.norms:
        return
    rank.spend(job.cpu.engine_ns if backward else job.cpu.python_ns)
    group, name = rank.communicators["world"], "SyncBatchNormBackward" if backward else "SyncBatchNorm"
    issue = Issue("allreduce", 2 * width, 4) if backward else Issue("_allgather_base", (2 * width + 1) * job.ranks, 4)
    with ExitStack() as stack:
        if backward:
            stack.enter_context(rank.operator(f"autograd::engine::evaluate_function: {name}"))
        stack.enter_context(rank.operator(name))
        yield from rank.kernel("batch_norm_collect_statistics", 10_000, f"norm{backward}{unit}.{rank.micro}")
        if job.norms == "synchronized":
            work = yield from collective(rank, group, issue, f"norm{backward}{unit}.{rank.micro}")
            rank.depend([work])
        yield from rank.kernel("batch_norm_transform_input", 10_000, f"normed{backward}{unit}.{rank.micro}")


def all_reduce_activations(rank: Rank, label: str) -> Waits:
    """Tensor parallel: after each block's forward and backward, and nothing goes on before."""
    group = rank.communicators.get("tensor")
    if group is None:
        return
    model = rank.job.model
    issue = Issue("allreduce", model.tokens // rank.job.microbatches * model.width, model.element_bytes)
    work = yield from collective(rank, group, issue, f"{label}.{rank.micro}")
    rank.depend([work])
