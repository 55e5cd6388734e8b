"""More micro-batches: what the formula bounds is replayed where the schedule can be written down anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perfscope.analyzers.job.pipelines.table import ideal_bubble_share
from perfscope.analyzers.rules.ranks import pipeline_bubble
from perfscope.results.findings import Finding, Obtained, Severity
from perfscope.results.tables import Pipeline
from tests.analyzers.job.pipelines.pipeline_jobs import FOUR, INTERLEAVED, made, pipeline, stage, waiting
from tests.analyzers.rules.jobs import Analyzed, analyze, changed
from tests.generator import JobSpec, ModelSpec, PipelineSpec, SlowCompute, step_time_ns
from tests.generator.paper import BALANCED

SPEC = pipeline(model=ModelSpec(layers=8, tokens=8192), end_sync=True)


def analyzed(spec: JobSpec, factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(spec, factory.mktemp("pipeline"))


def found(job: Analyzed) -> Finding | None:
    return next((row for row in job.summary.findings if row.rule == "pipeline-bubble"), None)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyzed(SPEC, tmp_path_factory)


def test_the_replay_predicts_what_more_microbatches_bring(job: Analyzed) -> None:
    row = found(job)
    assert row is not None
    assert (row.action.old, row.action.new) == ("8", "24")
    assert row.whatif == {"pipeline.microbatches": "24"}
    assert row.obtained == "replayed"
    assert row.predicted_step_us is not None
    assert row.predicted_step_us.mid < 0.9 * job.summary.job.step_time_us
    assert "Smaller micro-batches" in (row.action.costs or "")


def test_there_is_a_curve(job: Analyzed) -> None:
    curve = next(curve for curve in job.curves if curve.setting == "pipeline.microbatches")
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
    assert row.whatif == {}  # perfscope whatif would refuse it


@pytest.mark.parametrize(("microbatches", "schedule"), [(8, "1f1b"), (8, "gpipe"), (36, "1f1b")])
def test_says_more_where_the_replay_saves_some_per_cent(
    microbatches: int, schedule: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A bubble of 1/9 becomes 1/17 with twice as many; 1/37 cannot become smaller by 3 % of the step."""
    spec = pipeline(
        model=ModelSpec(layers=8, tokens=8192), ranks=2, pipeline=2, microbatches=microbatches,
        schedule=PipelineSpec(schedule=schedule), end_sync=True, steps=2,
    )  # fmt: skip
    row = found(analyzed(spec, tmp_path_factory))
    if microbatches == 36:
        assert row is None
        return
    assert row is not None
    assert row.predicted_step_us is not None
    more = replace(spec, microbatches=16, model=replace(spec.model, tokens=4096))
    truth_us = step_time_ns(more) / 1e3
    assert row.whatif == {"pipeline.microbatches": "16"}
    assert row.predicted_step_us.mid == pytest.approx(truth_us, rel=0.03)
    assert row.severity == Severity.of_share(1 - row.predicted_step_us.mid / (step_time_ns(spec) / 1e3))


def test_a_slow_rank_and_more_microbatches_are_one_plan(tmp_path_factory: pytest.TempPathFactory) -> None:
    slow = replace(SPEC, ranks=8, causes=(SlowCompute(ranks=(1,), factor=1.4),))
    summary = analyzed(slow, tmp_path_factory).summary
    assert summary.plan is not None
    assert set(summary.plan.whatif) == {"rank.1", "pipeline.microbatches"}
    alone = [row.predicted_step_us.mid for row in summary.findings if row.predicted_step_us]
    assert summary.plan.predicted_step_us.mid < min(alone)


def test_reports_what_more_micro_batches_can_bring_at_most() -> None:
    finding = pipeline_bubble.evaluate(waiting(made(FOUR)))
    assert finding is not None
    # 3/11 now; 3/35 with 32 of them, below a tenth for the first time.
    # That would save 20%; nothing reaches its bound, so half of it counts.
    assert (finding.severity, finding.obtained) == (Severity.MEDIUM, Obtained.BOUNDED)
    assert (finding.action.old, finding.action.new) == ("8", "32")
    assert finding.ceiling == pytest.approx((1 - 3 / 35) / (1 - 3 / 11) - 1)
    assert "n_microbatches=32" in finding.action.how
    assert "16%" in finding.action.how  # interleaved: 3/19
    assert "27% is inherent" in finding.title


def test_a_bubble_that_is_filled_in_part_is_not_inherent() -> None:
    """3/11 of the step by the formula; halves of backwards leave 15% of it."""
    case = waiting(made(FOUR))
    assert case.summary.pipeline is not None
    filled = changed(case, pipeline=replace(case.summary.pipeline, bubble_share=0.15))
    finding = pipeline_bubble.evaluate(filled)
    assert finding is not None
    assert finding.title == "The pipeline bubble takes 15% of the step, with 4 stages and 8 micro-batches"


def test_the_bound_is_what_the_same_job_takes_with_more_of_them() -> None:
    # Nothing but matrix products, and messages for nothing: what the formula gives.
    free = replace(BALANCED.network, alpha_ns=0)
    few = replace(BALANCED, network=free)
    many = replace(few, microbatches=8, model=replace(few.model, flops_per_ns=4 * few.model.flops_per_ns))
    known = made([stage(0), stage(1)], microbatches=2, bubble_share=1 / 3, ideal_bubble_share=1 / 3)
    finding = pipeline_bubble.evaluate(waiting(known))
    assert finding is not None
    assert finding.action.new == "8"
    times = [step_time_ns(spec) for spec in (few, many)]
    assert finding.ceiling == pytest.approx(times[0] / times[1] - 1)


@pytest.mark.parametrize(
    "known",
    [
        made(FOUR, microbatches=32, ideal_bubble_share=ideal_bubble_share(4, 32, 1), bubble_share=0.09),
        made(FOUR, microbatches=None, ideal_bubble_share=None),
        made(FOUR, schedule="zero_bubble", ideal_bubble_share=None),
    ],
    ids=["small", "not known", "filled otherwise"],
)
def test_is_silent_where_the_bubble_is_small_or_not_known(known: Pipeline) -> None:
    assert pipeline_bubble.evaluate(waiting(known)) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pipeline": {"schedule": "Schedule1F1B"}}, "schedule = Schedule1F1B(stage, n_microbatches=32)"),
        ({"megatron": {"pipeline_model_parallel_size": 4}}, "--num-layers-per-virtual-pipeline-stage"),
        ({"pipeline": {"schedule": "ScheduleZBVZeroBubble"}}, "ScheduleZBVZeroBubble(stages, n_microbatches=32)"),
        ({"megatron": {"pipeline_model_parallel_size": 4, "micro_batch_size": 8}}, "--micro-batch-size 2"),
        (
            {"megatron": {"pipeline_model_parallel_size": 4, "micro_batch_size": 3, "global_batch_size": 48}},
            "--global-batch-size 192",
        ),
        ({"pipeline": {"implementation": "deepspeed"}}, '"gradient_accumulation_steps": 32'),
    ],
)
def test_names_what_to_type_in_the_framework_s_terms(settings: dict[str, Any], words: str) -> None:
    finding = pipeline_bubble.evaluate(waiting(made(FOUR), settings))
    assert finding is not None
    assert words in finding.action.how
