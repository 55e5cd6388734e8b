"""Generated jobs that differ in one planted thing: the comparison names that and its size, and nothing else."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import perfscope
from perfscope.errors import UnusableInput
from perfscope.results.comparison import Comparison, Difference
from perfscope.results.history import History, HistoryBin
from perfscope.results.summary import Summary
from tests.analyzers.measured import advised, measured
from tests.generator import (
    MS,
    HostSync,
    JobSpec,
    LoaderSpec,
    ModelSpec,
    NetworkSpec,
    SlowCompute,
    SlowHost,
    SlowLink,
    SlowLoader,
    simulate,
)

STEADY = JobSpec(
    ranks=4, steps=8, model=ModelSpec(tokens=2048), end_sync=True, network=NetworkSpec(busbw_gbps=600.0), noise=0.02,
    loader=LoaderSpec(workers=1),
)  # fmt: skip
"""Steps of about 3.4 ms whose kernels vary by 2 %."""

SMALL = replace(STEADY, ranks=2, model=ModelSpec(tokens=2048, layers=2), noise=0.1)
"""Quick to make, for many seeds."""

Analyzed = Callable[[JobSpec], tuple[Summary, float]]


@pytest.fixture(scope="module")
def analyzed(tmp_path_factory: pytest.TempPathFactory) -> Analyzed:
    """Summary and true step time (µs) of a job; each is made once."""
    made: dict[str, tuple[Summary, float]] = {}

    def analyze(spec: JobSpec) -> tuple[Summary, float]:
        key = repr(spec)
        if key not in made:
            folder = tmp_path_factory.mktemp("job")
            job = simulate(spec)
            job.write(folder, compress=False)
            made[key] = advised(folder), job.truth.step_time_ns / 1e3
        return made[key]

    return analyze


def _compared(analyzed: Analyzed, baseline: JobSpec, candidate: JobSpec) -> tuple[Difference, float]:
    """The difference, and the true one in µs."""
    (first, then), (second, now) = analyzed(baseline), analyzed(candidate)
    return perfscope.compare(first, second).differences[0], now - then


def _real(difference: Difference) -> set[str]:
    return {row.name for row in difference.categories if row.significant}


def _agrees(difference: Difference, truth_us: float, rows: set[str]) -> None:
    """The true difference is of all steps; what is advised, of those that are like the others."""
    step = difference.step
    assert step.candidate_mean_us - step.baseline_mean_us == pytest.approx(truth_us, rel=0.05)
    assert _real(difference) == rows == set(difference.causes)
    named = sum(row.delta_us for row in difference.categories if row.name in rows)
    assert named == pytest.approx(step.delta_us, rel=0.05)


PLANTED = {
    "compute": (replace(STEADY, seed=1, causes=(SlowCompute(factor=1.2),)), {"compute"}),
    "link": (replace(STEADY, seed=1, causes=(SlowLink(factor=6.0),)), {"exposed_comm_transfer"}),
    "loader": (replace(STEADY, seed=1, causes=(SlowLoader(load_ns=7 * MS),)), {"idle_dataloader"}),
    "layers": (replace(STEADY, seed=1, model=replace(STEADY.model, layers=STEADY.model.layers + 2)), {"compute"}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_named_with_its_size(analyzed: Analyzed, name: str) -> None:
    spec, rows = PLANTED[name]
    difference, truth = _compared(analyzed, STEADY, spec)
    assert difference.step.verdict == "slower"
    _agrees(difference, truth, rows)


@pytest.mark.parametrize("name", PLANTED)
def test_taking_it_away_is_as_much_faster(analyzed: Analyzed, name: str) -> None:
    spec, rows = PLANTED[name]
    difference, truth = _compared(analyzed, spec, STEADY)
    assert difference.step.verdict == "faster"
    _agrees(difference, truth, rows)


def test_a_launch_bound_host_shows_as_launch_bound_time(analyzed: Analyzed) -> None:
    difference, truth = _compared(analyzed, STEADY, replace(STEADY, seed=1, causes=(SlowHost(factor=20.0),)))
    largest = max(difference.categories, key=lambda row: row.delta_us)
    assert (largest.name, largest.significant) == ("idle_launch", True)
    assert difference.step.delta_us == pytest.approx(truth, rel=0.05)


def test_half_of_the_ranks_stand_out_and_not_those_that_did_not_change(analyzed: Analyzed) -> None:
    """Of changes of 0, 0, 1 and 2 the median is 0.5, from which all four differ."""
    causes = (SlowCompute(ranks=(1,), factor=1.3), SlowCompute(ranks=(3,), factor=1.8))
    difference, _ = _compared(analyzed, STEADY, replace(STEADY, seed=1, causes=causes))
    assert [rank.rank for rank in difference.ranks if rank.stands_out] == [1, 3]


def test_one_slow_rank_stands_out(analyzed: Analyzed) -> None:
    slow = SlowCompute(ranks=(2,), factor=1.3)
    difference, truth = _compared(analyzed, STEADY, replace(STEADY, seed=1, causes=(slow,)))
    assert difference.step.delta_us == pytest.approx(truth, rel=0.05)
    assert [rank.rank for rank in difference.ranks if rank.stands_out] == [2]
    assert {"exposed_comm_wait", "compute"} <= _real(difference)
    assert [(change.rule, change.status) for change in difference.findings] == [("straggling-rank", "new")]


def test_kernels_that_got_slower_and_those_called_more_often_are_distinguished(analyzed: Analyzed) -> None:
    slower, _ = _compared(analyzed, STEADY, PLANTED["compute"][0])
    more, _ = _compared(analyzed, STEADY, PLANTED["layers"][0])
    longer, oftener = (
        next(change for change in difference.kernels if "gemm" in change.name) for difference in (slower, more)
    )
    assert longer.significant
    assert longer.from_duration_us == pytest.approx(longer.delta_us, rel=0.02)
    assert oftener.significant
    assert oftener.from_count_us == pytest.approx(oftener.delta_us, rel=0.05)


def test_collectives_on_a_slow_link_lose_bandwidth(analyzed: Analyzed) -> None:
    difference, _ = _compared(analyzed, STEADY, PLANTED["link"][0])
    found = [change for change in difference.collectives if change.significant]
    assert found
    for change in found:
        assert change.baseline_transfer_us is not None
        assert change.candidate_transfer_us is not None
        start_us = STEADY.network.alpha_ns / 1e3
        expected = start_us + 6 * (change.baseline_transfer_us - start_us)
        assert change.candidate_transfer_us == pytest.approx(expected, rel=0.05)


def test_collectives_are_judged_by_their_own_noise_and_not_the_steps(analyzed: Analyzed) -> None:
    """The backward hides them all but the last, so that the step is no slower than its noise."""
    difference, _ = _compared(analyzed, STEADY, replace(STEADY, seed=1, causes=(SlowLink(factor=1.4),)))
    assert difference.step.verdict == "same"
    assert difference.step.noise_us is not None
    found = [change for change in difference.collectives if change.significant]
    assert len(found) >= 2
    assert all(change.delta_us < difference.step.noise_us for change in found)
    assert _real(difference) <= {"exposed_comm_transfer"}


def test_other_buckets_are_gone_and_new(analyzed: Analyzed) -> None:
    difference, _ = _compared(analyzed, STEADY, replace(STEADY, seed=1, bucket_bytes=100 << 20))
    assert {change.status for change in difference.collectives} >= {"gone", "new"}
    baseline, candidate = (
        sum(getattr(c, f"{when}_us") for c in difference.collectives) for when in ("baseline", "candidate")
    )
    assert sum(change.delta_us for change in difference.collectives) == pytest.approx(candidate - baseline)


def test_one_more_sync_changes_no_other_category(analyzed: Analyzed) -> None:
    synced = replace(STEADY, seed=1, causes=(HostSync(),))
    difference, _ = _compared(analyzed, STEADY, synced)
    assert not _real(difference) & {"compute", "exposed_copy", "idle_dataloader"}


def _without_advice(spec: JobSpec, folder: Path) -> Summary:
    simulate(spec).write(folder, compress=False)
    return measured(folder)


def test_seeds_alone_are_no_change(tmp_path: Path) -> None:
    """Pairs of seven seeds, with the floor and without: no claim about the step, a category, a kernel or a rank."""
    summaries = [_without_advice(replace(SMALL, seed=seed), tmp_path / str(seed)) for seed in range(7)]
    pairs = list(itertools.combinations(summaries, 2))
    alarms = 0
    for baseline, candidate in pairs:
        for noise in (0.02, 0.0):
            difference = perfscope.compare(baseline, candidate, noise=noise).differences[0]
            alarms += difference.step.verdict != "same"
            alarms += any(
                change.significant for change in (*difference.categories, *difference.kernels, *difference.collectives)
            )
            alarms += any(rank.stands_out for rank in difference.ranks)
    assert alarms <= 0.02 * len(pairs) * 2


def test_seeds_alone_make_no_rank_stand_out(tmp_path: Path) -> None:
    seeds = range(100, 105)
    summaries = [_without_advice(replace(SMALL, ranks=4, seed=seed), tmp_path / str(seed)) for seed in seeds]
    for baseline, candidate in itertools.combinations(summaries, 2):
        difference = perfscope.compare(baseline, candidate, noise=0.0).differences[0]
        assert [rank.rank for rank in difference.ranks if rank.stands_out] == []


def test_everything_adds_up(analyzed: Analyzed) -> None:
    for spec, _ in PLANTED.values():
        difference, _ = _compared(analyzed, STEADY, spec)
        difference.self_check()
        total = math.fsum(row.delta_us for row in difference.categories)
        assert total == pytest.approx(difference.step.delta_us, rel=1e-12, abs=1e-9)
        path = math.fsum(row.delta_us for row in difference.path)
        step = difference.step
        assert path == pytest.approx(step.candidate_mean_us - step.baseline_mean_us, rel=1e-9)


def test_several_runs_are_each_compared_with_the_first(analyzed: Analyzed) -> None:
    runs = [analyzed(STEADY)[0], analyzed(PLANTED["compute"][0])[0], analyzed(replace(STEADY, seed=5))[0]]
    comparison = perfscope.compare(*runs)
    assert [difference.step.verdict for difference in comparison.differences] == ["slower", "same"]
    assert len({run.label for run in comparison.runs}) == 3
    assert comparison.scaling is None


def test_what_baselines_differ_by_is_noise(analyzed: Analyzed) -> None:
    steady, slower = analyzed(STEADY)[0], analyzed(PLANTED["compute"][0])[0]
    alone = perfscope.compare(steady, slower)
    with_another = perfscope.compare(steady, slower, baselines=[slower])
    assert alone.differences[0].step.verdict == "slower"
    step = with_another.differences[0].step
    assert step.floor_us == pytest.approx(slower.job.step_time_us - steady.job.step_time_us)
    assert "2 recordings" in step.floor_from


def _scaled(analyzed: Analyzed, *specs: JobSpec) -> Comparison:
    return perfscope.compare(*(analyzed(spec)[0] for spec in specs))


def test_weak_scaling_loses_what_the_network_takes(analyzed: Analyzed) -> None:
    two, four = replace(STEADY, ranks=2), replace(STEADY, ranks=4)
    scaling = _scaled(analyzed, four, two).scaling
    assert scaling is not None
    assert scaling.work_from == "model FLOPs"
    base, row = scaling.rows
    assert (base.devices, base.kind, base.efficiency) == (2, "base", 1.0)
    assert (row.devices, row.kind) == (4, "weak")
    truth = analyzed(two)[1] / analyzed(four)[1]
    assert row.efficiency == pytest.approx(truth, rel=0.01)
    assert row.speedup == pytest.approx(2 * truth, rel=0.01)
    assert math.fsum(row.lost_us.values()) == pytest.approx(row.step_time_us - row.ideal_step_us)


def test_strong_scaling_is_recognized_by_the_work(analyzed: Analyzed) -> None:
    two = replace(STEADY, ranks=2)
    four = replace(STEADY, ranks=4, model=replace(STEADY.model, tokens=1024))
    scaling = _scaled(analyzed, two, four).scaling
    assert scaling is not None
    row = scaling.rows[1]
    assert (row.kind, row.work_ratio) == ("strong", pytest.approx(0.5, rel=0.01))
    assert row.efficiency == pytest.approx(0.5 * analyzed(two)[1] / analyzed(four)[1], rel=0.01)
    assert row.efficiency < 1


def test_a_summary_from_a_file_is_as_good(analyzed: Analyzed, tmp_path: Path) -> None:
    first, second = analyzed(STEADY)[0], analyzed(PLANTED["link"][0])[0]
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for path, summary in zip(files, (first, second), strict=True):
        path.write_text(json.dumps(summary.to_dict(), sort_keys=True))
    comparison = perfscope.compare(*files)
    assert comparison.differences == perfscope.compare(first, second).differences
    assert [run.label for run in comparison.runs] == ["before", "after"]


def test_to_dict_is_json(analyzed: Analyzed) -> None:
    document = perfscope.compare(analyzed(STEADY)[0], analyzed(PLANTED["link"][0])[0]).to_dict()
    assert document["schema"] == "perfscope.comparison/1"
    assert json.loads(json.dumps(document, allow_nan=False))["differences"][0]["step"]["verdict"] == "slower"


def test_one_recording_cannot_be_compared(analyzed: Analyzed) -> None:
    with pytest.raises(UnusableInput, match="name a second one"):
        perfscope.compare(analyzed(STEADY)[0])


def test_too_few_steps_are_not_judged(analyzed: Analyzed) -> None:
    one = replace(STEADY, steps=1)
    difference, _ = _compared(analyzed, one, replace(one, seed=1, causes=(SlowCompute(factor=1.5),)))
    assert difference.step.verdict == "unknown"
    assert "Record at least 5 steps" in difference.step.why
    assert {row.significant for row in difference.categories} == {None}


def test_few_steps_have_low_confidence(analyzed: Analyzed) -> None:
    three = replace(STEADY, steps=3)
    difference, _ = _compared(analyzed, three, replace(three, seed=1, causes=(SlowCompute(factor=1.5),)))
    assert difference.step.verdict == "slower"
    assert difference.step.why.startswith("Low confidence")


def _with_history(summary: Summary, *medians_us: float) -> Summary:
    bins = tuple(
        HistoryBin(first_step=step, last_step=step, median_us=us, max_us=us) for step, us in enumerate(medians_us)
    )
    return replace(summary, history=History(ranks=(), bins=bins, outliers=(), slow_ranks=()))


def test_what_the_rest_of_the_runs_does_not_show_is_noise(analyzed: Analyzed) -> None:
    steady, slower = analyzed(STEADY)[0], analyzed(PLANTED["compute"][0])[0]
    course = [3300.0 + 10 * (step % 3) for step in range(30)]
    alike = [_with_history(summary, *course) for summary in (steady, slower)]
    unconfirmed = perfscope.compare(*alike).differences[0]
    assert (unconfirmed.step.verdict, unconfirmed.step.confirmed) == ("same", False)
    assert "not typical" in unconfirmed.step.why
    assert not _real(unconfirmed)
    assert not any(change.significant for change in unconfirmed.kernels)
    other = _with_history(slower, *(us * 1.2 for us in course))
    confirmed = perfscope.compare(alike[0], other).differences[0]
    assert (confirmed.step.verdict, confirmed.step.confirmed) == ("slower", True)
    assert _real(confirmed) == {"compute"}


def test_a_run_without_traces_is_compared_by_its_history(analyzed: Analyzed) -> None:
    summary = analyzed(STEADY)[0]
    bare = replace(summary, time_breakdown=(), job=replace(summary.job, steps=(), step_time_us_per_step=()))
    course = [summary.job.step_time_us + step % 4 for step in range(40)]
    baseline = _with_history(bare, *course)
    slower = replace(bare, job=replace(bare.job, step_time_us=bare.job.step_time_us * 1.1))
    candidate = _with_history(slower, *(1.1 * us for us in course))
    step = perfscope.compare(baseline, candidate).differences[0].step
    assert (step.verdict, step.baseline_steps) == ("slower", 40)


def test_a_difference_without_a_cause_asks_for_a_baseline(analyzed: Analyzed) -> None:
    difference, _ = _compared(analyzed, STEADY, PLANTED["compute"][0])
    assert any("--baseline" in note for note in difference.notes) == (not difference.settings)
