"""Uneven work: ranks that take turns at being slow because they have more to compute, and those that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfscope.analyzers.facts import JobFacts
from perfscope.analyzers.rules import imbalanced_work, straggling_rank
from tests.analyzers.rules.jobs import QUICK, Analyzed, analyze
from tests.generator import SlowCompute

TURNS = tuple(SlowCompute(ranks=(step % 4,), steps=(step,), factor=1.4 + 0.1 * (step % 3)) for step in range(10, 18))


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    """Kernels of one rank after another are slow, on the same shapes."""
    return analyze(replace(QUICK, causes=TURNS), tmp_path_factory.mktemp("turns"))


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(replace(QUICK, causes=(SlowCompute(ranks=(2,), factor=1.4),)), tmp_path_factory.mktemp("steady"))


def with_flops(facts: JobFacts, *, uneven: bool) -> JobFacts:
    """As if each step's FLOPs followed what it took (``uneven``), or as if there were no shapes."""
    steps = {
        rank: replace(steps, flops=tuple(us * 1e6 for us in steps.compute_us) if uneven else None)
        for rank, steps in facts.per_step.items()
    }
    return replace(facts, per_step=steps)


def test_the_job_s_ranks_are_found_slow_in_turn(in_turn):
    assert in_turn.facts.stragglers[0].pattern == "rotating"
    assert in_turn.facts.stragglers[0].cause == "compute"


def test_with_more_flops_where_it_is_slow_the_work_is_uneven(in_turn):
    facts = with_flops(in_turn.facts, uneven=True)
    finding = imbalanced_work.evaluate(facts)
    assert finding is not None
    assert finding.confidence == "high"
    assert finding.predicted_step_ns.mid / 1e3 == pytest.approx(
        facts.step_time_us - facts.stragglers[0].lost_us, rel=1e-6
    )
    values = {row.what: row.value for row in finding.evidence}
    assert values["ranks that were the one with most"] == 4
    assert "pack samples to one length" in finding.action.how
    assert straggling_rank.evaluate(facts) is None


def test_without_shapes_forward_and_backward_tell(in_turn):
    finding = imbalanced_work.evaluate(with_flops(in_turn.facts, uneven=False))
    assert finding is not None
    assert finding.confidence == "medium"
    assert any("the rest of the computation" in row.what for row in finding.evidence)


def test_equal_flops_are_equal_work_whatever_they_take(in_turn):
    assert imbalanced_work.evaluate(in_turn.facts) is None
    assert straggling_rank.evaluate(in_turn.facts) is not None


def test_one_rank_that_is_always_slow_is_not_this(steady):
    assert imbalanced_work.evaluate(with_flops(steady.facts, uneven=True)) is None


def test_a_straggler_with_more_work_is_told_so(steady):
    finding = straggling_rank.evaluate(with_flops(steady.facts, uneven=True))
    assert finding is not None
    assert "1.4" in finding.action.how
    assert "nothing is wrong with its device" in finding.action.how
    same = straggling_rank.evaluate(steady.facts)
    assert same is not None
    assert "clocks, power" in same.action.how


def test_megatron_s_arguments_name_experts_only_where_there_are_some(in_turn):
    facts = with_flops(in_turn.facts, uneven=True)
    dense = replace(facts, runs=in_turn.told(megatron={"expert_model_parallel_size": 1}).runs)
    assert "--moe" not in imbalanced_work.evaluate(dense).action.how
    experts = replace(facts, runs=in_turn.told(megatron={"expert_model_parallel_size": 8}).runs)
    assert "--moe-aux-loss-coeff" in imbalanced_work.evaluate(experts).action.how
