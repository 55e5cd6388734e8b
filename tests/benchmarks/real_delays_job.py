"""The job of ``real_delays.py``: ranks that compute next to nothing and sleep, one of them longer if that is planted.

What a rank would compute it sleeps instead, so a few cores carry several ranks that do not slow one another.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import perfscope

WIDTH = 16
MEASURED = 20
"""Steps of a case before its delay is planted."""
PLANTED = "planted_ms.json"
"""File of a recording: the delay."""
FORWARD_S, BACKWARD_S, LOADER_S, OPTIMIZER_S = 0.004, 0.008, 0.001, 0.002


class Work(torch.autograd.Function):
    """Sleeps in the forward and in the backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, forward_s: float, backward: Callable[[], float]) -> torch.Tensor:
        """``backward`` is asked how long the backward is to be."""
        context.backward = backward
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        """As long as was said."""
        time.sleep(context.backward())
        return gradients[0], None, None


class Layer(nn.Module):
    """A linear layer whose work is sleeping."""

    def __init__(self, plan: Plan, share: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.plan, self.share = plan, share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Next to nothing, then sleep."""
        forward_s = (FORWARD_S + self.plan.extra("forward")) * self.share
        # After the linear layer: what needs no gradient, as a batch, has no backward either.
        out = self.linear(x).tanh()
        slept: torch.Tensor = Work.apply(
            out, forward_s, lambda: (BACKWARD_S + self.plan.extra("backward")) * self.share
        )
        return slept


class Plan:
    """Who is slow, where and when."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.step = 0

    def extra(self, stage: str) -> float:
        """Seconds that this rank's stage takes longer in this step."""
        if stage != self.options.stage:
            return 0.0
        slow = {
            "steady": dist.get_rank() == self.options.rank,
            "intermittent": dist.get_rank() == self.options.rank and self.step * 7 % 10 < 3,
            "rotating": dist.get_rank() == self.step % dist.get_world_size(),
        }[self.options.pattern]
        return float(self.options.extra_ms) / 1000 if slow else 0.0

    def plant_share(self, step: Callable[[], None]) -> None:
        """Have the delay be a share of a step as it takes without one: ``step`` makes one."""
        extra_ms, self.options.extra_ms = self.options.extra_ms, 0.0
        took = []
        for _ in range(MEASURED):
            began = time.perf_counter()
            step()
            took.append(1000 * (time.perf_counter() - began))
        median_ms = torch.tensor(statistics.median(took))
        dist.all_reduce(median_ms, dist.ReduceOp.MAX)
        self.options.extra_ms = max(extra_ms, self.options.share * float(median_ms))


class Batches(torch.utils.data.Dataset[Any]):
    """A batch that takes a while to load."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, _: int) -> torch.Tensor:
        time.sleep(LOADER_S + self.plan.extra("dataloader"))
        return torch.ones(8, WIDTH)


def slow_step(kind: type[torch.optim.Optimizer], plan: Plan) -> type[torch.optim.Optimizer]:
    """An optimizer's class whose step sleeps."""

    class Slow(kind):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> Any:
            time.sleep(OPTIMIZER_S + plan.extra("optimizer"))
            return super().step(closure)

    return Slow


def train(options: argparse.Namespace) -> None:
    """One recording: the training of one case."""
    torch.manual_seed(0)
    plan = Plan(options)
    step = pipeline_step(plan) if options.strategy == "pipeline" else parallel_step(plan, options.strategy)
    batches = iter(torch.utils.data.DataLoader(Batches(plan), batch_size=None))
    plan.plant_share(lambda: step(next(batches)))
    dist.barrier()
    with perfscope.record(options.folder, sample_every=0, quiet=True, **options.record):
        for plan.step in range(options.steps):
            step(next(batches))
    dist.barrier()
    if dist.get_rank() == 0:
        Path(options.folder, PLANTED).write_text(json.dumps(options.extra_ms))


def main() -> None:
    """Train one case after the other: a JSON file holds the options of each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in json.loads(Path(sys.argv[1]).read_text()):
        train(argparse.Namespace(**case))
        gc.collect()  # a recording looks for models among all objects
    dist.destroy_process_group()


def parallel_step(plan: Plan, strategy: str) -> Callable[[torch.Tensor], None]:
    """A step of DDP, ZeRO-1 or FSDP2."""
    model: Any = nn.Sequential(*(Layer(plan, 0.25) for _ in range(4)))
    sgd = slow_step(torch.optim.SGD, plan)
    if strategy == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer: Any = sgd(model.parameters(), lr=0.01)
    else:
        model = nn.parallel.DistributedDataParallel(model)
        if strategy == "zero":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=sgd, lr=0.01)
        else:
            optimizer = sgd(model.parameters(), lr=0.01)

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def pipeline_step(plan: Plan) -> Callable[[torch.Tensor], None]:
    """A step of a 1F1B pipeline, a stage on each rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    batches = 4
    layer = Layer(plan, 1 / batches)
    stage = PipelineStage(layer, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, batches, loss_fn=lambda output, _: output.sum())
    optimizer = slow_step(torch.optim.SGD, plan)(layer.parameters(), lr=0.01)

    def step(batch: torch.Tensor) -> None:
        if rank == 0:
            schedule.step(batch)
        elif rank == size - 1:
            schedule.step(target=batch)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
