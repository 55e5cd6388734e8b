"""Loaders that are slow on all ranks of one host, which wait for batches at different times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.replay.stragglers.chance import all_there_by_chance
from tests.analyzers.measured import advised, measured
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import MS, Cause, Job, Loader, Model

SMALL = Model(blocks=3, tokens=2048, width=512, small_kernels=1, flops_per_ns=100_000.0)
SLOW = Cause("slow loader", 2.2, (4, 5, 6, 7))
JOB = Job(
    ranks=8, ranks_per_host=4, model=SMALL, bucket_mb=10, noise=0.0, age=40,
    loader=Loader(workers=4, load_ns=12 * MS), causes=(SLOW,),
)  # fmt: skip


@pytest.mark.parametrize("factor", [2.2, 3.0])
def test_the_host_is_the_straggler_not_the_ranks_whose_batches_came_last(factor: float, tmp_path: Path) -> None:
    """A rank that waits for a batch while another waits for longer has a device that waits for nothing of its own."""
    slow = replace(SLOW, value=factor)
    emulation = emulate(replace(JOB, causes=(slow,)))
    emulation.write(tmp_path)
    summary = advised(tmp_path)
    (row,) = summary.stragglers
    assert (row.scope, row.ranks, row.cause) == ("host", (4, 5, 6, 7), "dataloader")
    assert row.lost_us * 1e3 == pytest.approx(emulation.step_ns - step_ns(JOB.without(SLOW)), rel=0.15)
    assert summary.findings[0].title.startswith("Host node1 (ranks 4-7) is a straggler (slower data loading)")
    assert "dataloader-workers" not in {finding.rule for finding in summary.findings}


@pytest.mark.parametrize("seed", range(4))
def test_no_host_is_one_where_all_loaders_are_as_slow(seed: int, tmp_path: Path) -> None:
    emulate(replace(JOB, seed=seed, causes=(replace(SLOW, ranks=None),))).write(tmp_path)
    assert all(row.scope != "host" for row in measured(tmp_path).stragglers)


@pytest.mark.parametrize(("ranks", "of_all", "times", "chance"), [(4, 8, 7, True), (4, 8, 8, False), (2, 8, 4, True)])
def test_waits_on_one_host_by_chance(ranks: int, of_all: int, times: int, *, chance: bool) -> None:
    """By hand: 2 · (1/2)^7 = 1/64 and (1/2)^7 = 1/128 of two hosts; of four 4 · (1/4)^4 = 1/64."""
    assert all_there_by_chance(ranks, of_all, times) == chance
