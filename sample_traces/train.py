"""Train a small transformer language model on synthetic text, data-parallel over the ranks that the launcher starts.

Plain user code: it knows nothing of the profiler. It can be made slow on purpose, in ways whose size is known
(``--load-ms``, ``--slow-rank`` with ``--slow-ms``), and it keeps its own stopwatch (``--truth``), so that what a
profiler says about it can be checked against something the profiler did not measure.

    torchrun --nproc-per-node 2 train.py --steps 40
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

VOCABULARY = 256
CONTEXT = 128
PHASES = ("load", "forward", "backward", "optimizer")


class SyntheticText(Dataset[Tensor]):
    """Sequences in which each token follows from the one before by the sequence's own rule: there is a lot to learn.

    ``load_seconds`` is slept in every sample, as a decoder or a remote disk would take its time.
    """

    def __init__(self, length: int, seed: int, load_seconds: float) -> None:
        self.length, self.seed, self.load_seconds = length, seed, load_seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if self.load_seconds:
            time.sleep(self.load_seconds)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        start, stride = torch.randint(0, VOCABULARY, (2,), generator=generator).tolist()
        return (start + (stride % 7 + 1) * torch.arange(CONTEXT + 1)) % VOCABULARY


class Block(nn.Module):
    """One pre-norm transformer layer with causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class LanguageModel(nn.Module):
    """Tokens (batch, context) to logits (batch, context, vocabulary). Sleeps ``stall_seconds`` before each forward."""

    def __init__(self, layers: int, width: int, stall_seconds: float) -> None:
        super().__init__()
        self.stall_seconds = stall_seconds
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads=max(1, width // 64)) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.stall_seconds:
            time.sleep(self.stall_seconds)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


class Stopwatch:
    """Host wall time in ms of each phase, one entry per step."""

    def __init__(self) -> None:
        self.phase_ms: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.step_ms: list[float] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.phase_ms[name].append(round((time.perf_counter() - started) * 1e3, 3))

    @contextmanager
    def step(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.step_ms.append(round((time.perf_counter() - started) * 1e3, 3))


def train(options: argparse.Namespace, device: torch.device) -> Stopwatch:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    stall = options.slow_ms / 1e3 if rank == options.slow_rank else 0.0
    model = DistributedDataParallel(LanguageModel(options.layers, options.width, stall).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    dataset = SyntheticText(options.steps * options.batch * world, options.seed, options.load_ms / 1e3 / options.batch)
    sampler = DistributedSampler(dataset, seed=options.seed)
    loader = DataLoader(
        dataset, options.batch, sampler=sampler, num_workers=options.workers, pin_memory=device.type == "cuda"
    )

    watch = Stopwatch()
    batches = iter(loader)
    for step in range(options.steps):
        with watch.step():
            with watch.phase("load"):
                tokens = next(batches).to(device, non_blocking=True)
            with watch.phase("forward"):
                logits = model(tokens[:, :-1])
                loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            with watch.phase("backward"):
                loss.backward()
            with watch.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:4d}  loss {loss.item():.3f}  {watch.step_ms[-1]:.0f} ms", flush=True)
    return watch


def write_truth(path: Path, options: argparse.Namespace, watch: Stopwatch) -> None:
    """Gather every rank's stopwatch and let rank 0 write them down beside what was planted."""
    mine = {"rank": dist.get_rank(), "step_ms": watch.step_ms, **{f"{k}_ms": v for k, v in watch.phase_ms.items()}}
    everyone: list[dict[str, object]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        planted = {name: getattr(options, name) for name in ("load_ms", "workers", "slow_rank", "slow_ms")}
        truth = {"planted": planted, "ranks": everyone}
        path.write_text(json.dumps(truth) + "\n", encoding="utf-8")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16, help="sequences per rank and step")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="DataLoader worker processes per rank")
    parser.add_argument("--load-ms", type=float, default=0.0, help="planted: sleep while loading, per batch")
    parser.add_argument("--slow-rank", type=int, help="planted: this rank sleeps --slow-ms in every forward")
    parser.add_argument("--slow-ms", type=float, default=0.0)
    parser.add_argument("--truth", type=Path, metavar="FILE", help="write this script's own timings, as JSON")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        # Ranks on one host would otherwise fight for its cores with as many threads each.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        watch = train(options, device)
        if options.truth:
            write_truth(options.truth, options, watch)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
