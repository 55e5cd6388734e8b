"""Train a small network data-parallel, with as much as is asked for planted in it, and a stopwatch of its own.

Plain user code: it knows nothing of the profiler. ``--plant KIND:SIZE:RANKS:EVERY:STEPS`` makes some ranks slower in
some steps, and may be given several times:

    load:150:all:1:0-99     the data set sleeps 150 ms in a batch, in the training process
    forward:150:1:1:8-15    rank 1 sleeps 150 ms in its forward in steps 8 to 15
    products:20:1:1:0-99    rank 1 computes 20 matrix products more in its forward
    collect:500:1:1:0-99    rank 1 collects garbage, with half a million objects alive, before it loads
    save:64:0:3:0-99        rank 0 saves 64 MB before every third step's load

RANKS is ``all``, one number, or ``turns``: rank k in step k, k + world, k + 2 world, ...

A step of the stopwatch lasts from the end of one optimizer step to the end of the next. Of each it keeps, in ms:
``step``, the whole; ``planted``, what was planted, as it took; ``load``, in the data loader; ``blocked``, inside the
backward while the thread neither ran nor stood in the kernel's queue for a core, so waited for the gradients' exchange;
``queued``, in that queue: what the machine's other work took away.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

QUEUE = Path("/proc/thread-self/schedstat")
"""Linux: CPU time and time in the queue of this thread, ns (Documentation/scheduler/sched-stats.rst)."""


class Stopwatch:
    """Milliseconds of each step, by what went on."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._restart()

    @property
    def step(self) -> int:
        """Number of the step under way."""
        return len(self.steps)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Wall time goes to ``name``."""
        began = time.perf_counter()
        yield
        self._current[name] += (time.perf_counter() - began) * 1e3

    @contextmanager
    def measure_blocked(self) -> Iterator[None]:
        """Wall time in which this thread neither ran nor stood in the queue goes to ``blocked``."""
        began, ran, queued = time.perf_counter(), time.thread_time(), queued_ms()
        yield
        awake = (time.thread_time() - ran) * 1e3 + queued_ms() - queued
        self._current["blocked"] += (time.perf_counter() - began) * 1e3 - awake

    def lap(self) -> None:
        """One step ends and the next begins; called from within ``optimizer.step()``, before anything around it."""
        whole = {"step": (time.perf_counter() - self._began) * 1e3, "queued": queued_ms() - self._queued}
        self.steps.append(whole | self._current)
        self._restart()

    def _restart(self) -> None:
        self._current = {"planted": 0.0, "load": 0.0, "blocked": 0.0}
        self._began, self._queued = time.perf_counter(), queued_ms()


def queued_ms() -> float:
    """How long this thread was ready to run and did not; 0 where the kernel does not record it."""
    return int(QUEUE.read_text().split()[1]) / 1e6 if QUEUE.exists() else 0.0


class Plant:
    """One planted cause; see the module's docstring."""

    def __init__(self, text: str) -> None:
        self.kind, size, self.ranks, every, steps = text.split(":")
        self.size, self.every = float(size), int(every)
        self.first, self.last = map(int, steps.split("-"))

    def strikes(self, step: int) -> bool:
        """This rank, in this step?"""
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = step % world == rank if self.ranks == "turns" else self.ranks in ("all", str(rank))
        return mine and self.first <= step <= self.last and step % self.every == 0


class Planted:
    """All that is planted, each at its place, and timed."""

    def __init__(self, plants: list[Plant], watch: Stopwatch, scratch: Path) -> None:
        self._plants, self._watch, self._scratch = plants, watch, scratch
        self._square = torch.randn(768, 768)
        self._alive: list[list[int]] = []
        self._state = torch.empty(0)
        for plant in plants:
            if plant.kind == "collect":
                gc.disable()  # collections are planned: none but ours
                self._alive = [[number] for number in range(int(plant.size * 1e3))]
            elif plant.kind == "save":
                self._state = torch.zeros(int(plant.size * 1e6 / 4))

    def strike(self, *kinds: str) -> None:
        """Planted causes of these kinds for this rank and this step."""
        for plant in self._plants:
            if plant.kind in kinds and plant.strikes(self._watch.step):
                with self._watch.measure("planted"):
                    self._strike(plant)

    def _strike(self, plant: Plant) -> None:
        if plant.kind in ("load", "forward"):
            time.sleep(plant.size / 1e3)
        elif plant.kind == "products":
            for _ in range(int(plant.size)):
                torch.mm(self._square, self._square)
        elif plant.kind == "collect":
            gc.collect()
        elif plant.kind == "save":
            torch.save({"state": self._state}, self._scratch / f"checkpoint-{dist.get_rank()}.pt")


class Samples(Dataset[Tensor]):
    """Vectors that are quickly made; the first of a batch takes what is planted in loading."""

    def __init__(self, length: int, width: int, batch: int, planted: Planted) -> None:
        self.length, self.width, self.batch, self.planted = length, width, batch, planted
        self.drawn = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if self.drawn % self.batch == 0:
            self.planted.strike("load")
        self.drawn += 1
        return torch.full((self.width,), float(index % 17))


class Network(nn.Module):
    """Residual blocks of several inner widths, so of several sizes of gradients; the forward's plants come first."""

    def __init__(self, blocks: int, width: int, planted: Planted) -> None:
        super().__init__()
        self.planted = planted
        inner = [width >> (index % 3) for index in range(blocks)]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, narrow), nn.Tanh(), nn.Linear(narrow, width)) for narrow in inner
        )

    def forward(self, x: Tensor) -> Tensor:
        self.planted.strike("forward", "products")
        for block in self.blocks:
            x = x + block(x)
        return x


def train(options: argparse.Namespace) -> Stopwatch:
    watch = Stopwatch()
    planted = Planted([Plant(text) for text in options.plant], watch, options.truth.parent)
    torch.manual_seed(0)
    network = Network(options.blocks, options.width, planted)
    model = DistributedDataParallel(network, bucket_cap_mb=options.bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: watch.lap())
    length = options.steps * options.accumulate * options.batch * dist.get_world_size()
    data = Samples(length, options.width, options.batch, planted)
    batches = iter(DataLoader(data, options.batch, sampler=DistributedSampler(data)))
    for _ in range(options.steps):
        planted.strike("collect", "save")
        for micro in range(options.accumulate):
            with watch.measure("load"):
                x = next(batches)
            exchanged = micro == options.accumulate - 1 or not options.no_sync
            with nullcontext() if exchanged else model.no_sync():
                loss = model(x).square().mean()
                with watch.measure_blocked():
                    loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return watch


def write_truth(path: Path, options: argparse.Namespace, watch: Stopwatch) -> None:
    """Gather every rank's stopwatch and let rank 0 write them down beside what was asked for."""
    everyone: list[list[dict[str, float]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, watch.steps)
    if dist.get_rank() == 0:
        asked = {name: value for name, value in vars(options).items() if name != "truth"}
        path.write_text(json.dumps({"asked": asked, "ranks": everyone}), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True, help="file for this script's own timings; scratch beside")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256, help="samples per rank and micro-batch")
    parser.add_argument("--plant", action="append", default=[], metavar="KIND:SIZE:RANKS:EVERY:STEPS")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--no-sync", action="store_true", help="exchange gradients after the last micro-batch only")
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo")
    try:
        write_truth(options.truth, options, train(options))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
