"""What the training thread waits for other ranks: counted in the stage it falls into, and nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perfscope.analyzers.history.rank_history import _columns
from perfscope.collectors.capture import history as history_module
from perfscope.collectors.capture.history import StepHistory, StepTimer
from perfscope.collectors.discovery import JobObjects
from perfscope.collectors.phases import clock as clock_module
from perfscope.collectors.phases import core
from perfscope.collectors.phases import waits as waits_module
from perfscope.collectors.phases.clock import BACKWARD, FORWARD, PhaseClock
from perfscope.collectors.phases.waits import RankWaits
from perfscope.recording.history import WAITS, PackedBlock, unpack
from tests.collectors.harness import needs_torch

pytestmark = needs_torch

OTHER = WAITS.index("other")


@pytest.fixture
def dist(tmp_path: Path) -> Any:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


def test_a_collective_counts_where_it_is_waited_for(dist: Any) -> None:
    import torch

    clock, before = PhaseClock(), vars(dist.Work)["wait"]
    waits = RankWaits(clock)
    assert waits.install(JobObjects())
    clock.begin(FORWARD)
    dist.all_reduce(torch.ones(1))
    clock.end(FORWARD)
    dist.barrier()
    _, waited = clock.take()
    assert waited[FORWARD] > 0
    assert waited[OTHER] > 0
    assert sum(map(bool, waited)) == 2
    waits.remove()
    assert vars(dist.Work)["wait"] is before
    dist.barrier()
    assert clock.take()[1] == [0] * len(WAITS)


def test_a_work_in_python_that_leaves_waiting_to_torch_does_so_once(dist: Any) -> None:
    """pybind11 would call the replacement from within the original, without end, were it not named alike."""
    waits = RankWaits(PhaseClock())
    waits.install(JobObjects())

    class Mine(dist.Work):
        pass

    try:
        with pytest.raises(RuntimeError):  # as without the replacement: there is nothing to wait for
            Mine().wait(timedelta(milliseconds=10))
    finally:
        waits.remove()


def test_ddp_waits_from_its_last_gradient_on(dist: Any) -> None:
    import torch
    from torch import nn

    clock = PhaseClock()
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    seen = []

    class Sleeps(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(_: Any, *gradients: Any) -> Any:
            time.sleep(0.02)
            return gradients[0]

    waits = RankWaits(clock)
    waits.install(JobObjects(roots=[model], modules=list(model.modules())))
    for _ in range(3):
        loss = model(Sleeps.apply(torch.ones(2, 8, requires_grad=True))).sum()
        clock.begin(BACKWARD)
        loss.backward()
        clock.end(BACKWARD)
        stages, waited = clock.take()
        seen.append((stages[BACKWARD], waited[BACKWARD]))
    waits.remove()
    assert all(0 < waited < took - 15_000_000 for took, waited in seen), seen
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_without_other_ranks_nothing_is_replaced() -> None:
    assert not RankWaits(PhaseClock()).install(JobObjects())


def test_waiting_for_a_core_is_counted_where_the_kernel_does() -> None:
    waits = core.CoreWaits()
    assert waits.since() == 0
    waits.begin()
    assert waits.since() >= 0
    waits.end()
    waits.end()
    assert waits.since() == 0


class Kernel:
    """The kernel's count of one thread's waits, in a file that stands for its own."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.waited, self.reads = path, 5_000_000, 0
        monkeypatch.setattr(core, "_FILE", str(path))
        monkeypatch.setattr(core.os, "pread", self._pread)
        self.path.touch()

    def _pread(self, _file: int, _count: int, _offset: int) -> bytes:
        self.reads += 1
        return f"123 {self.waited} 7\n".encode()


def test_core_waits_are_asked_for_where_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 10 ms: 40 quiet ones, 10 that wait for 4 ms of 14, 39 quiet ones, 16 that wait and are no longer.

    Of the quiet ones those after 1, 3, 7, 7, ... are asked about.
    """
    kernel = Kernel(tmp_path / "schedstat", monkeypatch)
    waits = core.CoreWaits()
    waits.begin()
    kernel.reads = 0

    def steps(count: int, duration_ms: int, wait_ms: int) -> list[int]:
        seen = []
        for _ in range(count):
            kernel.waited += wait_ms * 1_000_000
            seen.append(waits.of_step(duration_ms * 1_000_000) // 1_000_000)
        return seen

    assert steps(40, 10, 0) == [0] * 40
    assert kernel.reads == 7
    assert steps(10, 14, 4) == [4] * 10
    assert steps(39, 10, 0) == [0] * 39
    assert kernel.reads == 7 + 10 + 7
    # Waiting that makes no step longer is noticed at the next read.
    assert [*steps(7, 10, 2), *steps(9, 10, 2)] == [0] * 7 + [2] * 9
    waits.end()
    assert steps(3, 10, 2) == [0] * 3


def test_core_waits_of_short_steps_are_asked_for_seldom_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 0.2 ms that wait for a tenth: one in six is asked about, and one that waits for longer at once."""
    kernel = Kernel(tmp_path / "schedstat", monkeypatch)
    waits = core.CoreWaits()
    waits.begin()
    kernel.reads = 0

    def step(duration_us: int, wait_us: int) -> int:
        kernel.waited += wait_us * 1000
        return waits.of_step(duration_us * 1000) // 1000

    assert [step(200, 20) for _ in range(25)] == [20, 0, 0, 0, 0, 0] * 4 + [20]
    assert kernel.reads == 5
    assert step(4_200, 4_000) == 4_000
    waits.end()


@pytest.fixture
def timed_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TimedSteps]:
    time = Time()
    for module in (clock_module, history_module, waits_module):
        monkeypatch.setattr(module, "perf_counter_ns", time)
    steps = TimedSteps(time, Kernel(tmp_path / "schedstat", monkeypatch), tmp_path)
    steps.timer.core.begin()
    steps.timer.step_begins(disturbed=False)
    yield steps
    steps.timer.core.end()


class Time:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1

    def __call__(self) -> int:
        return self.now


class TimedSteps:
    """Steps on a clock and with a kernel that are moved by hand."""

    def __init__(self, time: Time, kernel: Kernel, folder: Path) -> None:
        self.kernel, self.time = kernel, time
        self.clock = PhaseClock()
        self.history = StepHistory(folder / "steps.bin", 0)
        self.history.waits_measured = True
        self.timer = StepTimer(self.history, self.clock)
        self.wait = RankWaits(self.clock).timed(self.passes, "wait")
        """Of a collective."""

    def passes(self, ms: int, put_off_ms: int = 0) -> None:
        """So much time, in that much of which the thread could run and does not."""
        self.time.now += ms * 1_000_000
        self.kernel.waited += put_off_ms * 1_000_000

    def step(self, number: int, ms: int) -> None:
        """A tenth of it between the stages and in each, a half waiting for other ranks. It could run in a tenth of that
        time, in half of the forward and in a quarter of the rest.
        """
        tenth = ms // 10
        self.passes(tenth)
        self.clock.begin(FORWARD)
        self.passes(2 * tenth, tenth)
        self.wait(5 * tenth, tenth // 2)
        self.clock.end(FORWARD)
        self.clock.begin(BACKWARD)
        self.passes(tenth, tenth // 4)
        self.clock.end(BACKWARD)
        self.passes(tenth, tenth // 4)
        self.timer.step_passes(number)

    def waits_ms(self) -> dict[str, list[int]]:
        """By the history that is written."""
        self.history.write()
        (block,) = unpack((self.history._path).read_bytes())
        return {name: (block_column(block, name) // 1000).tolist() for name in block.waits or ()}


def block_column(block: PackedBlock, name: str) -> Any:
    return _columns(block, [1 + len(block.stages) + (block.waits or ()).index(name)])[:, 0].astype(int)


def test_waits_for_a_core_are_counted_in_the_stages_of_long_steps(timed_steps: TimedSteps) -> None:
    """The first step is asked about as a whole. What the thread could run while it waits for ranks counts nowhere."""
    for number in range(3):
        timed_steps.step(number, 40)
    assert timed_steps.waits_ms() == {
        "forward": [20] * 3, "core": [8, 0, 0],
        "core in forward": [0, 4, 4], "core in backward": [0, 1, 1], "core in other": [0, 1, 1],
    }  # fmt: skip


def test_stages_of_short_steps_are_not_asked_about(timed_steps: TimedSteps) -> None:
    """Of 10 ms, for each of which there may be one read; steps of 20 ms may have those 8 that they take."""
    for number in range(4):
        timed_steps.step(number, 10)
    assert timed_steps.kernel.reads == 1 + 4
    for number in range(4, 8):
        timed_steps.step(number, 20)
    assert timed_steps.kernel.reads == 1 + 4 + 1 + 3 * 8
