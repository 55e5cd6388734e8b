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


@pytest.mark.parametrize("change", [{"network.bandwidth": "2x"}, {"ddp.comm_dtype": "bf16"}])
@pytest.mark.parametrize("missing", [(3,), (1, 2, 3)])
def test_a_slow_rank_that_is_missing_is_no_slow_network(
    tmp_path: Path, change: dict[str, str], missing: tuple[int, ...]
) -> None:
    job = replace(JOB, recording=replace(JOB.recording, missing=missing))
    emulated = emulate(job)
    emulated.write(tmp_path)
    changed = apply(job, change)
    assert changed is not None
    truth = step_ns(changed.job) / emulated.step_ns
    assert truth > 0.95
    found = predict(context_of(tmp_path), change)
    assert found.low_ns / found.measured_ns <= truth <= found.high_ns / found.measured_ns


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
