"""Ranks whose hosts are slow behind a rank that is slower: what they are slow at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.analyzers.measured import measured
from tests.emulator.draw import draw
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import MS, US, Cause, Cpu, Job, Loader, Model, Recording

JOB = Job(
    ranks=4, bucket_mb=10, optimizer_kernels=10, noise=0.0, recording=Recording(steps=4),
    model=Model(blocks=3, tokens=2048, width=512, small_kernels=1, flops_per_ns=100_000.0),
    cpu=Cpu(python_ns=5 * US, operator_ns=4 * US, launch_ns=5 * US, collective_ns=36 * US),
    loader=Loader(load_ns=1 * MS, jitter=0.0), causes=(Cause("slow compute", 1.58, (0,)),),
)  # fmt: skip
SMALL = Model(blocks=2, tokens=1024, width=512)


@pytest.mark.parametrize(
    ("hidden", "loader", "cause"),
    [
        pytest.param(Cause("slow host", 2.36, (1,)), JOB.loader, "launch", id="host"),
        pytest.param(
            Cause("slow loader", 4.0, (1,)), replace(JOB.loader, workers=0, load_ns=MS // 2), "dataloader", id="loader"
        ),
    ],
)
def test_a_host_behind_a_slow_device_takes_longer_for_batches_as_for_all_it_does(
    hidden: Cause, loader: Loader, cause: str, tmp_path: Path
) -> None:
    job = replace(JOB, causes=(*JOB.causes, hidden), loader=loader)
    emulate(job).write(tmp_path)
    (row,) = measured(tmp_path).stragglers
    assert row.ranks == (0, 1)
    assert row.causes == ("compute", cause)


def test_a_rank_of_a_slow_host_that_is_slower_by_a_cause_of_its_own_is_named_with_it(tmp_path: Path) -> None:
    """Both ranks of the first host compute slowly, and rank 0 launches slowly, too: that is what sets the pace."""
    drawn = draw(13620)
    launches, _ = drawn.plants
    emulation = emulate(drawn.job)
    emulation.write(tmp_path)
    (row,) = measured(tmp_path).stragglers
    assert (row.scope, row.ranks, row.cause, row.causes) == ("ranks", (0, 1), "launch", ("launch", "compute"))
    cured = step_ns(replace(drawn.job, causes=()))
    assert row.lost_us * 1e3 == pytest.approx(emulation.step_ns - cured, rel=0.05)
    alone = step_ns(launches.cure(drawn.job))
    assert row.alone_us[0] * 1e3 == pytest.approx(emulation.step_ns - alone, rel=0.05)


def test_ranks_of_a_host_that_are_slow_alike_are_their_host(tmp_path: Path) -> None:
    job = replace(JOB, ranks_per_host=2, causes=(Cause("slow compute", 1.38, (0, 1)), Cause("slow host", 6.0, (0, 1))))
    emulate(job).write(tmp_path)
    (row,) = measured(tmp_path).stragglers
    assert (row.scope, row.ranks) == ("host", (0, 1))


def test_a_slow_device_is_named_beside_hosts_that_now_and_then_wait_for_workers(tmp_path: Path) -> None:
    """All hosts, ahead of their devices, wait for some of the batches: that does not show that workers set the pace."""
    drawn = draw(14376)
    (slow,) = drawn.plants
    emulation = emulate(drawn.job)
    emulation.write(tmp_path)
    (row,) = measured(tmp_path).stragglers
    assert (row.ranks, row.cause) == ((2,), "compute")
    cured = step_ns(slow.cure(drawn.job))
    assert row.lost_us * 1e3 == pytest.approx(emulation.step_ns - cured, rel=0.05)


def test_a_host_that_pauses_does_not_launch_slowly(tmp_path: Path) -> None:
    """Rank 2 saves a checkpoint in each step. Then it is no longer ahead of its device, which waits for launches."""
    emulate(draw(14176).job).write(tmp_path)
    (row,) = measured(tmp_path).stragglers
    assert (row.ranks, row.causes) == ((1, 2), ("sync", "host"))


def test_a_slow_host_launches_slowly(tmp_path: Path) -> None:
    emulate(replace(JOB, causes=(Cause("slow host", 2.5, (2,)),), model=SMALL)).write(tmp_path)
    (row,) = measured(tmp_path).stragglers
    assert (row.ranks, row.cause) == ((2,), "launch")


def test_a_slow_host_is_named_for_what_it_issues_late_though_its_device_hardly_waits(tmp_path: Path) -> None:
    """FSDP on eight ranks: gathers of rank 3 are issued late, and all wait for them, rank 3 as well."""
    job = draw(10141).job
    (cause,) = job.causes
    emulation = emulate(job)
    emulation.write(tmp_path)
    (row,) = measured(tmp_path).stragglers
    assert (row.ranks, row.cause) == ((3,), "launch")
    cost_us = (emulation.step_ns - step_ns(job.without(cause))) / 1e3
    assert cost_us > 0.05 * emulation.step_ns / 1e3
    assert row.lost_us == pytest.approx(cost_us, rel=0.1)
