"""The training that the acceptance run records and changes: plain user code that keeps its own books.

Every ``--setup`` is one way of running it, as JSON of the fields of ``Setup`` that differ from their defaults. They
take turns in one process, ``--steps`` optimizer steps each, ``--rounds`` times, so that what else the machine does and
how warm the device is meets all of them. What is kept, per turn: the time of each step between two CUDA events on the
stream that trains (on a CPU: the host's clock), the whole turn by the host's clock with a synchronisation at both ends,
losses, the allocator's peaks, recompilations; once per setup: FLOPs by torch's counter and by hand.
"""

# No ``from __future__ import annotations``: torch looks at annotations at run time in places.
import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from tests.gpu.models import VOCABULARY, by_hand, network
from tests.gpu.setups import Setup
from tests.gpu.strategies import autocast, engine, loss_of

SETTLING = 4
"""Steps at the begin of a turn that do not count: loader workers have batches ready, the device speeds up."""


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Items are whole batches, made beforehand in shared memory: nothing but ``load_ms`` takes time."""

    MADE = 4

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.made = [self._make(torch.Generator().manual_seed(index)) for index in range(self.MADE)]

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.setup.load_ms:
            time.sleep(self.setup.load_ms / 1e3)
        return self.made[index % self.MADE]

    def _make(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        setup = self.setup
        if setup.model == "conv":
            images = torch.rand(setup.batch, 3, setup.context, setup.context, generator=generator)
            return images.share_memory_(), torch.randint(10, (setup.batch,), generator=generator).share_memory_()
        tokens = torch.randint(VOCABULARY, (setup.batch, setup.context + 1), generator=generator)
        return tokens[:, :-1].contiguous().share_memory_(), tokens[:, 1:].contiguous().share_memory_()


class Clock:
    """The end of every step: CUDA events on the stream that trains, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        self.ends: list[Any] = []

    def mark(self) -> None:
        if not self.on_device:
            self.ends.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.ends.append(event)

    def steps_ms(self) -> list[float]:
        """Time of each step but the first; waits for the device."""
        if not self.on_device:
            return [(b - a) * 1e3 for a, b in zip(self.ends, self.ends[1:], strict=False)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(self.ends, self.ends[1:], strict=False)]


class Training:
    """One setup, ready to take its turns."""

    def __init__(self, setup: Setup, device: torch.device) -> None:
        torch.manual_seed(0)
        self.setup, self.device = setup, device
        self.data = Batches(setup)
        model = network(setup).to(device)
        if setup.channels_last:
            model = model.to(memory_format=torch.channels_last)
        self.flops = self._counted(model) if setup.count_flops else 0
        self.engine = engine(model, setup, device, self.data[0][0])
        loader = DataLoader(
            self.data, batch_size=None, num_workers=setup.workers, pin_memory=setup.pinned,
            persistent_workers=bool(setup.workers),
        )  # fmt: skip
        self.batches: Iterator[Any] = iter(loader)
        self.stream = torch.cuda.Stream() if setup.side_stream and device.type == "cuda" else None
        self.losses: list[Tensor] = []

    def turn(self, steps: int, after_step: Callable[[], None] | None = None) -> dict[str, Any]:
        """Train; what was measured."""
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.setup.precision == "tf32"
        self.losses, clock = [], Clock(self.device)
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            _synchronize(self.device)
            began = time.perf_counter()
            for number in range(steps):
                if number == SETTLING:
                    _synchronize(self.device)
                    began = time.perf_counter()
                self._step(number)
                clock.mark()
                if after_step:
                    after_step()
            _synchronize(self.device)
        took = (time.perf_counter() - began) * 1e3 / max(steps - SETTLING, 1)
        return {"step_ms": took, "steps_ms": clock.steps_ms(), "losses": [float(loss) for loss in self.losses]}

    def _step(self, number: int) -> None:
        setup = self.setup
        if setup.slow_ms and _rank() == 1:
            time.sleep(setup.slow_ms / 1e3)
        inputs, targets = (part.to(self.device, non_blocking=setup.pinned) for part in next(self.batches))
        if setup.channels_last:
            inputs = inputs.to(memory_format=torch.channels_last)
        if number == setup.oom_at:
            self._too_much()
        self.losses.append(self.engine.step(inputs, targets).detach())

    def _too_much(self) -> None:
        """More memory than there is, as users meet it."""
        try:
            torch.empty(1 << 50, dtype=torch.uint8, device=self.device)
        except RuntimeError:  # torch.OutOfMemoryError is one
            if not self.setup.oom_caught:
                raise
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _counted(self, model: nn.Module) -> int:
        """FLOPs of one forward and backward, by torch's own counter; recomputation counts where there is any."""
        inputs, targets = (part.to(self.device) for part in self.data[0])
        with FlopCounterMode(display=False) as counter, autocast(self.setup, self.device):
            loss_of(model(inputs), targets).backward()
        model.zero_grad()
        return int(counter.get_total_flops())


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _device(wanted: str, *, shared: bool) -> torch.device:
    if wanted == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    index = 0 if shared else int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _own_profiler(kind: str, folder: Path) -> Any:
    """The script's own torch.profiler, with the settings that ``perfscope run`` uses; or none."""
    if not kind:
        return None
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    wait, warmup, active = (int(part) for part in kind.split(","))
    return profile(
        activities=activities, schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
        record_shapes=True, on_trace_ready=lambda own: own.export_chrome_trace(str(folder / f"own-{_rank()}.json")),
    )  # fmt: skip


def _peaks(device: torch.device) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    return {
        "allocated": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device),
    }  # fmt: skip


def _recompilations() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": sum(counters["graph_break"].values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="append", required=True, type=lambda text: Setup(**json.loads(text)))
    parser.add_argument("--steps", type=int, default=30, help="of a turn")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backend", default="", help="of torch.distributed; none without torchrun")
    parser.add_argument("--share", action="store_true", help="all ranks on the first device")
    parser.add_argument("--deterministic", action="store_true", help="the same losses every time")
    parser.add_argument("--own-profiler", default="", metavar="WAIT,WARMUP,ACTIVE")
    parser.add_argument("--take-cupti", action="store_true", help="subscribe to CUPTI first, as another tool would")
    parser.add_argument("--out", type=Path, required=True, help="what was measured, as JSON; one file per rank")
    options = parser.parse_args()
    device = _device(options.device, shared=options.share)
    if options.deterministic:
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
    if options.take_cupti:
        from tests.gpu import cupti

        cupti.subscribe()
    if options.backend:
        dist.init_process_group(options.backend)
    trainings = [Training(setup, device) for setup in options.setup]
    turns: list[list[dict[str, Any]]] = [[] for _ in trainings]
    own = _own_profiler(options.own_profiler, options.out.parent)
    with own or nullcontext():
        for _ in range(options.rounds):
            for found, training in zip(turns, trainings, strict=True):
                found.append(training.turn(options.steps, own.step if own else None))
    truth = {
        "setups": [asdict(setup) for setup in options.setup], "turns": turns, "memory": _peaks(device),
        "flops": [training.flops for training in trainings], "compiled": _recompilations(),
        "flops_by_hand": [by_hand(setup) for setup in options.setup], "pid": os.getpid(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }  # fmt: skip
    options.out.with_suffix(f".{_rank()}.json").write_text(json.dumps(truth), encoding="utf-8")
    if options.backend:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
