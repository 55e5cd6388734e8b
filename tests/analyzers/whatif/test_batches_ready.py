"""Recorded steps that had batches ready, while loader workers set the pace of all others, on the second simulator.

The trace is of a job that never waits; how long its workers take for a batch, and its unprofiled steps, are of the same
job with slow ones, run on.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from perfscope.analyzers.rules.loading import dataloader_workers
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.results.findings import Finding
from tests.analyzers.measured import advised
from tests.emulator.changes import apply
from tests.emulator.emulate import emulate, step_ns
from tests.emulator.spec import Cause, Job, Loader, Model

QUICK = Job(ranks=2, ranks_per_host=2, noise=0.0, model=Model(blocks=4))
QUICK = replace(QUICK, recording=replace(QUICK.recording, run=True))
LONG = 40


def slow(workers: int, times: float) -> Job:
    """The job with workers that take ``times`` as long for a batch as the training does."""
    return replace(QUICK, loader=Loader(workers=workers, load_ns=round(times * workers * step_ns(QUICK)), jitter=0.02))


def unprofiled(job: Job) -> list[int]:
    return [round(end - begin) for begin, end in pairwise(emulate(long(job)).ends_ns)]


def long(job: Job) -> Job:
    return replace(job, recording=replace(job.recording, steps=LONG))


def recorded(job: Job, folder: Path, steps_ns: list[int]) -> Path:
    """The recording of a few steps of a job with batches ready."""
    emulate(QUICK).write(folder)
    for path in folder.glob("*.run.json"):
        run = json.loads(path.read_text())
        run["dataloaders"][0].update(
            num_workers=job.loader.workers, fetched_batches=10, fetch_ns=10 * job.loader.load_ns
        )
        run["steps"]["unprofiled_ns"] = steps_ns
        path.write_text(json.dumps(run))
    return folder


def context(job: Job, folder: Path, steps_ns: list[int] | None = None) -> Context:
    return context_of(recorded(job, folder, steps_ns or unprofiled(job)))


def found(folder: Path) -> Finding | None:
    return next((each for each in advised(folder).findings if each.rule == dataloader_workers.RULE), None)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_step_is_the_unprofiled_one_and_changes_as_that_does(workers: int, tmp_path: Path) -> None:
    job = slow(workers, 1.7)
    asked = context(job, tmp_path)
    settings = [
        {"dataloader.num_workers": "8"},
        {"dataloader.num_workers": "3"},
        {"compute": "2x"},
        {"compute": "0.8x"},
    ]
    for setting in settings:
        changed = apply(long(job), setting)
        assert changed is not None
        truth, answer = step_ns(changed.job), predict(asked, setting)
        assert answer.mid_ns == pytest.approx(truth, rel=0.05)
        assert answer.low_ns <= truth <= answer.high_ns
        assert answer.measured_ns == pytest.approx(step_ns(long(job)), rel=0.02)


def test_more_workers_are_advised_though_no_recorded_step_waits(tmp_path: Path) -> None:
    job = slow(2, 1.7)
    finding = found(recorded(job, tmp_path, unprofiled(job)))
    assert finding is not None
    assert "unprofiled steps (the recorded ones had more batches ready)" in finding.title
    assert finding.whatif == {"dataloader.num_workers": "4"}
    assert finding.predicted_step_us is not None
    truth = step_ns(replace(job, loader=replace(job.loader, workers=4)))
    assert finding.predicted_step_us.mid * 1e3 == pytest.approx(truth, rel=0.05)
    waited = next(row.value for row in finding.evidence if "blocks an unprofiled step" in row.what)
    assert waited * 1e3 == pytest.approx(step_ns(long(job)) - truth, rel=0.1)


def test_a_rank_whose_loader_alone_is_slow_is_named(tmp_path: Path) -> None:
    job = replace(slow(2, 0.8), causes=(Cause("slow loader", 2.0, (1,)),))
    finding = found(_slow_on_one(job, tmp_path))
    assert finding is not None
    assert "rank 1" in finding.title


def _slow_on_one(job: Job, folder: Path) -> Path:
    recorded(job, folder, unprofiled(job))
    (path,) = [path for path in folder.glob("*.run.json") if json.loads(path.read_text())["rank"] == 1]
    run = json.loads(path.read_text())
    run["dataloaders"][0]["fetch_ns"] *= 2
    path.write_text(json.dumps(run))
    return folder


def test_quick_workers_are_no_reason_for_long_unprofiled_steps(tmp_path: Path) -> None:
    """The machine was busy with something else."""
    long_steps = [round(1.7 * step_ns(QUICK))] * LONG
    asked = context(slow(2, 0.8), tmp_path, long_steps)
    assert asked.ready_ns is None
    assert found(tmp_path) is None


def test_workers_that_take_as_long_as_the_recorded_steps_are_not_too_slow(tmp_path: Path) -> None:
    job = slow(2, 0.97)
    asked = context(job, tmp_path)
    assert asked.ready_ns is None
    assert found(tmp_path) is None
