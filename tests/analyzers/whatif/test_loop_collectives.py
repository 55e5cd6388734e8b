"""``loop.collectives=0`` on jobs of the emulator that reduce metrics after each step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.whatif.change import BadSetting, CannotReplay
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.emulator.changes import apply
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import US, Cause, Job, Model, Network, Recording

CHANGE = {"loop.collectives": "0"}
SLOW = Network(latency_ns=300 * US, between_latency_ns=300 * US)
LOGS = Job(
    ranks=2, metrics=20, noise=0.0, network=SLOW, model=Model(blocks=4, tokens=1024), recording=Recording(steps=4)
)  # fmt: skip


@pytest.mark.parametrize(
    "job",
    [
        LOGS,
        replace(LOGS, item_every=1),
        replace(LOGS, recording=Recording(steps=4, run=True)),
        replace(LOGS, noise=0.01, recording=Recording(steps=6, metadata="operator")),
        replace(LOGS, strategy="tensor", tensor=2),
        replace(LOGS, strategy="manual", item_every=1),
        replace(LOGS, metrics=5, microbatches=4, metrics_in="batch"),
        replace(LOGS, metrics_in="forward"),
        replace(LOGS, metrics_in="forward", recording=Recording(steps=4, run=True)),
        replace(LOGS, metrics_in="backward"),
        replace(LOGS, strategy="fsdp", metrics_in="forward", recording=Recording(steps=8)),
        replace(LOGS, ranks=4, metrics_in="forward", norms="synchronized", buffers_mb=1.0),
    ],
    ids=[
        "nothing is read", "the loss is read", "recorded by perfscope run", "described by operators",
        "no range marks forwards", "gradients reduced by hand", "after each micro-batch", "in the forward",
        "in the forward, recorded by perfscope run", "before the backward", "in the forward of FSDP",
        "beside synchronized norms and buffers",
    ],
)  # fmt: skip
def test_metrics_that_are_not_reduced_take_no_time(job: Job, tmp_path: Path) -> None:
    emulated = emulate(job)
    emulated.write(tmp_path)
    changed = apply(job, CHANGE)
    assert changed is not None
    truth = step_ns(changed.job) / emulated.step_ns
    assert truth < 0.8
    found = predict(context_of(tmp_path), CHANGE)
    # Four steps of a host that is ahead end with what it has launched for the fifth: both are as much longer.
    assert found.mid_ns / found.measured_ns == pytest.approx(truth, rel=0.03)
    assert found.low_ns / found.measured_ns <= truth <= found.high_ns / found.measured_ns


def test_gathers_of_fsdp_come_sooner(tmp_path: Path) -> None:
    """The first ones of a forward, which waited behind the metrics in the group's queue, overlap the optimizer then."""
    job = replace(LOGS, strategy="fsdp", ranks=4, ranks_per_host=2, recording=Recording(steps=10))
    emulated = emulate(job)
    emulated.write(tmp_path)
    truth = step_ns(replace(job, metrics=0))
    assert truth < 0.7 * emulated.step_ns
    found = predict(context_of(tmp_path), CHANGE)
    assert found.mid_ns == pytest.approx(truth, rel=0.06)
    assert found.low_ns <= truth <= found.high_ns


def test_who_waits_for_a_late_rank_does_so_at_the_next_collective(tmp_path: Path) -> None:
    """Rank 1 computes for twice as long: it is as late for the first bucket as it was for the metrics."""
    job = replace(LOGS, metrics=2, network=Network(), causes=(Cause("slow compute", 2.0, ranks=(1,)),))
    emulated = emulate(job)
    emulated.write(tmp_path)
    found = predict(context_of(tmp_path), CHANGE)
    assert found.mid_ns == pytest.approx(step_ns(replace(job, metrics=0)), rel=0.03)
    assert found.mid_ns > 0.9 * emulated.step_ns


@pytest.mark.parametrize(
    "job",
    [
        LOGS,
        replace(LOGS, strategy="manual"),
        replace(LOGS, strategy="fsdp"),
        # Activations of 2 KiB are as small as metrics.
        replace(LOGS, strategy="tensor", tensor=2, model=Model(blocks=2, tokens=1, width=512)),
        replace(LOGS, strategy="tensor", tensor=2, ranks=4, model=Model(blocks=2, tokens=1, width=512)),
        replace(LOGS, strategy="pipeline", stages=2, microbatches=4),
        # Statistics of few channels.
        replace(LOGS, norms="synchronized", buffers_mb=0.0001, microbatches=2, model=Model(blocks=2, width=8)),
    ],
    ids=["ddp", "manual", "fsdp", "tensor", "tensor and data", "pipeline", "synchronized norms and buffers"],
)
def test_the_models_own_are_none_of_them(job: Job, tmp_path: Path) -> None:
    emulate(replace(job, metrics=0)).write(tmp_path)
    with pytest.raises(CannotReplay, match="no small collectives"):
        predict(context_of(tmp_path), CHANGE)


def test_none_is_all_that_can_be_asked_for(tmp_path: Path) -> None:
    emulate(LOGS).write(tmp_path)
    with pytest.raises(BadSetting, match="write 0"):
        predict(context_of(tmp_path), {"loop.collectives": "5"})
