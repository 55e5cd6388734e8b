"""Whether waits in a data loader are for its workers, where those of other ranks tell what taking a batch costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.analyzers.measured import measured
from tests.emulator.draw import draw
from tests.emulator.emulate import emulate, step_ns
from tests.generator import MS, US, Evaluation, LoaderSpec, Pause, SlowHost, SlowLoader, simulate, step_time_ns
from tests.planted.jobs import data_parallel

HEALTHY = replace(data_parallel(4, "ddp"), noise=0.0, loader=LoaderSpec(workers=1, load_ns=400 * US))


@pytest.mark.parametrize(("ranks", "longer_ns"), [((2,), 800 * US), ((1, 2), 800 * US), ((2,), 200 * US)])
def test_short_waits_of_some_ranks_alone_are_for_their_workers(
    tmp_path: Path, ranks: Sequence[int], longer_ns: int
) -> None:
    """In every step, and as even as what taking a batch costs: the other ranks take theirs in 20 µs."""
    alone_ns = step_time_ns(HEALTHY)
    late = SlowLoader(ranks=tuple(ranks), load_ns=round(alone_ns) + longer_ns)
    job = simulate(replace(HEALTHY, causes=(late,)))
    job.write(tmp_path)
    context = context_of(tmp_path)
    assert {rank for rank, found in context.recorded.deliveries.items() if len(found)} == set(ranks)
    assert predict(context, {"compute": "2x"}).mid_ns == pytest.approx(job.truth.step_time_ns, rel=0.01)


def test_a_slow_host_takes_its_batches_for_longer(tmp_path: Path) -> None:
    spec = replace(
        HEALTHY, loader=replace(HEALTHY.loader, next_ns=100 * US), causes=(SlowHost(ranks=(2,), factor=8.0),)
    )
    simulate(spec).write(tmp_path)
    found = context_of(tmp_path).recorded
    loading = found.deliveries[2]
    assert not len(loading)


def test_as_short_waits_of_all_ranks_may_be_what_taking_a_batch_costs(tmp_path: Path) -> None:
    simulate(replace(HEALTHY, loader=replace(HEALTHY.loader, next_ns=round(0.8 * MS)))).write(tmp_path)
    assert not any(len(found) for found in context_of(tmp_path).recorded.deliveries.values())


def test_more_workers_end_short_waits_too(tmp_path: Path) -> None:
    """They are no part of what taking a batch costs."""
    alone_ns = step_time_ns(HEALTHY)
    simulate(replace(HEALTHY, causes=(SlowLoader(load_ns=round(alone_ns) + 800 * US, ranks=(2,)),))).write(tmp_path)
    assert predict(context_of(tmp_path), {"dataloader.num_workers": "2"}).mid_ns == pytest.approx(alone_ns, rel=0.05)


def test_batches_that_were_there_when_taken_tell_that_workers_set_no_pace(tmp_path: Path) -> None:
    """Hosts wait for two of four batches, nearly 100 ms apart; the next one is there after 47, and steps take 87."""
    drawn = draw(9517)
    (plant,) = drawn.plants
    emulation = emulate(drawn.job)
    emulation.write(tmp_path)
    (row,) = measured(tmp_path).stragglers
    assert (row.scope, row.cause) == ("job", "compute")
    cost_us = (emulation.step_ns - step_ns(plant.cure(drawn.job))) / 1e3
    assert row.lost_us == pytest.approx(cost_us, rel=0.2)


@pytest.mark.parametrize("evaluated", [15, None])
def test_a_slow_batch_in_a_step_that_is_left_out_holds_no_other_step(tmp_path: Path, evaluated: int | None) -> None:
    """Rank 2 pauses in two steps, and one batch of rank 1 is slow: in a step that counts nobody knows whether its
    workers would be quicker than the pauses.
    """
    pause = Pause(ranks=(2,), steps=(12, 14), pause_ns=3 * MS)
    slow = SlowLoader(ranks=(1,), steps=(15,), load_ns=50 * MS)
    aside = () if evaluated is None else (Evaluation(steps=(evaluated,)),)
    spec = replace(HEALTHY, steps=8, loader=replace(HEALTHY.loader, workers=4), causes=(pause, slow, *aside))
    simulate(spec).write(tmp_path)
    context = context_of(tmp_path)
    assert (evaluated in context.result.steps.tolist()) is False
    assert bool(len(context.recorded.deliveries[1])) is (evaluated is None)
    if evaluated is not None:
        left = simulate(spec.without(pause)).truth.steps_ns
        truth = fmean(ns for step, ns in zip(spec.recorded_steps, left, strict=True) if step != evaluated)
        assert predict(context, {"rank.2": "peers"}).mid_ns == pytest.approx(truth, rel=0.01)
