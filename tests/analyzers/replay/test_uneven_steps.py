"""Ranks that are slow in turn because their batches differ, against one that is slow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers.replay.peers import Peers
from perfscope.analyzers.replay.stragglers.own_time import (
    compute_varies,
    late_loaders,
    ns_per_flop,
    steadiness,
    varies_by,
)
from perfscope.analyzers.replay.stragglers.slow_for_work import spread_evenly_ns
from perfscope.analyzers.replay.stragglers.uneven import of_few_ranks, of_one_rank
from perfscope.results.categories import TimeCategory
from tests.analyzers.measured import advised, measured
from tests.emulator import Cause, Job, Model, Recording, emulate, step_ns
from tests.emulator.draw import draw

BUSY = Job(ranks=2, noise=0.0, model=Model(blocks=2, tokens=8192), recording=Recording(steps=6, shapes=False))


def test_work_that_varies_by_little_that_matters_is_even() -> None:
    """FLOPs of two ranks vary by 4 % from step to step; compute follows them, or is mostly something else."""
    flops = np.array([[100.0, 108.0, 100.0, 108.0], [108.0, 100.0, 108.0, 100.0]])
    follows = np.round(1_000 * flops).astype(np.int64)
    others = np.round(100 * flops).astype(np.int64) + 90_000
    assert ns_per_flop(flops, follows) == pytest.approx(1_000)
    assert (compute_varies(flops, follows), compute_varies(flops, others)) == (True, False)
    assert not compute_varies(np.zeros((2, 4)), follows)  # not known


def test_variance_between_ranks_and_from_step_to_step() -> None:
    """Means 3, 1, 2; without these and the steps' means ±1, ±1, 0 are left: F = (2 · 1) / (4 / 2)."""
    own = np.array([[4, 2], [0, 2], [2, 2]])
    assert steadiness(own) == pytest.approx(1.0)
    assert varies_by(own.astype(np.float64)) == pytest.approx(np.sqrt(4 / 6) / 2)
    assert steadiness(np.array([[4, 4], [2, 2]])) == np.inf
    assert (steadiness(own[:, :1]), varies_by(own[:, :1].astype(np.float64))) == (np.inf, 0.0)


@pytest.mark.parametrize(
    ("own", "is_one"),
    [
        ([[100, 101, 150, 160], [101, 100, 100, 100]], True),  # throttled from the third step on
        ([[120, 90, 150, 100], [100, 110, 90, 140]], False),
        ([[100, 120, 150, 130], [100, 100, 100, 100]], False),  # even by chance in one of them
        ([[120, 130, 150, 160], [100, 100, 100, 100]], False),  # slow in all steps: its steadiness decides
        ([[100, 100, 150, 100], [100, 150, 100, 100]], False),
    ],
)
def test_a_rank_that_is_slow_in_some_steps_beside_one_that_never_is(own: list[list[int]], is_one: bool) -> None:
    assert of_one_rank(np.array(own)) is is_one


def test_a_few_ranks_that_are_slow_in_turn_beside_many_that_never_are() -> None:
    own = np.random.default_rng(5).normal(100_000, 500, (8, 10)).astype(np.int64)
    two = own.copy()
    two[2, ::2] += 30_000
    two[5, 1::2] += 30_000
    assert of_few_ranks(two)
    assert not of_few_ranks(two[:, :3])
    assert not of_few_ranks(own)
    assert not of_few_ranks((own * np.random.default_rng(6).normal(1, 0.15, own.shape)).astype(np.int64))


@pytest.mark.parametrize("late", ["in turn", "one of them", "and computes for less", "never"])
def test_loaders_that_are_late_in_turn_are_plain_beside_computing_that_varies(late: str) -> None:
    """Three ranks compute for 30, 40 and 50 ms, one of them the least in turn, and load for 1 ms, a late one for 21."""
    rows = np.zeros((3, 24, len(TimeCategory)), dtype=np.int64)
    for step in range(24):
        for rank in range(3):
            rows[rank, step, TimeCategory.COMPUTE] = 30 + 10 * ((step // 3 + rank) % 3)
            late_rank = {"in turn": step % 3, "one of them": 1, "and computes for less": step % 3, "never": -1}[late]
            rows[rank, step, TimeCategory.DATALOADER] = 21 if rank == late_rank else 1
            if late == "and computes for less" and rank == late_rank:
                rows[rank, step, TimeCategory.COMPUTE] -= 20
    own = rows.sum(axis=2)
    every = np.ones(24, dtype=bool)
    peers = Peers((0, 1, 2), np.zeros((3, 25), np.int64), own, rows, np.arange(24))
    assert late_loaders(peers, own, every, 100.0) == ([0, 1, 2] if late == "in turn" else [])


def test_two_ranks_whose_batches_vary_are_slow_in_turn(tmp_path: Path) -> None:
    job = replace(BUSY, seed=3, imbalance=0.15)
    emulation = emulate(job)
    emulation.write(tmp_path)
    (found,) = measured(tmp_path).stragglers
    assert (found.scope, found.ranks, found.cause) == ("job", (0, 1), "compute")
    lost_ns = emulation.step_ns - step_ns(replace(job, evened=True))
    assert found.lost_us * 1e3 == pytest.approx(lost_ns, rel=0.1)


def test_a_pause_of_one_of_them_is_its_own(tmp_path: Path) -> None:
    """Rank 1 writes a checkpoint in one of three steps."""
    drawn = draw(8569)
    emulation = emulate(drawn.job)
    emulation.write(tmp_path)
    rows = {(row.scope, row.ranks, row.cause): row.lost_us * 1e3 for row in measured(tmp_path).stragglers}
    expected = (("rank", (1,), "host"), ("job", (0, 1), "compute"))
    assert rows.keys() == set(expected)
    for name, plant in zip(expected, drawn.plants, strict=True):
        lost_ns = emulation.step_ns - step_ns(plant.cure(drawn.job))
        assert rows[name] == pytest.approx(lost_ns, abs=0.01 * emulation.step_ns)


@pytest.mark.parametrize("shapes", [True, False])
def test_a_rank_that_is_slow_for_its_work_is_told_from_one_that_has_more_of_it(shapes: bool, tmp_path: Path) -> None:
    """By FLOPs, or by the optimizer's kernels and the copies of gradients, whose work is the same in all steps."""
    slow = Cause("slow compute", 1.25, ranks=(1,))
    job = replace(BUSY, seed=4, imbalance=0.15, causes=(slow,), recording=Recording(steps=4, shapes=shapes))
    emulation = emulate(job)
    emulation.write(tmp_path)
    summary = advised(tmp_path)
    rows = {(row.scope, row.ranks): row for row in summary.stragglers}
    assert rows.keys() <= {("rank", (1,)), ("job", (0, 1))}
    lost_ns = emulation.step_ns - step_ns(job.without(slow))
    assert rows["rank", (1,)].lost_us * 1e3 == pytest.approx(lost_ns, abs=0.02 * emulation.step_ns)
    assert summary.findings[0].title.startswith("Rank 1 is a straggler (slower compute)")


def test_what_takes_as_long_whatever_the_batch_makes_no_rank_slow(tmp_path: Path) -> None:
    """Compute per FLOP is longest on the rank with the fewest: all loop over as many parameters."""
    model = Model(blocks=6, tokens=4096, width=512)
    job = replace(BUSY, ranks=8, seed=14046, imbalance=0.15, foreach=False, model=model, recording=Recording(steps=2))
    emulation = emulate(job)
    emulation.write(tmp_path)
    (found,) = measured(tmp_path).stragglers
    assert (found.scope, found.cause) == ("job", "compute")
    lost_ns = emulation.step_ns - step_ns(replace(job, evened=True))
    assert found.lost_us * 1e3 == pytest.approx(lost_ns, abs=0.02 * emulation.step_ns)


def test_paces_by_hand() -> None:
    """The second rank takes 5/4 as long: 63 for what the first would do in 50.4. Evenly: 45.2, 45, 44.9."""
    rows = np.zeros((2, 3, len(TimeCategory)), dtype=np.int64)
    rows[:, :, TimeCategory.COMPUTE] = [[40, 50, 45], [63, 50, 56]]
    peers = Peers((0, 1), np.zeros((2, 4), np.int64), rows.sum(axis=2), rows, np.arange(3))
    over = spread_evenly_ns(peers, {1: 1.25})
    assert over.tolist() == [[-5, 5, 0], [6, -6, 0]]
    assert spread_evenly_ns(peers, {}).tolist() == [[-12, 0, -6], [12, 0, 6]]


def test_a_slow_rank_of_two_is_not_uneven_work(tmp_path: Path) -> None:
    job = replace(BUSY, noise=0.03, causes=(Cause("slow compute", 1.15, ranks=(1,)),))
    emulate(job).write(tmp_path)
    (found,) = measured(tmp_path).stragglers
    assert (found.scope, found.ranks, found.cause) == ("rank", (1,), "compute")


def test_a_device_that_waits_for_launches_while_the_other_waits_for_it_has_no_slow_host(tmp_path: Path) -> None:
    """Rank 0 pauses. Both hosts launch as slowly, but the device of rank 1 waits for rank 0 meanwhile."""
    emulate(draw(8533).job).write(tmp_path)
    worst, *_ = measured(tmp_path).stragglers
    assert (worst.ranks, worst.cause) == ((0,), "host")


def test_work_that_differs_in_the_only_step_is_uneven_where_compute_follows_its_flops(tmp_path: Path) -> None:
    job = replace(BUSY, ranks=4, seed=3, imbalance=0.15, recording=Recording(steps=1))
    emulation = emulate(job)
    emulation.write(tmp_path)
    summary = advised(tmp_path)
    (found,) = summary.stragglers
    assert (found.scope, found.ranks, found.cause) == ("job", (0, 1, 2, 3), "compute")
    lost_ns = emulation.step_ns - step_ns(replace(job, evened=True))
    assert found.lost_us * 1e3 == pytest.approx(lost_ns, abs=0.02 * emulation.step_ns)
    assert "in turn" not in summary.findings[0].title
