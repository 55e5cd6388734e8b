"""Gradients reduced by a loop: predictions against the emulator, which trains the other way instead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.whatif.change import BadSetting, CannotReplay, Context
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import US, Cpu, Job, Model, Network, Recording

pytestmark = pytest.mark.scale

LOOP = Job(strategy="manual", recording=Recording(steps=4))
JOBS = {
    "compute": LOOP,
    "communication": replace(LOOP, network=Network(gbps=15.0)),
    "latency": replace(LOOP, model=Model(blocks=8, width=512), network=Network(latency_ns=120 * US)),
    "micro-batches": replace(LOOP, microbatches=2, model=Model(tokens=4096), network=Network(gbps=30.0)),
    "two hosts": replace(LOOP, ranks=4, ranks_per_host=2, gradient_bytes=2),
    "reduced to one rank": replace(LOOP, returned=True, network=Network(gbps=30.0)),
    "reduced to one of two ranks": replace(LOOP, ranks=2, returned=True, metrics=3, network=Network(gbps=60.0)),
}


def recorded(job: Job, folder: Path) -> Context:
    emulate(job).write(folder)
    return context_of(folder)


@pytest.mark.parametrize("way", ["flat", "ddp"])
@pytest.mark.parametrize("name", JOBS)
def test_the_step_takes_what_it_takes_where_it_is_trained_so(name: str, way: str, tmp_path: Path) -> None:
    job = JOBS[name]
    answer = predict(recorded(job, tmp_path), {"gradients.reduce": way})
    truth = step_ns(replace(job, strategy=way))
    assert answer.mid_ns == pytest.approx(truth, rel=0.05)
    assert answer.low_ns <= truth <= answer.high_ns


@pytest.mark.parametrize("way", ["flat", "ddp"])
def test_where_the_host_sets_the_pace_the_range_holds_what_it_gains(way: str, tmp_path: Path) -> None:
    """The loop's host time is the step's: without it the forward is launched earlier, too."""
    job = replace(LOOP, model=Model(blocks=6, tokens=512, width=512), cpu=Cpu(python_ns=12 * US))
    answer = predict(recorded(job, tmp_path), {"gradients.reduce": way})
    assert answer.low_ns <= step_ns(replace(job, strategy=way)) <= answer.high_ns < answer.measured_ns


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_what_no_loop_reduces_is_refused(strategy: str, tmp_path: Path) -> None:
    job = replace(LOOP, strategy=strategy, tensor=2 if strategy == "tensor" else 1)
    with pytest.raises(CannotReplay, match=r"no loop of all-reduces"):
        predict(recorded(job, tmp_path), {"gradients.reduce": "flat"})


def test_few_gradients_are_no_loop(tmp_path: Path) -> None:
    with pytest.raises(CannotReplay, match=r"no loop of all-reduces"):
        predict(recorded(replace(LOOP, model=Model(blocks=1)), tmp_path), {"gradients.reduce": "ddp"})


def test_ranks_that_are_missing_may_arrive_at_any_time(tmp_path: Path) -> None:
    context = recorded(replace(LOOP, recording=Recording(steps=4, missing=(3,))), tmp_path)
    with pytest.raises(CannotReplay, match="record all ranks"):
        predict(context, {"gradients.reduce": "ddp"})


def test_other_ways_are_not_understood(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="write flat or ddp"):
        predict(recorded(LOOP, tmp_path), {"gradients.reduce": "fsdp"})


@pytest.mark.parametrize("name", ["compute", "communication", "two hosts"])
def test_one_all_reduce_of_all_gradients_could_be_several_during_the_backward(name: str, tmp_path: Path) -> None:
    """Of one tensor it does not show when its gradients became ready."""
    job = replace(JOBS[name], strategy="flat")
    answer = predict(recorded(job, tmp_path), {"gradients.reduce": "ddp"})
    truth = step_ns(replace(job, strategy="ddp"))
    assert answer.mid_ns == pytest.approx(truth, rel=0.1)
    assert answer.low_ns <= truth <= answer.high_ns
