"""Ranks that load a slow batch in turn: over all steps none loads longer than the others, in each one of them does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.analyzers.measured import measured
from tests.generator import JobSpec, LoaderSpec, SlowLoader, simulate
from tests.generator.parts import MS
from tests.planted.jobs import data_parallel

pytestmark = pytest.mark.scale


def in_turn(spec: JobSpec, ranks: tuple[int, ...], load_ns: int) -> JobSpec:
    """Of ``ranks`` another one loads for ``load_ns`` in each step."""
    causes = tuple(
        SlowLoader(ranks=(ranks[step % len(ranks)],), steps=(step,), load_ns=load_ns)
        for step in range(spec.recorded_steps[0], spec.recorded_steps[-1] + 1)
    )
    return replace(spec, causes=causes)


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6, 7), (1, 3, 6, 7)], ids=str)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_ranks_whose_loaders_are_slow_in_turn_are_named(ranks: tuple[int, ...], backend: str, tmp_path: Path) -> None:
    size = 4 if len(ranks) == 4 and max(ranks) == 3 else 8
    spec = replace(data_parallel(size, "ddp"), steps=12, loader=LoaderSpec(workers=0, load_ns=MS), backend=backend)
    job, healthy = simulate(in_turn(spec, ranks, 8 * MS)), simulate(spec)
    job.write(tmp_path)
    summary = measured(tmp_path)
    (row,) = summary.stragglers
    assert (row.ranks, row.cause, row.scope, row.pattern) == (ranks, "dataloader", "job", "rotating")
    cost_us = (job.truth.step_time_ns - healthy.truth.step_time_ns) / 1e3
    assert row.lost_us == pytest.approx(cost_us, rel=0.1)


def test_loaders_that_are_all_slow_accuse_no_ranks_in_turn(tmp_path: Path) -> None:
    """Every batch takes long on every rank, some a little longer than others."""
    spec = replace(data_parallel(8, "ddp"), steps=12, loader=LoaderSpec(workers=0, load_ns=8 * MS, spread=0.03))
    simulate(spec).write(tmp_path)
    summary = measured(tmp_path)
    assert not summary.stragglers
