"""The job that ``overhead.py`` runs under ``perfscope run``: the same training steps in turn, in short blocks.

All contenders share one process (or pair of ranks), its memory and its model, so that nothing differs between them but
what is measured::

    bare, bare again   the optimizer as torch made it: the collector sees no step
    waiting            as ``perfscope run`` leaves it outside captures
    always-on          the same with the phases timed, as with ``--steps-only`` and ``--trigger``
    by hand            ``torch.profiler`` with the settings that ``perfscope run`` uses, its recorded steps only
    recording          a capture's recorded steps
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, TensorDataset

from perfscope.recording.history import STAGES

OPTIMIZER = STAGES.index("optimizer")

WARMUP, ACTIVE = 3, 8
"""Of ``perfscope run``, whose last warm-up step is recorded too."""

PROFILED = ("by hand", "recording")
PROFILED_EVERY = 5
"""Rounds after which these have a turn: starting and stopping a profiler takes as long as many blocks."""

Sample = tuple[int, int]
"""Wall and CPU time of one step on the training thread, ns."""


class Nothing(torch.optim.Optimizer):
    """An optimizer whose step does nothing: what remains is what surrounds it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def unhooked(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """An optimizer's class that is hooked by torch alone. Made before any optimizer of that class is."""
    assert not getattr(kind.step, "hooked", False)
    torch_own = torch.optim.Optimizer.profile_hook_step
    while hasattr(torch_own, "__wrapped__"):
        torch_own = torch_own.__wrapped__
    step: Any = torch_own(kind.step)
    step.hooked = True
    return type(f"Bare{kind.__name__}", (kind,), {"step": step})


class Small(nn.Module):
    """A model whose step is next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One multiplication."""
        return x * self.factor


class Job:
    """The training, and the collector that this process runs under."""

    def __init__(self, layers: int, steps: int) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        model: Any = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.distributed = "RANK" in os.environ
        if self.distributed:
            dist.init_process_group("gloo")
            model = nn.parallel.DistributedDataParallel(model)
        self.model = model
        torch.optim.Adagrad(model.parameters())  # the first optimizer of a process has the collector made
        self.bare = unhooked(torch.optim.SGD)(model.parameters(), lr=1e-4)
        self.hooked = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.nothing = unhooked(Nothing)
        self.steps = steps
        self._data = DataLoader(TensorDataset(torch.randn(4096, 32, 64)), batch_size=8, drop_last=True)
        self._batches = iter(self._data)
        for _ in range(12):
            self.step(self.hooked)
        # Type-checked code has no business there; a benchmark of it has.
        self.session: Any = importlib.import_module("perfscope.collectors.capture.session").attached()._session
        self.discover: Callable[..., Any] = importlib.import_module("perfscope.collectors.discovery").discover

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One training step."""
        try:
            (x,) = next(self._batches)
        except StopIteration:
            self._batches = iter(self._data)
            (x,) = next(self._batches)
        self.model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def timed(self, optimizer: torch.optim.Optimizer, after: Callable[[], object] = lambda: None) -> Sample:
        """The time of one step, ``after`` it included."""
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        self.step(optimizer)
        after()
        return time.perf_counter_ns() - wall, time.thread_time_ns() - cpu

    def block(self, optimizer: torch.optim.Optimizer) -> list[Sample]:
        """A block of steps, after one that is not counted."""
        self.step(optimizer)
        return [self.timed(optimizer) for _ in range(self.steps)]

    def always_on(self) -> list[Sample]:
        """A block with the phases timed."""
        with self.timing([self.hooked]):
            return self.block(self.hooked)

    @contextmanager
    def timing(self, optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
        """The phases and waits of these optimizers' models are timed, as with ``--steps-only``."""
        watch = self.session._watch
        phases, clock, objects = watch._phases, watch._clock, self.discover(optimizers)
        phases.attach(clock)
        phases.patch(objects.to_hook())
        phases.settle(objects.to_hook({id(root) for root in objects.roots}))
        watch._waits.install(objects)
        watch._pace.core.begin()
        try:
            yield
        finally:
            watch._pace.core.end()
            watch._waits.remove()
            phases.detach(clock)
            phases.attach(clock, (OPTIMIZER,))

    def small_step_us(self, name: str, count: int = 300) -> float:
        """CPU time of a whole step that computes next to nothing, µs: bare, or as a training step of that contender."""
        kind = self.nothing if name == "bare" else Nothing
        model: Any = Small()
        if self.distributed:
            model = nn.parallel.DistributedDataParallel(model)
        optimizer = kind(model.parameters())
        x = torch.ones(1)

        def steps() -> float:
            begin = time.thread_time_ns()
            for _ in range(count):
                next(self._small)
                model(x).backward()
                optimizer.step()
            return (time.thread_time_ns() - begin) / count / 1000

        self._small = iter(DataLoader(TensorDataset(torch.ones(4 * count))))
        with self.timing([optimizer]) if name == "always-on" else nullcontext():
            return min(steps(), steps())

    def by_hand(self) -> list[Sample]:
        """The recorded steps of a profiler as the script would use it."""
        plan = schedule(wait=0, warmup=WARMUP - 1, active=ACTIVE + 1, repeat=1)
        with profile(activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True) as profiler:
            for _ in range(WARMUP):
                self.timed(self.bare, profiler.step)
            # The last step's end is the profiler's: it is left out, here and of the captures.
            return [self.timed(self.bare, profiler.step) for _ in range(ACTIVE - 1)]

    def recording(self) -> list[Sample]:
        """The recorded steps of a capture, agreed upon as ranks do."""
        plan = importlib.import_module("perfscope.collectors.agreement").CapturePlan
        capturer = self.session._capturer
        start = self.session._detector.completed + 1
        capturer.schedule.agree(plan(start, start, ACTIVE, 0, "benchmark"))
        for _ in range(1 + WARMUP):
            self.timed(self.hooked)
        samples = [self.timed(self.hooked) for _ in range(ACTIVE - 1)]
        self.step(self.hooked)
        while capturer.busy:
            time.sleep(0.01)
        assert self.session._run_file.captures[-1].reason == "benchmark"
        for file in self.session._config.folder.glob("*.trace.json*"):
            file.unlink(missing_ok=True)
        return samples


def alone_us(kind: type[torch.optim.Optimizer], count: int = 500) -> float:
    """CPU time of an optimizer's step that does nothing itself, µs."""
    optimizer = kind([nn.Parameter(torch.zeros(1))])
    for _ in range(count // 10):
        optimizer.step()
    begin = time.thread_time_ns()
    for _ in range(count):
        optimizer.step()
    return (time.thread_time_ns() - begin) / count / 1000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    job = Job(options.layers, options.steps)
    contenders: dict[str, Callable[[], list[Sample]]] = {
        "bare": lambda: job.block(job.bare),
        "waiting": lambda: job.block(job.hooked),
        "bare again": lambda: job.block(job.bare),
        "always-on": job.always_on,
        "by hand": job.by_hand,
        "recording": job.recording,
    }
    found: dict[str, list[list[Sample]]] = {name: [] for name in contenders}
    for turn in range(options.rounds):
        names = [name for name in contenders if name not in PROFILED or turn % PROFILED_EVERY == 0]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if job.distributed:
                dist.barrier()
            found[name].append(contenders[name]())
    small: dict[str, list[float]] = {"bare": [], "waiting": [], "always-on": []}
    for _ in range(40):
        for name, blocks in small.items():
            blocks.append(job.small_step_us(name))
    alone: dict[str, list[float]] = {"torch": [], "perfscope": []}
    for _ in range(40):
        alone["torch"].append(alone_us(job.nothing))
        alone["perfscope"].append(alone_us(Nothing))
    if int(os.environ.get("RANK", "0")) == 0:
        options.output.write_text(json.dumps({"blocks": found, "alone_us": alone, "small_us": small}))
    if job.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
