"""A rank that pauses after a synchronization: the host's time, whatever blocked it before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.analyzers.measured import measured
from tests.analyzers.rules.jobs import QUICK
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import Cause, Job, Loader, Model
from tests.generator import MS, US, HostSync, LoaderSpec, Pause, SlowHost, simulate
from tests.generator.cuda import CudaProcess
from tests.generator.work import Program

BUSY = replace(QUICK, ranks=2, end_sync=False, causes=(HostSync(),))
"""Two ranks that call loss.item() between forward and backward, and nothing else that blocks."""


@pytest.mark.parametrize("pause_ms", [0.6, 1.0, 3.0])
def test_a_pause_after_item_is_the_host_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause_ms: float):
    without_ns = simulate(BUSY).truth.step_time_ns
    item = CudaProcess.item

    def pausing(self: CudaProcess) -> Program:
        yield from item(self)
        if self.host.rank == 1:
            self.host.spend(round(pause_ms * MS))

    monkeypatch.setattr(CudaProcess, "item", pausing)
    job = simulate(BUSY)
    job.write(tmp_path)
    (worst, *_) = measured(tmp_path).stragglers
    assert (worst.ranks, worst.cause) == ((1,), "host")
    assert worst.lost_us == pytest.approx((job.truth.step_time_ns - without_ns) / 1e3, rel=0.05)


def test_a_synchronization_costs_what_the_job_loses_by_it(tmp_path: Path):
    """The backward's first kernels come late one after another: the synchronization delays them all."""
    slow_host = replace(QUICK.host, operator_ns=QUICK.host.operator_ns * 6)
    spec = replace(BUSY, host=slow_host, causes=(HostSync(ranks=(1,)),))
    job = simulate(spec)
    job.write(tmp_path)
    row = measured(tmp_path).time_breakdown[1]
    assert row.idle_sync_us == pytest.approx(job.lost_ns(spec.causes[0]) / 1e3, rel=0.05)
    assert row.idle_launch_us < 0.05 * row.idle_sync_us


@pytest.mark.parametrize("factor", [6.0, 10.0, 20.0])
def test_a_slow_host_is_one_although_all_synchronize(tmp_path: Path, factor: float):
    """The same synchronizations leave the slow host's device idle for longer: it is not the one that blocks more."""
    slow = SlowHost(ranks=(1,), factor=factor)
    job = simulate(replace(QUICK, ranks=2, causes=(HostSync(), slow)))
    job.write(tmp_path)
    (worst, *_) = measured(tmp_path).stragglers
    assert (worst.ranks, worst.cause) == ((1,), "launch")
    assert worst.lost_us == pytest.approx(job.lost_ns(slow) / 1e3, rel=0.05)


def test_a_rank_that_alone_synchronizes_is_the_one_that_blocks(tmp_path: Path):
    late = replace(QUICK.host, sync_return_ns=500_000)
    sync = HostSync(ranks=(1,))
    job = simulate(replace(QUICK, ranks=2, end_sync=False, host=late, causes=(sync,)))
    job.write(tmp_path)
    (worst, *_) = measured(tmp_path).stragglers
    assert (worst.ranks, worst.cause) == ((1,), "sync")
    assert worst.lost_us == pytest.approx(job.lost_ns(sync) / 1e3, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "factor", "cause"), [("slow host", 2.5, "launch"), ("slow loader", 150.0, "dataloader")]
)
def test_a_slow_host_that_takes_batches_as_slowly_has_no_slow_loader(
    tmp_path: Path, kind: str, factor: float, cause: str
):
    """The device is drained in every step, so what waits for the slow host first is taking the batch."""
    slow = Cause(kind, factor, (1,))
    loader = Loader(workers=2, load_ns=200_000, fetch_ns=400_000)
    job = Job(
        ranks=2, ranks_per_host=2, item_every=1, model=Model(blocks=3, tokens=4096), loader=loader, causes=(slow,)
    )
    emulation = emulate(job)
    emulation.write(tmp_path)
    (row,) = measured(tmp_path).stragglers
    assert (row.ranks, row.cause) == ((1,), cause)
    lost_ns = emulation.step_ns - step_ns(job.without(slow))
    assert row.lost_us * 1e3 == pytest.approx(lost_ns, abs=0.05 * emulation.step_ns)


def test_a_short_pause_of_a_rank_is_the_host_s_although_all_synchronize(tmp_path: Path):
    """Too short to be seen as a pause, it leaves the device of its rank idle behind the same synchronizations."""
    pause = Pause(ranks=(1,), pause_ns=400 * US)
    job = simulate(replace(QUICK, ranks=2, strategy="zero3", noise=0.05, seed=52002, causes=(pause,)))
    job.write(tmp_path)
    (worst, *_) = measured(tmp_path).stragglers
    assert (worst.ranks, worst.cause) == ((1,), "host")
    assert worst.lost_us == pytest.approx(job.lost_ns(pause) / 1e3, rel=0.25)


def test_a_rank_that_drains_its_device_is_named_although_that_waits_for_batches(tmp_path: Path):
    """Every host loads as long, while its device has work left; rank 1 synchronizes, and its device has none."""
    sync = HostSync(ranks=(1,))
    slow_host = replace(QUICK.host, operator_ns=QUICK.host.operator_ns * 6)
    loader = LoaderSpec(workers=0, load_ns=1500 * US)
    job = simulate(replace(QUICK, end_sync=False, host=slow_host, loader=loader, causes=(sync,)))
    job.write(tmp_path)
    (worst, *_) = measured(tmp_path).stragglers
    assert (worst.ranks, worst.cause) == ((1,), "sync")
    assert worst.lost_us == pytest.approx(job.lost_ns(sync) / 1e3, rel=0.05)
