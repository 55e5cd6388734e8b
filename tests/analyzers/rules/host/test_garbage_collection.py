"""Planned garbage collection: pauses that the recording names, and what they cost by replay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfscope.analyzers.rules.host import garbage_collection
from perfscope.recording.vocabulary import GARBAGE_COLLECTION
from tests.analyzers.rules.jobs import QUICK, Analyzed, analyze
from tests.generator import MS, Pause, RotatingPause, simulate, step_time_ns

IN_TURN = RotatingPause(pause_ns=2 * MS, steps=tuple(range(11, 18)), name=GARBAGE_COLLECTION)


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(replace(QUICK, causes=(IN_TURN,)), tmp_path_factory.mktemp("turn"))


@pytest.fixture(scope="module")
def unnamed(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    return analyze(replace(QUICK, causes=(replace(IN_TURN, name=None),)), tmp_path_factory.mktemp("unnamed"))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    pause = Pause(ranks=(1,), steps=(12, 15), pause_ns=6 * MS, name=GARBAGE_COLLECTION)
    return analyze(replace(QUICK, causes=(pause,)), tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    pause = Pause(pause_ns=1 * MS, name=GARBAGE_COLLECTION)
    return analyze(replace(QUICK, causes=(pause,)), tmp_path_factory.mktemp("together"))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    pause = replace(IN_TURN, pause_ns=MS // 20)
    return analyze(replace(QUICK, causes=(pause,)), tmp_path_factory.mktemp("short"))


def test_pauses_in_turn_are_one_finding_with_the_truth_as_prediction(in_turn):
    (finding,) = in_turn.summary.findings
    assert finding.rule == garbage_collection.RULE
    job = simulate(replace(QUICK, causes=(IN_TURN,)))
    fixed_us = job.truth.step_time_ns / 1e3 - job.lost_ns(IN_TURN) / 1e3
    assert finding.predicted_step_us.mid == pytest.approx(fixed_us, rel=0.03)
    assert (finding.obtained, finding.severity) == ("replayed", "high")
    assert "all ranks" in finding.title
    assert finding.action.how.startswith("Collect garbage on all ranks at the same step, every 500 steps, instead of")
    assert "gc.freeze()\ngc.disable()" in finding.action.how
    assert "if step % 500 == 0:\n    gc.collect()" in finding.action.how


def test_collections_on_all_ranks_at_once_are_found_too(together):
    """Nobody straggles: the step is simply longer."""
    (finding,) = together.summary.findings
    assert finding.rule == garbage_collection.RULE
    without = step_time_ns(QUICK) / 1e3
    assert finding.predicted_step_us.mid == pytest.approx(without, rel=0.03)
    assert finding.whatif == {"host.gc": "0"}


def test_one_rank_is_named(one_rank):
    (finding,) = one_rank.summary.findings
    assert finding.rule == garbage_collection.RULE
    assert "pauses rank 1" in finding.title


def test_pauses_without_a_name_are_a_straggler_s(unnamed):
    assert garbage_collection.evaluate(unnamed.context) is None
    assert "straggling-rank" in unnamed.rules


def test_short_collections_are_silent(short):
    assert any(any(steps.collecting_us) for steps in short.context.per_step.values())
    assert garbage_collection.evaluate(short.context) is None


def test_megatron_has_arguments_for_it(in_turn):
    finding = garbage_collection.evaluate(in_turn.with_settings(megatron={"data_parallel_size": 4}))
    assert finding is not None
    assert finding.action.how.splitlines()[1] == "--manual-gc --manual-gc-interval 500"


@pytest.mark.parametrize(
    ("pauses", "said"), [((900.0,) * 8, True), ((900.0,) * 7 + (0.0,), False), ((100.0,) * 7 + (6500.0,), False)]
)
def test_collections_in_every_step_may_be_the_script_s_own(together, pauses, said):
    steps = {rank: replace(each, collecting_us=pauses) for rank, each in together.context.per_step.items()}
    finding = garbage_collection.evaluate(replace(together.context, per_step=steps))
    assert ("if the script calls gc.collect() itself" in finding.action.how.splitlines()[0]) is said
