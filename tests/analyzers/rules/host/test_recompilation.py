"""Recompilation: compiling that the recording names, in all steps, in the first ones, on one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.rank.host_activity import COMPILING
from perfscope.analyzers.rules.host import recompilation
from tests.analyzers.rules.jobs import QUICK, Analyzed, analyze
from tests.generator import MS, Pause, simulate

NAME = "_compile.compile_inner (dynamo_timed)"
OFTEN = Pause(steps=(11, 13, 15, 17), pause_ns=4 * MS, name=NAME)
ONE_RANK = Pause(ranks=(1,), steps=(11, 13, 15, 17), pause_ns=6 * MS, name=NAME)


def planted(folder: Path, *pauses: Pause) -> Analyzed:
    return analyze(replace(QUICK, causes=pauses), folder)


@pytest.fixture(scope="module")
def often(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return planted(tmp_path_factory.mktemp("often"), OFTEN)


def test_what_compiles_again_and_again_is_named_with_what_it_costs(often):
    finding = often.summary.findings[0]
    assert finding.rule == recompilation.RULE
    assert "torch.compile compiles in 4 of" in finding.title
    job = simulate(replace(QUICK, causes=(OFTEN,)))
    whole_us = job.truth.step_time_ns / 1e3
    lost_us = job.lost_ns(OFTEN) / 1e3
    assert finding.ceiling == pytest.approx(whole_us / (whole_us - lost_us) - 1, rel=0.1)
    assert (finding.action.setting, finding.action.new) == ("torch.compile(dynamic=…)", "True")
    assert "TORCH_LOGS=recompiles" in finding.action.how
    assert {each.rule for each in often.summary.findings}.isdisjoint({"host-pauses", "straggling-rank"})


def test_its_time_is_host_time_by_that_name(often):
    for row in often.summary.time_breakdown:
        assert row.named_host_us[COMPILING] == pytest.approx(row.idle_host_us, rel=0.1)


def test_one_rank_that_compiles_is_no_unexplained_straggler(tmp_path):
    summary = planted(tmp_path, ONE_RANK).summary
    assert summary.stragglers[0].rank == 1
    assert summary.findings[0].rule == recompilation.RULE
    assert summary.findings[0].evidence[0].ranks == (1,)
    assert "straggling-rank" not in {each.rule for each in summary.findings}


def test_compiling_in_the_first_steps_alone_asks_for_later_ones(often):
    first = {
        rank: replace(each, compiling_us=(9_000.0, 5_000.0, *(0.0,) * (len(each.compiling_us) - 2)))
        for rank, each in often.context.per_step.items()
    }
    finding = recompilation.evaluate(replace(often.context, per_step=first))
    assert finding is not None
    assert "still compiles in the first 2 of" in finding.title
    assert f"--wait {max(often.context.info.steps)}" in finding.action.how


def test_compiling_that_takes_little_is_nothing(tmp_path):
    little = planted(tmp_path, replace(OFTEN, pause_ns=MS // 20)).summary
    assert recompilation.RULE not in {each.rule for each in little.findings}
