"""What the training thread waits for other ranks: counted in the stage it falls into, and nothing is left behind."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from perfscope.collectors.discovery import JobObjects
from perfscope.collectors.phases import core
from perfscope.collectors.phases.clock import BACKWARD, FORWARD, PhaseClock
from perfscope.collectors.phases.waits import RankWaits
from perfscope.recording.history import WAITS
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
    """Steps of 10 ms: 40 quiet ones, 10 that wait for 4 ms of 14, 41 quiet ones, 16 that wait and are no longer."""
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
    assert kernel.reads == 5
    assert steps(10, 14, 4) == [4] * 10
    assert steps(41, 10, 0) == [0] * 41
    assert kernel.reads == 5 + 10 + 6
    # Waiting that makes no step longer is noticed at the next read.
    assert [*steps(7, 10, 2), *steps(9, 10, 2)] == [0] * 7 + [2] * 9
    waits.end()
    assert steps(3, 10, 2) == [0] * 3
