"""Activation checkpointing: what it costs, by the job simulated without it, and how many blocks memory has room for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfscope.analyzers import rules
from perfscope.analyzers.job.extra_work import ExtraCost
from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.memory import recomputation
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Obtained, Prediction
from perfscope.results.rows import MemoryRow
from tests.analyzers.rules.jobs import GIB, QUICK, STEP_US, Analyzed, analyze, breakdown, changed, context, runs
from tests.generator import step_time_ns


@pytest.fixture(scope="module", params=["reentrant", "non_reentrant"])
def again(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(replace(QUICK, recompute=request.param), tmp_path_factory.mktemp(request.param))


def finding_of(job: RuleContext) -> Finding:
    found = recomputation.evaluate(job)
    assert found is not None
    return found


def case(again_us: float = 0.2 * STEP_US, free_gib: float | None = None, **others: object) -> RuleContext:
    """Ten blocks whose activations take a GiB each, at 20 % of the step; the replay saves what they take."""
    cost = ExtraCost(again_us, 10.0, 10.0 * GIB)
    memory = (MemoryRow(rank=0, peak_bytes=GIB, capacity_bytes=80 * GIB, headroom_bytes=int((free_gib or 0) * GIB)),)
    known = {"memory": memory} if free_gib is not None else {}

    def predict(change: dict[str, str]) -> Prediction:
        us = STEP_US - (1 - float(change[recomputation.SETTING])) * again_us
        return Prediction(low=us, mid=us, high=us)

    return context(breakdown(0), **{"recomputation": cost, "predict": predict, **known, **others})


def test_the_prediction_is_the_step_of_the_job_that_stores_its_activations(again: Analyzed) -> None:
    (finding,) = (one for one in again.summary.findings if one.rule == recomputation.RULE)
    truth = step_time_ns(QUICK) / 1e3
    assert finding.predicted_step_us is not None
    assert finding.predicted_step_us.mid == pytest.approx(truth, rel=0.005)
    assert finding.obtained is Obtained.REPLAYED
    assert finding.evidence[0].value == pytest.approx(again.context.step_time_us - truth, rel=0.03)
    assert finding.evidence[1].value == QUICK.model.layers
    assert (finding.action.old, finding.action.new) == ("on", "off")


def test_a_job_that_stores_them_is_silent(tmp_path_factory: pytest.TempPathFactory) -> None:
    job = analyze(QUICK, tmp_path_factory.mktemp("stored"))
    assert job.context.recomputation is None
    assert recomputation.RULE not in job.rules


def test_all_blocks_where_memory_has_room_for_all_but_the_one_that_it_holds_already() -> None:
    finding = finding_of(case(free_gib=9 * 1.1 + 0.01))
    assert finding.whatif == {recomputation.SETTING: "0"}
    assert "About 9.00 GiB more memory" in (finding.action.costs or "")
    assert finding.confidence is Confidence.MEDIUM


def test_as_many_blocks_as_memory_has_room_for() -> None:
    # 10 * 4 / (1.1 * 9) = 4.04 blocks.
    finding = finding_of(case(free_gib=4))
    assert finding.whatif == {recomputation.SETTING: "0.6"}
    assert finding.predicted_step_us is not None
    assert finding.predicted_step_us.mid == pytest.approx(0.92 * STEP_US)
    assert (finding.action.old, finding.action.new) == ("10", "6")
    assert "if number < 4 else checkpoint(block, x" in finding.action.how


def test_silent_where_no_block_fits_and_where_little_is_computed_again() -> None:
    assert recomputation.evaluate(case(free_gib=0.9)) is None
    assert recomputation.evaluate(case(0.049 * STEP_US)) is None
    assert recomputation.evaluate(case(0.051 * STEP_US)) is not None


def test_silent_where_the_replay_saves_little_of_it() -> None:
    """Communication is under it, say."""
    little = Prediction(low=0.9 * STEP_US, mid=0.96 * STEP_US, high=STEP_US)
    assert recomputation.evaluate(case(predict=lambda change: little)) is None


def test_unsure_where_memory_is_not_known() -> None:
    finding = finding_of(case())
    assert finding.confidence is Confidence.LOW
    assert "check that they are free" in (finding.action.costs or "")


def test_what_cannot_be_replayed_is_a_ceiling() -> None:
    finding = finding_of(case(predict=lambda change: None))
    assert finding.obtained is Obtained.BOUNDED
    assert finding.ceiling == pytest.approx(1 / 0.8 - 1)


def test_micro_batches_hold_their_activations_one_after_the_other() -> None:
    finding = finding_of(case(free_gib=80, microbatches=2))
    # Five blocks each, and each of five GiB.
    assert "About 4.00 GiB more memory" in (finding.action.costs or "")


@pytest.mark.parametrize(
    ("settings", "typed"),
    [
        ({"transformers": {"fp16": False}}, "gradient_checkpointing=False"),
        ({"megatron": {"recompute_granularity": "full"}}, "--recompute-granularity selective"),
        ({"accelerate": {"x": 1}, "fsdp": {"version": 2}}, "fsdp_activation_checkpointing: false"),
        ({}, "x = block(x)"),
    ],
)
def test_as_the_framework_writes_it(settings: dict[str, dict[str, object]], typed: str) -> None:
    job = changed(case(free_gib=80), runs=runs(1, **settings))
    assert typed in finding_of(job).action.how


@pytest.mark.parametrize(("free_gib", "first"), [(None, "other"), (40, recomputation.RULE)])
def test_what_may_not_fit_counts_half(monkeypatch: pytest.MonkeyPatch, free_gib: float | None, first: str) -> None:
    """Beside a change that saves 15 %."""
    us = 0.85 * STEP_US
    saves = Prediction(low=us, mid=us, high=us)

    def other(job: RuleContext) -> Finding:
        action, evidence = Action(setting="a", old="b", new="c", how="d"), (Evidence("e", 1.0),)
        return job.finding(
            "other", "f", 0.15 * STEP_US, evidence=evidence, action=action, confidence=Confidence.HIGH, predicted=saves
        )

    monkeypatch.setattr(rules, "RULES", (recomputation.evaluate, other))
    assert next(one.rule for one in rules.evaluate(case(free_gib=free_gib))) == first
