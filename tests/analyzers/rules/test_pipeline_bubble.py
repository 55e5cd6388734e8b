"""More micro-batches: what the formula bounds is replayed where the schedule can be written down anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfscope.summary import FindingRow
from tests.analyzers.pipeline_jobs import INTERLEAVED, pipeline
from tests.analyzers.rules.jobs import Analyzed, analyze
from tests.generator import JobSpec, ModelSpec, SlowCompute

SPEC = pipeline(model=ModelSpec(layers=8, tokens=8192), end_sync=True)


def analyzed(spec: JobSpec, factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(spec, factory.mktemp("pipeline"))


def found(job: Analyzed) -> FindingRow | None:
    return next((row for row in job.summary.findings if row.rule == "pipeline-bubble"), None)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyzed(SPEC, tmp_path_factory)


def test_the_replay_says_what_more_microbatches_bring(job: Analyzed) -> None:
    row = found(job)
    assert row is not None
    assert (row.action.old, row.action.new) == ("8", "24")
    assert row.whatif == {"pipeline.microbatches": "24"}
    assert row.obtained == "replayed"
    assert row.predicted_step_us is not None
    assert row.predicted_step_us["mid"] < 0.9 * job.summary.job.step_time_us
    assert "Smaller micro-batches" in (row.action.costs or "")


def test_there_is_a_curve(job: Analyzed) -> None:
    curve = next(curve for curve in job.summary.curves if curve.setting == "pipeline.microbatches")
    assert (curve.unit, curve.current) == ("micro-batches", 8.0)
    assert {8.0, 16.0, 32.0} <= {point.value for point in curve.points}
    middle = {point.value: point.mid_us for point in curve.points}
    assert middle[4] > 1.1 * middle[8] > 1.1 * middle[16]
    assert curve.best in (16.0, 24.0, 32.0)


def test_a_schedule_that_cannot_be_written_down_is_bounded_only(tmp_path_factory: pytest.TempPathFactory) -> None:
    row = found(analyzed(replace(SPEC, schedule=INTERLEAVED), tmp_path_factory))
    assert row is not None
    assert row.obtained == "bounded"
    assert row.predicted_step_us is None


def test_small_bubbles_are_left_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    spec = pipeline(model=ModelSpec(layers=8, tokens=1024), ranks=2, pipeline=2, microbatches=16)
    assert found(analyzed(spec, tmp_path_factory)) is None


def test_a_slow_rank_and_more_microbatches_are_one_plan(tmp_path_factory: pytest.TempPathFactory) -> None:
    slow = replace(SPEC, ranks=8, causes=(SlowCompute(ranks=(1,), factor=1.4),))
    summary = analyzed(slow, tmp_path_factory).summary
    assert summary.plan is not None
    assert set(summary.plan.whatif) == {"rank.1", "pipeline.microbatches"}
    alone = [row.predicted_step_us["mid"] for row in summary.findings if row.predicted_step_us]
    assert summary.plan.predicted_step_us["mid"] < min(alone)
