"""The training that ``whatif_real.py`` records and then changes: plain user code with a stopwatch of its own.

Every ``--setup`` is one way of running it, as JSON of the fields of ``Setup`` that differ from their defaults. They
take turns, ``--steps`` optimizer steps each, ``--rounds`` times, in the same processes; so what else the machine does
meets all of them. A step of the stopwatch lasts from the end of one optimizer step to the end of the next. The first
steps of each turn are left out: workers deliver what they had loaded before it, and DDP finds its buckets.
"""

# No ``from __future__ import annotations``: DDP looks at the types that a communication hook is annotated with.
import argparse
import faulthandler
import json
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from tests.real.network import BURST_BYTES, QUEUE_BYTES

SETTLING = 8
"""Steps at the begin of a turn that do not count: two workers have four batches ready, and load on meanwhile."""
_PRODUCT = 256
"""Side of the matrices that a dataset multiplies to keep a core busy."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way of running the training."""

    strategy: str = "ddp"
    """``ddp``; the same with ``ZeroRedundancyOptimizer``: ``zero1``; FSDP: ``full_shard``, ``shard_grad_op``; or no
    wrapper, and after the backward an all-reduce of each gradient (``by_hand``) or of all in one tensor (``flat``)."""
    blocks: int = 4
    width: int = 512
    threads: int = 1
    """That operators are spread over, as OMP_NUM_THREADS would have it."""
    batch: int = 64
    bucket_mb: float = 25.0
    bf16_hook: bool = False
    accumulate: int = 1
    no_sync: bool = False
    checkpoint: int = 0
    """So many of the blocks have their activations computed again in the backward."""
    reentrant: bool = False
    """They are reentrant checkpoints."""
    slow_ms: float = 0.0
    """Rank 1 sleeps this long in its forward."""
    workers: int = 0
    load_sleep_ms: float = 0.0
    """A batch takes this long to load, asleep: as from a remote disk."""
    load_products: int = 0
    """A batch takes this many matrix products to load: as decoding does."""
    megabits: float | None = None
    """Of the link; None: not throttled."""


def half_the_bytes(
    state: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # exported behind an if
) -> torch.futures.Future[Tensor]:
    """torch's hook under another name: DDP refuses its own with gloo, whose all-reduce takes bfloat16 all the same."""
    return bf16_compress_hook(state, bucket)


class Batches(Dataset[Tensor]):
    """Items are whole batches, and each takes its time."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Tensor:
        if self.setup.load_sleep_ms:
            time.sleep(self.setup.load_sleep_ms / 1e3)
        square = torch.ones(_PRODUCT, _PRODUCT)
        for _ in range(self.setup.load_products):
            square = torch.mm(square, square).clamp_(max=1.0)
        return torch.full((self.setup.batch, self.setup.width), float(index % 17))


class Block(nn.Module):
    """Two layers with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.inner(x)
        return x + changed


class Network(nn.Module):
    """Blocks; one rank may be slow."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.slow_s = setup.slow_ms / 1e3 if dist.get_rank() == 1 else 0.0
        self.blocks = nn.Sequential(*(Block(setup.width) for _ in range(setup.blocks)))
        self.again, self.reentrant = setup.checkpoint, setup.reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.slow_s:
            time.sleep(self.slow_s)
        x.requires_grad_(self.reentrant)  # or the first block's checkpoint would compute no gradients
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=self.reentrant) if number < self.again else block(x)
        return x


class Training:
    """One setup, ready to take its turns."""

    def __init__(self, setup: Setup) -> None:
        torch.manual_seed(0)
        self.setup = setup
        self.model = _wrapped(Network(setup), setup)
        self.optimizer = _optimizer(self.model, setup)
        self.batches: Iterator[Tensor] = iter(DataLoader(Batches(setup), batch_size=None, num_workers=setup.workers))

    def turn(self, steps: int) -> list[float]:
        """Train; how long each step took, ms."""
        if self.setup.megabits is not None:
            self._throttle(self.setup.megabits)
        torch.set_num_threads(self.setup.threads)
        took = []
        began = time.perf_counter()
        for _ in range(steps):
            self._step()
            now = time.perf_counter()
            took.append((now - began) * 1e3)
            began = now
        return took[SETTLING:]

    def _step(self) -> None:
        for micro in range(self.setup.accumulate):
            x = next(self.batches)
            held = self.setup.no_sync and micro < self.setup.accumulate - 1
            with self.model.no_sync() if held else nullcontext():
                self.model(x).square().mean().backward()
        if self.setup.strategy == "by_hand":
            self._reduce_each()
        if self.setup.strategy == "flat":
            self._reduce_flat()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _reduce_each(self) -> None:
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    def _reduce_flat(self) -> None:
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        flat = torch._utils._flatten_dense_tensors(grads)
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        torch._foreach_copy_(grads, torch._utils._unflatten_dense_tensors(flat, grads))

    @staticmethod
    def _throttle(megabits: float) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            rate = f"rate {megabits:g}mbit burst {BURST_BYTES} limit {QUEUE_BYTES}"
            subprocess.run(shlex.split(f"tc qdisc change dev lo root tbf {rate}"), check=True)
        dist.barrier()


def _wrapped(network: nn.Module, setup: Setup) -> nn.Module:
    if setup.strategy in ("by_hand", "flat"):
        return network
    if setup.strategy in ("ddp", "zero1"):
        model = DistributedDataParallel(network, bucket_cap_mb=setup.bucket_mb)
        if setup.bf16_hook:
            model.register_comm_hook(None, half_the_bytes)
        return model
    return FullyShardedDataParallel(
        network,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[setup.strategy.upper()],
        device_id=torch.device("cpu"),
    )


def _optimizer(model: nn.Module, setup: Setup) -> torch.optim.Optimizer:
    if setup.strategy == "zero1":
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=1e-4)
    return torch.optim.SGD(model.parameters(), lr=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="append", required=True, type=lambda text: Setup(**json.loads(text)))
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="[setup][round][rank][step], ms, as JSON")
    options = parser.parse_args()
    faulthandler.register(signal.SIGTERM, chain=True)  # a run that hangs shows where
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainings = [Training(setup) for setup in options.setup]
    found: list[list[list[list[float]]]] = [[] for _ in trainings]
    for _ in range(options.rounds):
        for turns, training in zip(found, trainings, strict=True):
            everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(everyone, training.turn(options.steps))
            turns.append(everyone)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    # On busy cores one of gloo's threads may still hold the last gathering, which it lets go of with the interpreter;
    # tearing the group down, with the interpreter, would wait for that thread forever.
    time.sleep(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
