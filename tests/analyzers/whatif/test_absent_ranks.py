"""Ranks that are not recorded: what seems transfer may be waiting for them, which a quicker network does not end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import perfscope
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.emulator import Cause, Job, Model, Network, Recording, emulate, step_ns
from tests.emulator.changes import apply

JOB = Job(
    ranks=4, noise=0.0, gradient_bytes=4, model=Model(blocks=3, tokens=4096), network=Network(gbps=300.0),
    causes=(Cause("slow compute", 1.4, ranks=(3,)),), recording=Recording(steps=4, missing=(3,)),
)  # fmt: skip


def ratios(job: Job, change: dict[str, str], folder: Path) -> tuple[float, tuple[float, float, float]]:
    """(the step with the change over the one without, low, mid and high of the same as predicted)."""
    emulated = emulate(job)
    emulated.write(folder)
    changed = apply(job, change)
    assert changed is not None
    found = predict(context_of(folder), change)
    low, mid, high = (ns / found.measured_ns for ns in (found.low_ns, found.mid_ns, found.high_ns))
    return step_ns(changed.job) / emulated.step_ns, (low, mid, high)


@pytest.mark.parametrize("change", [{"network.bandwidth": "2x"}, {"ddp.comm_dtype": "bf16"}])
@pytest.mark.parametrize("missing", [(3,), (1, 2, 3)])
def test_a_slow_rank_that_is_missing_is_no_slow_network(
    tmp_path: Path, change: dict[str, str], missing: tuple[int, ...]
) -> None:
    job = replace(JOB, recording=replace(JOB.recording, missing=missing))
    truth, (low, _, high) = ratios(job, change, tmp_path)
    assert truth > 0.95
    assert low <= truth <= high


@pytest.mark.parametrize("speed", ["1.3x", "0.8x"])
@pytest.mark.parametrize("missing", [(3,), (1, 2, 3)])
def test_a_slow_rank_that_is_missing_computes_as_much_faster_as_the_others(
    tmp_path: Path, speed: str, missing: tuple[int, ...]
) -> None:
    """It is late in each reduction alike, which looks like a slow network: the range holds both."""
    job = replace(JOB, recording=replace(JOB.recording, missing=missing))
    truth, (low, mid, high) = ratios(job, {"compute": speed}, tmp_path)
    assert truth == pytest.approx(1 / float(speed[:-1]), abs=0.015)
    assert low <= truth <= high
    assert min(truth, 1.0) < mid < max(truth, 1.0)


@pytest.mark.parametrize(("ranks", "missing"), [(4, (2, 3)), (4, (3,)), (4, (0, 1)), (8, (2, 3))])
def test_stages_that_are_missing_come_as_much_less_late_as_all_compute_faster(
    tmp_path: Path, ranks: int, missing: tuple[int, ...]
) -> None:
    job = Job(
        strategy="pipeline", stages=4, ranks=ranks, microbatches=8, noise=0.0, model=Model(blocks=8, tokens=16384),
        network=Network(gbps=300.0), recording=Recording(steps=4, missing=missing),
    )  # fmt: skip
    truth, (low, mid, high) = ratios(job, {"compute": "1.3x"}, tmp_path)
    assert mid == pytest.approx(truth, abs=0.003)
    assert low < truth < high


def test_all_ranks_are_to_be_recorded_before_anything_is_changed(tmp_path: Path) -> None:
    emulate(replace(JOB, recording=replace(JOB.recording, missing=(1, 2, 3)))).write(tmp_path)
    found = perfscope.analyze(tmp_path, workers=1).verdict
    assert "may be waiting for ranks that were not recorded" in found.headline
    assert found.first_action.startswith("Record all ranks. ")


def test_a_recorded_straggler_is_one_whoever_is_missing(tmp_path: Path) -> None:
    emulate(replace(JOB, causes=(Cause("slow compute", 1.4, ranks=(1,)),))).write(tmp_path)
    found = perfscope.analyze(tmp_path, workers=1).verdict
    assert found.headline.startswith("Rank 1 is a straggler")
    assert "not recorded" not in found.headline
    assert not found.first_action.startswith("Record all ranks")
