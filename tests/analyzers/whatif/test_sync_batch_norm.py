"""Synchronized batch normalizations on jobs of the emulator: their collectives are no gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.whatif.change import CannotReplay
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.analyzers.measured import advised
from tests.emulator.changes import apply
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import US, Job, Model, Network, Recording

NORMS = Job(
    ranks=4, norms="synchronized", noise=0.005, bucket_mb=10.0, gradient_bytes=2,
    network=Network(latency_ns=100 * US), model=Model(blocks=6, tokens=4096), recording=Recording(steps=4),
)  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("norms")
    emulate(NORMS).write(folder)
    return folder


@pytest.mark.parametrize(
    "change", [{"batch_norm.sync": "false"}, {"ddp.bucket_cap_mb": "25"}, {"ddp.bucket_cap_mb": "50"}], ids=str
)
def test_the_prediction_comes_true(recorded: Path, change: dict[str, str]) -> None:
    found, truth = predict(context_of(recorded), change), step_ns(apply(NORMS, change).job)
    assert found.mid_ns == pytest.approx(truth, rel=0.04)
    assert found.low_ns <= truth <= found.high_ns


def test_what_they_cost_is_told(recorded: Path) -> None:
    summary = advised(recorded)
    assert summary.job.strategies == ("ddp",), "gathered statistics are no context parallelism"
    finding = next(each for each in summary.findings if each.rule == "sync-batch-norm")
    assert finding.title.startswith("Synchronized batch normalization (12 collectives per step")
    assert finding.predicted_step_us is not None
    truth_us = step_ns(replace(NORMS, norms="own")) / 1e3
    assert finding.predicted_step_us.mid == pytest.approx(truth_us, rel=0.03)


def test_without_them_there_is_nothing_to_leave_out(tmp_path: Path) -> None:
    emulate(replace(NORMS, norms="own")).write(tmp_path)
    with pytest.raises(CannotReplay, match="no collectives of synchronized batch normalizations"):
        predict(context_of(tmp_path), {"batch_norm.sync": "false"})
    assert "sync-batch-norm" not in {each.rule for each in advised(tmp_path).findings}
