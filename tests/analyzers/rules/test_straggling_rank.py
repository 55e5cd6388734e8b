"""Stragglers that have a rule of their own are left to it, and the next one is named in their place."""

from __future__ import annotations

from dataclasses import replace

from perfscope.analyzers.rank_steps import RankSteps
from perfscope.analyzers.rules import garbage_collection, straggling_rank
from perfscope.summary import StragglerRow
from tests.analyzers.rules.jobs import account, facts

PAUSES = StragglerRow(rank=0, cause="host", lost_us=20_000.0, confidence="high", ranks=(0,))
SLOW = StragglerRow(rank=1, cause="compute", lost_us=15_000.0, confidence="high", ranks=(1,))


def steps(collecting_us: float) -> RankSteps:
    return RankSteps(
        loading_us=(0.0,) * 8, compute_us=(50_000.0,) * 8, collecting_us=(collecting_us,) * 8, flops=None,
        forward_us=None,
    )  # fmt: skip


def job(collecting_us: float):
    return facts(
        account(0), account(1), stragglers=(PAUSES, SLOW), per_step={0: steps(collecting_us), 1: steps(0.0)}
    )  # fmt: skip


def test_the_next_one_is_named_where_the_worst_collects_garbage():
    finding = straggling_rank.evaluate(job(20_000.0))
    assert finding is not None
    assert finding.title.startswith("Rank 1 makes the others wait 15%")
    assert garbage_collection.evaluate(job(20_000.0)) is not None


def test_collections_that_explain_less_than_half_of_it_are_not_its_cause():
    finding = straggling_rank.evaluate(job(9_000.0))
    assert finding is not None
    assert finding.title.startswith("Rank 0 makes the others wait 20%")


def test_a_job_of_one_straggler_that_collects_has_one_finding():
    assert straggling_rank.evaluate(replace(job(20_000.0), stragglers=(PAUSES,))) is None
