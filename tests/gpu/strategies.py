"""How the acceptance run's training computes a step: plainly, wrapped, with DeepSpeed, or as a stage of a pipeline."""

# No ``from __future__ import annotations``: torch looks at annotations at run time in places.
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.gpu.models import Network, stage_of
from tests.gpu.setups import Setup

MICROBATCHES = 4
"""Of a pipeline's step."""


class Engine(Protocol):
    """Computes steps."""

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward and the optimizer; the loss."""


def engine(model: Network, setup: Setup, device: torch.device, sample: Tensor) -> Engine:
    """That of the setup's strategy. ``sample`` is an input."""
    if setup.strategy == "zero2":
        return ZeroTwo(model, setup)
    if setup.strategy == "pipeline":
        return Stage(model, setup, device)
    return Plain(model, setup, device, sample)


def autocast(setup: Setup, device: torch.device) -> AbstractContextManager[Any]:
    """The setup's precision, around a forward."""
    return torch.autocast(device.type, torch.bfloat16) if setup.precision == "bf16" else nullcontext()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of a batch or a micro-batch."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Plain:
    """One process, DistributedDataParallel or FSDP2."""

    def __init__(self, model: Network, setup: Setup, device: torch.device, sample: Tensor) -> None:
        self.setup, self.device = setup, device
        wrapped: Any = _wrapped(model, setup)
        if setup.graph and device.type == "cuda":
            wrapped = torch.cuda.make_graphed_callables(wrapped, (sample.to(device),))
        if setup.compile:
            wrapped = torch.compile(wrapped, mode=None if setup.compile == "default" else setup.compile)
        self.model = wrapped
        self.optimizer = _optimizer(model, setup)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast(self.setup, self.device):
            loss = loss_of(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        # Graphs write gradients where they were when they were captured.
        self.optimizer.zero_grad(set_to_none=not self.setup.graph)
        return loss


class ZeroTwo:
    """DeepSpeed's stage 2."""

    def __init__(self, model: Network, setup: Setup) -> None:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": setup.batch,
            "bf16": {"enabled": setup.precision == "bf16"},
            "zero_optimization": {"stage": 2, "overlap_comm": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(self.engine(inputs), targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss


class Stage:
    """A stage of a pipeline that runs one forward, one backward in turn."""

    def __init__(self, model: Network, setup: Setup, device: torch.device) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.rank, self.ranks, self.device = dist.get_rank(), dist.get_world_size(), device
        module = stage_of(model, self.rank, self.ranks)
        stage = PipelineStage(module, self.rank, self.ranks, device)
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
        self.optimizer = _optimizer(module, setup)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        last = {"target": targets, "losses": losses} if self.rank == self.ranks - 1 else {}
        self.schedule.step(*((inputs,) if self.rank == 0 else ()), **last)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else torch.zeros((), device=self.device)


def _wrapped(model: Network, setup: Setup) -> nn.Module:
    if setup.strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if setup.strategy == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def _optimizer(model: nn.Module, setup: Setup) -> torch.optim.Optimizer:
    how: dict[str, Any] = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **how[setup.optimizer])
