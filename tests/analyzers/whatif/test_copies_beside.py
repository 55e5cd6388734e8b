"""Batches copied on a stream of their own: how long that takes bounds the step, and hides none of its windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.rules.memory import batch_copies
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from tests.analyzers.measured import advised, measured
from tests.emulator.changes import apply
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import MIB, MS, Job, Loader, Model

AHEAD = Loader(load_ns=1 * MS, ahead=True)
JOB = Job(ranks=2, model=Model(blocks=4, tokens=4096), loader=AHEAD)


def copying(mib: int) -> Job:
    return replace(JOB, loader=replace(AHEAD, batch_bytes=mib * MIB))


@pytest.mark.parametrize("mib", [20, 60, 120, 200])
def test_steps_take_what_they_take_however_far_the_copies_are_ahead(mib: int, tmp_path: Path) -> None:
    job = copying(mib)
    emulate(job).write(tmp_path)
    steps = measured(tmp_path).job
    assert steps.step_time_us * 1e3 == pytest.approx(step_ns(job), rel=0.01)


@pytest.mark.parametrize("setting", [{"compute": "2x"}, {"compute": "4x"}, {"compute": "0.5x"}], ids=str)
@pytest.mark.parametrize("mib", [20, 60, 120, 200, 300])
def test_faster_computation_gains_no_more_than_the_copies_leave(
    mib: int, setting: dict[str, str], tmp_path: Path
) -> None:
    job = copying(mib)
    changed = apply(job, setting)
    assert changed is not None
    emulate(job).write(tmp_path)
    found, truth = predict(context_of(tmp_path, workers=1), setting), step_ns(changed.job)
    assert found.mid_ns == pytest.approx(truth, rel=0.02)
    assert found.low_ns <= truth <= found.high_ns


@pytest.mark.parametrize("mib", [60, 200])
def test_hosts_that_do_not_wait_issue_the_copy_a_step_earlier(mib: int, tmp_path: Path) -> None:
    """The loss is read in every step, after which the next batch is copied."""
    job = replace(copying(mib), item_every=1)
    emulated = emulate(job)
    emulated.write(tmp_path)
    truth = step_ns(replace(job, item_every=0))
    found = predict(context_of(tmp_path, workers=1), {"host.sync": "0"})
    assert found.mid_ns == pytest.approx(truth, rel=0.02)
    assert found.low_ns <= truth <= found.high_ns


def test_a_stream_of_its_own_is_not_advised_where_there_is_one(tmp_path: Path) -> None:
    emulate(copying(200)).write(tmp_path)
    (finding,) = (each for each in advised(tmp_path).findings if each.rule == batch_copies.RULE)
    assert finding.action.how.startswith("Copy fewer bytes per batch.")
    assert "torch.cuda.Stream()" not in finding.action.how
