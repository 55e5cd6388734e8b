"""How many loader workers deliver in turn, of batches whose workers are known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers.job.worker_turns import workers_in_turn
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.trace.trace import Int64
from tests.generator import MS, LoaderSpec, simulate, step_time_ns
from tests.planted.jobs import data_parallel


def delivered(begins_ms: Sequence[float], batches: int, *, load_ms: float = 40, varies: float, seed: int) -> Int64:
    """When always busy workers, which begin at these times, have their batches, handed over in order."""
    rng = random.Random(seed)
    free, times = list(begins_ms), []
    for batch in range(batches):
        worker = batch % len(free)
        free[worker] += load_ms * (1 + rng.uniform(-varies, varies))
        times.append(max([free[worker], *times[-1:]]))
    return np.round(np.array(times) * MS).astype(np.int64)


@pytest.mark.parametrize("seed", range(5))
def test_two_workers_that_began_apart_deliver_every_other_batch_evenly(seed: int) -> None:
    assert workers_in_turn([delivered((0, 12), 8, varies=0.02, seed=seed)]) == 2


@pytest.mark.parametrize("seed", range(5))
def test_four_workers_need_more_batches(seed: int) -> None:
    begins = (0, 3, 17, 24)
    assert workers_in_turn([delivered(begins, 12, varies=0.02, seed=seed)]) == 4
    assert workers_in_turn([delivered(begins, 4, varies=0.02, seed=seed)]) is None


def test_ranks_tell_together_what_none_of_them_tells() -> None:
    ranks = [delivered((0, 12), 6, varies=0.2, seed=seed) for seed in range(8)]
    assert any(workers_in_turn([rank]) is None for rank in ranks)
    assert workers_in_turn(ranks) == 2


def test_a_lone_worker_delivers_in_no_turns_but_by_chance() -> None:
    found = [workers_in_turn([delivered((0,), 8, varies=0.1, seed=seed)]) for seed in range(200)]
    assert sum(each is not None for each in found) <= 20
    assert workers_in_turn([delivered((0,), 8, varies=0.1, seed=seed) for seed in range(8)]) is None


def test_batches_that_are_all_alike_tell_nothing() -> None:
    assert workers_in_turn([np.arange(8) * MS]) is None
    assert workers_in_turn([]) is None


def test_their_pace_is_that_of_whole_rounds(tmp_path: Path) -> None:
    """Five steps: from the first batch to the last there may be two rounds and a half."""
    healthy = replace(data_parallel(4, "ddp"), noise=0.0, steps=6)
    alone_ns = step_time_ns(healthy)
    load_ns = round(2.4 * alone_ns)
    simulate(replace(healthy, loader=LoaderSpec(workers=2, load_ns=load_ns, spread=0.02))).write(tmp_path)
    for found in context_of(tmp_path).recorded.deliveries.values():
        assert found.workers == 2
        assert found.batch_ns == pytest.approx(load_ns / 2, rel=0.02)
