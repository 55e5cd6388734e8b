"""What all rules share: how sure a finding is, and in which order they come."""

from __future__ import annotations

import pytest

from perfscope.analyzers.job.extra_work import LoopWorkCost
from perfscope.analyzers.job.tables.syncs import SyncRow
from perfscope.analyzers.rules import as_sure_as_findings, evaluate, unprofiled
from perfscope.analyzers.rules.compute import loop_work
from perfscope.analyzers.rules.host import host_syncs
from perfscope.analyzers.rules.loading import dataloader_workers
from perfscope.analyzers.rules.ranks import straggling_rank
from perfscope.results.findings import Confidence, Prediction
from perfscope.results.rows import StragglerRow
from tests.analyzers.rules.jobs import STEP_US, breakdown, changed, context, starved


@pytest.mark.parametrize(
    ("high_share", "confidence"), [(0.9, Confidence.HIGH), (1.1, Confidence.MEDIUM)], ids=["a gain", "perhaps none"]
)
def test_no_advice_is_sure_whose_gain_is_in_doubt(high_share, confidence):
    replayed = Prediction(low=0.5 * STEP_US, mid=0.7 * STEP_US, high=high_share * STEP_US)
    finding, *_ = evaluate(changed(starved(80_000), predict=lambda changes: replayed))
    assert finding.predicted_step_us == replayed
    assert finding.confidence is confidence


@pytest.mark.parametrize(
    ("high_share", "confidence"), [(0.9, Confidence.HIGH), (1.1, Confidence.MEDIUM)], ids=["a gain", "perhaps none"]
)
def test_the_gain_in_doubt_is_that_of_the_step_without_the_profiler(high_share, confidence):
    """Its prediction is what is shown, whatever the profiled step's own was."""
    case = changed(
        starved(80_000), unprofiled_step_us=90_000.0, predict=lambda _: Prediction(low=4e4, mid=5e4, high=6e4),
        predict_unprofiled=lambda _: Prediction(low=45e3, mid=63e3, high=high_share * 90e3),
    )  # fmt: skip
    finding, *_ = unprofiled(evaluate(case), case)
    assert finding.predicted_step_us == Prediction(low=45e3, mid=63e3, high=high_share * 90e3)
    assert finding.confidence is confidence


@pytest.mark.parametrize(
    ("perturbation", "confidence"),
    [(None, Confidence.HIGH), (1.2, Confidence.HIGH), (1.3, Confidence.MEDIUM), (3.6, Confidence.LOW)],
)
def test_no_finding_is_surer_than_its_recording(perturbation, confidence):
    (finding,) = evaluate(changed(starved(80_000), perturbation=perturbation))
    assert finding.confidence is confidence


@pytest.mark.parametrize(
    ("perturbation", "high_share", "confidence"),
    [(None, 0.9, "high"), (None, 1.1, "medium"), (1.3, 0.9, "medium"), (3.6, 0.9, "low")],
)
def test_no_straggler_is_surer_than_its_finding_or_its_recording(perturbation, high_share, confidence):
    late = StragglerRow(rank=0, cause="host", lost_us=10_000, confidence="high", ranks=(0,))
    replayed = Prediction(low=0.8 * STEP_US, mid=0.9 * STEP_US, high=high_share * STEP_US)
    case = changed(starved(0), stragglers=(late,), perturbation=perturbation, predict=lambda changes: replayed)
    findings = evaluate(case)
    assert straggling_rank.RULE in [finding.rule for finding in findings]
    assert [row.confidence for row in as_sure_as_findings((late,), findings, case)] == [confidence]


def test_a_replay_that_gains_more_raises_the_bound():
    case = changed(
        starved(10_000), predict=lambda settings: Prediction(low=50e3, mid=50e3, high=50e3) if settings else None
    )
    gains = {
        finding.rule: (finding.ceiling, STEP_US / finding.predicted_step_us.mid - 1)
        for finding in evaluate(case)
        if finding.predicted_step_us is not None
    }
    assert gains["dataloader-workers"] == pytest.approx((1.0, 1.0))


def test_a_rules_own_prediction_raises_the_bound_too():
    """Where a rule knows better than the replay, its bound must not be below what it predicts itself."""
    case = changed(starved(10_000), predict=lambda settings: Prediction(low=20e3, mid=20e3, high=20e3))
    for finding in evaluate(case):
        if finding.predicted_step_us is not None and finding.ceiling is not None:
            assert finding.ceiling >= STEP_US / finding.predicted_step_us.mid - 1 - 1e-9


SYNC = SyncRow(
    call="cudaStreamSynchronize",
    operator="aten::item",
    inside="",
    idle_us=4_000.0,
    delayed_us=4_000.0,
    count_per_step=1.0,
    ranks=(0,),
)


@pytest.mark.parametrize(("saved", "severity"), [(0.02, "low"), (0.1, "medium"), (0.3, "high")])
def test_a_replay_that_gains_more_makes_a_finding_more_severe(saved, severity):
    """Devices are seen idle for 4 % of the step, and more follows from that."""
    mid = (1 - saved) * STEP_US
    case = changed(
        context(breakdown(0, idle_sync=4_000.0), syncs=(SYNC,)),
        predict=lambda settings: Prediction(low=mid, mid=mid, high=mid) if settings else None,
    )
    (found,) = (finding for finding in evaluate(case) if finding.rule == host_syncs.RULE)
    assert found.severity.value == severity


def test_findings_come_worst_first():
    late = StragglerRow(rank=0, cause="host", lost_us=10_000, confidence="high")
    case = changed(starved(80_000), stragglers=(late,))
    assert [finding.rule for finding in evaluate(case)] == [dataloader_workers.RULE, straggling_rank.RULE]


@pytest.mark.parametrize(("late_saves", "first"), [(0.33, dataloader_workers.RULE), (0.2, host_syncs.RULE)])
def test_waits_that_only_show_slow_loading_come_behind_it(late_saves, first):
    """Without the waits 40 % are saved: hosts run ahead of the loader, which takes as long as before."""
    saves = {"host.sync": 0.4, "dataloader.num_workers": late_saves}

    def predict(settings):
        mid = (1 - sum(saves.get(name, 0.0) for name in settings)) * STEP_US
        return Prediction(low=0.9 * mid, mid=mid, high=1.01 * mid)

    loading = starved(40_000)
    idle = breakdown(0, idle_sync=5_000.0, idle_dataloader=40_000.0)
    case = changed(loading, time_breakdown=(idle,), syncs=(SYNC,), predict=predict)
    found = [finding.rule for finding in evaluate(case)]
    assert set(found) >= {dataloader_workers.RULE, host_syncs.RULE}
    assert found[0] == first


@pytest.mark.parametrize(
    ("unprofiled_us", "least_us"),
    [(80_000.0, 50_000.0), (50_000.0, 20_000.0), (38_000.0, 26_600.0), (None, 70_000.0)],
    ids=["as long in a shorter step", "most of it", "the profiler's doing", "no such step was timed"],
)
def test_what_the_profiler_makes_no_longer_is_a_larger_share_without_it(unprofiled_us, least_us):
    """Batches made on the training thread take 30 of 100 ms of a recorded step: at most 1.43x, as there, or more."""
    case = changed(starved(30_000), unprofiled_step_us=unprofiled_us)
    finding, *_ = unprofiled((dataloader_workers.evaluate(case),), case)
    assert finding.rule == dataloader_workers.RULE
    assert finding.ceiling is not None
    assert case.info.step_us / (1 + finding.ceiling) == pytest.approx(least_us)


def test_of_small_operators_a_part_is_the_profilers():
    """Loops take 40 of 100 ms; of 64 without the profiler between 25.6, the same share, and 40: 32."""
    loops = LoopWorkCost("loops of the model", 40_000.0, 0.0, ("aten::select",), of_model=True)
    case = context(breakdown(0), loop_work=(loops,), unprofiled_step_us=64_000.0)
    (finding,) = unprofiled((loop_work.evaluate(case),), case)
    assert finding.ceiling == pytest.approx(64 / 32 - 1)


@pytest.mark.parametrize(("saved", "shown"), [(0.3, True), (0.006, True), (0.004, False), (0.0, False), (-0.2, False)])
def test_a_change_that_makes_the_step_no_faster_is_not_shown(saved, shown):
    """Neither by the recorded step, nor by the one without the profiler, which takes 90 of its 100 ms."""

    def takes(us: float) -> Prediction:
        return Prediction(low=0.1 * us, mid=us / (1 + saved), high=2 * us)

    recorded = changed(starved(80_000), predict=lambda _: takes(STEP_US))
    assert bool(evaluate(recorded)) is shown
    case = changed(
        starved(80_000), unprofiled_step_us=90_000.0, predict=lambda _: Prediction(low=5e4, mid=5e4, high=5e4),
        predict_unprofiled=lambda _: takes(90_000.0),
    )  # fmt: skip
    assert evaluate(case)
    assert bool(unprofiled(evaluate(case), case)) is shown
