"""A network that is slow in some steps: named, and still so with fewer or other bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import perfscope
from perfscope.analyzers.rules.communication import slow_transfers
from perfscope.analyzers.whatif.change import CannotReplay
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.emulator import Job, Model, Network, Recording, emulate, step_ns
from tests.emulator.changes import apply

BUSY = Job(
    ranks=2, noise=0.005, gradient_bytes=4, bucket_mb=4, model=Model(blocks=4, tokens=4096),
    network=Network(gbps=300.0, busy_every=4, busy_times=25.0), recording=Recording(steps=8),
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"network.slow_steps": "0"},
        {"network.bandwidth": "2x"},
        {"ddp.comm_dtype": "bf16"},
        {"ddp.bucket_cap_mb": "16"},
    ],
    ids=str,
)
def test_steps_in_which_the_network_is_slow_stay_slow(tmp_path: Path, change: dict[str, str]) -> None:
    emulated = emulate(BUSY)
    emulated.write(tmp_path)
    changed = apply(BUSY, change)
    assert changed is not None
    truth = step_ns(changed.job) / emulated.step_ns
    found = predict(context_of(tmp_path), change)
    assert found.mid_ns / found.measured_ns == pytest.approx(truth, rel=0.05)
    assert found.low_ns / found.measured_ns <= truth <= found.high_ns / found.measured_ns


def test_they_are_the_headline_where_they_cost_most(tmp_path: Path) -> None:
    emulate(BUSY).write(tmp_path)
    finding = perfscope.analyze(tmp_path, workers=1).findings[0]
    assert finding.rule == slow_transfers.RULE
    assert finding.title.startswith("In 2 of 8 steps all transfers take ")
    assert finding.whatif == {"network.slow_steps": "0"}


@pytest.mark.parametrize("network", [Network(gbps=60.0), Network(gbps=60.0, busy_every=4, busy_times=1.3)])
def test_transfers_that_take_about_as_long_in_all_steps_are_not_slow_in_some(tmp_path: Path, network: Network) -> None:
    emulate(replace(BUSY, network=network)).write(tmp_path)
    with pytest.raises(CannotReplay, match="about as long in all"):
        predict(context_of(tmp_path), {"network.slow_steps": "0"})
