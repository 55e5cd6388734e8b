"""Predicted and measured effect of changes, on summaries written by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import perfscope
from perfscope.analyzers.compare.advised import finding_changes, prediction_checks
from perfscope.analyzers.compare.noise import step_change
from perfscope.analyzers.compare.settings import cautions, setting_changes
from perfscope.recording import metadata, paths
from perfscope.recording.metadata import DataLoaderMetadata, RunMetadata, StepsMetadata
from perfscope.reports.compare import words
from perfscope.results.comparison import PredictionCheck
from perfscope.results.findings import Prediction
from perfscope.results.rows import DataLoaderRow
from perfscope.results.summary import Summary
from tests.generator import MS, JobSpec, LoaderSpec, ModelSpec, NetworkSpec, simulate
from tests.reports.examples import job, starved

PREDICTED = Prediction(low=80_000.0, mid=85_000.0, high=95_000.0)


def _before(**changes: Any) -> Summary:
    """Waits for data, 120 ms per step; with two workers 85 are predicted."""
    summary = starved()
    finding = replace(
        next(finding for finding in summary.findings if "worker" in finding.action.setting),
        whatif={"dataloader.num_workers": "2"},
        predicted_step_us=PREDICTED,
    )
    described = job(2, (119.0, 120.0, 121.0, 119.5, 120.5, 120.0), unprofiled_step_us=None)
    return replace(summary, job=described, findings=(finding,), dataloader=_loaders(0), **changes)


def _loaders(workers: int) -> tuple[DataLoaderRow, ...]:
    return tuple(
        DataLoaderRow(rank=rank, wait_us=1.0, blocking_us=1.0, batch_us=None, num_workers=workers) for rank in (0, 1)
    )


def _after(mean_ms: float, workers: int = 2, **changes: Any) -> Summary:
    times = tuple(mean_ms + off for off in (-1.0, 0.0, 1.0, -0.5, 0.5, 0.0))
    return replace(_before(), job=job(2, times, **changes), findings=(), dataloader=_loaders(workers))


def _tried(candidate: Summary, ask: Any = None) -> tuple[PredictionCheck, ...]:
    baseline = _before()
    step = step_change(baseline, candidate)
    return prediction_checks(baseline, candidate, step, setting_changes(baseline, candidate), ask)


@pytest.mark.parametrize(
    ("mean_ms", "verdict"),
    [
        (85.0, "as predicted"),
        (96.0, "as predicted"),  # beyond the range by less than the noise
        (70.0, "faster than predicted"),
        (105.0, "slower than predicted"),
        (120.5, "no effect"),
        (140.0, "slower than baseline"),
    ],
)
def test_the_outcome_is_judged_by_range_and_noise(mean_ms: float, verdict: str) -> None:
    (check,) = _tried(_after(mean_ms))
    assert check.verdict == verdict
    assert check.as_advised
    assert (check.baseline, check.candidate) == ({"dataloader.num_workers": "0"}, {"dataloader.num_workers": "2"})
    assert check.realised == pytest.approx((120 - mean_ms) / (120 - 85))
    assert check.also_changed == ()


@pytest.mark.parametrize(
    ("mean_ms", "verdict", "words_"),
    [
        (160.0, "as predicted", "; 89% of the predicted slowdown."),
        (180.0, "slower than predicted", "; 133% of the predicted slowdown."),
        (120.5, "no effect", "; 1.1% of the predicted slowdown."),
    ],
)
def test_a_predicted_slowdown_is_called_one(mean_ms: float, verdict: str, words_: str) -> None:
    slower = Prediction(low=155_000.0, mid=165_000.0, high=170_000.0)
    baseline = _before()
    baseline = replace(baseline, findings=(replace(baseline.findings[0], predicted_step_us=slower),))
    candidate = _after(mean_ms)
    step = step_change(baseline, candidate)
    (check,) = prediction_checks(baseline, candidate, step, setting_changes(baseline, candidate))
    assert check.verdict == verdict
    assert words.prediction(check, step).endswith(f"{verdict}{words_}")


def test_a_prediction_is_not_judged_by_a_change_that_is_not_certain() -> None:
    """Every fourth step takes longer: of 120 ms the mean became 135, or 105, and steps vary by more than that."""
    for times in ((100, 100, 100, 240) * 2, (80, 80, 80, 180) * 2):
        baseline = _before()
        candidate = replace(_after(85.0), job=job(2, tuple(float(each) for each in times)))
        step = step_change(baseline, candidate)
        assert (step.verdict, step.uncertain) == ("same", True)
        (check,) = prediction_checks(baseline, candidate, step, setting_changes(baseline, candidate))
        assert check.verdict == "not judged"
        assert words.prediction(check, step).endswith(": cannot be judged.")


def test_what_was_not_changed_was_not_tried() -> None:
    assert _tried(_after(85.0, workers=0)) == ()


def test_other_changes_are_named_beside() -> None:
    settings = {"ddp": {"bucket_cap_mb": 100, "static_graph": False}}
    (check,) = _tried(_after(85.0, settings=settings))
    assert check.also_changed == ("ddp.bucket_cap_mb",)


def test_what_a_setting_is_called_in_recordings_is_no_other_change() -> None:
    baseline, finding = _before(), _before().findings[0]
    baseline = replace(
        baseline,
        findings=(replace(finding, whatif={"ddp.no_sync": "true"}),),
        job=replace(baseline.job, settings={"gradient_accumulation": {"no_sync": False}}),
    )
    candidate = _after(85.0, workers=0, settings={"gradient_accumulation": {"no_sync": True}})
    changed = setting_changes(baseline, candidate)
    assert "gradient_accumulation.no_sync" in {change.name for change in changed}
    (check,) = prediction_checks(baseline, candidate, step_change(baseline, candidate), changed)
    assert check.also_changed == ()


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("python train.py 5", {"started by": "python", "script": "train.py", "arguments": "5"}),
        ("torchrun --nproc-per-node 2 train.py --batch=4 flat x", {
            "--nproc-per-node": "2", "started by": "torchrun", "script": "train.py", "--batch": "4",
            "arguments": "flat x",
        }),
        ("torchrun --standalone train.py --fast", {
            "--standalone": "given", "started by": "torchrun", "script": "train.py", "--fast": "given",
        }),
        ("python -m train", {"-m": "train", "arguments": "python"}),
    ],
)  # fmt: skip
def test_a_script_and_its_arguments_are_no_options(command: str, options: dict[str, str]) -> None:
    nothing, some = _after(85.0, command=()), _after(85.0, command=tuple(command.split()))
    changed = {each.name: each.candidate for each in setting_changes(nothing, some) if each.about == "command"}
    assert changed == options


def test_another_value_than_advised_is_compared_with_a_prediction_of_its_own() -> None:
    (unasked,) = _tried(_after(85.0, workers=8))
    assert (unasked.as_advised, unasked.verdict, unasked.predicted_us) == (False, "not judged", None)
    asked: list[dict[str, str]] = []

    def ask(settings: dict[str, str]) -> Prediction:
        asked.append(settings)
        return PREDICTED

    (check,) = _tried(_after(85.0, workers=8), ask)
    assert (check.verdict, check.as_advised) == ("as predicted", False)
    assert asked == [{"dataloader.num_workers": "8"}]


def test_a_change_without_advice_is_predicted_where_it_can_be_replayed() -> None:
    baseline = replace(_before(), findings=())
    candidate = _after(85.0)
    step = step_change(baseline, candidate)
    changed = setting_changes(baseline, candidate)
    assert prediction_checks(baseline, candidate, step, changed) == ()
    (check,) = prediction_checks(baseline, candidate, step, changed, lambda settings: PREDICTED)
    assert (check.rule, check.verdict) == ("", "as predicted")
    assert prediction_checks(baseline, candidate, step, changed, lambda settings: None) == ()


@pytest.mark.parametrize(
    ("one", "other", "recorded", "differ"),
    [
        ("ddp", "data", False, False),
        ("ddp", "data", True, True),
        (("ddp", "tensor"), ("data", "tensor"), False, False),
        (("ddp", "tensor"), "data", False, True),
        ("fsdp", "shard", False, False),
        ("ddp", "shard", False, True),
        ("ddp", "fsdp", False, True),
    ],
)
def test_a_wrapper_that_one_side_does_not_show_is_no_other_strategy(one, other, recorded, differ) -> None:
    """``perfscope run`` records wrappers, and so their absence."""
    threads = {"threads": {"intra_op": 8}}
    first, second = _after(85.0, strategy=one, settings=threads), _after(
        85.0, strategy=other, settings=threads if recorded else {}
    )  # fmt: skip
    for baseline, candidate in ((first, second), (second, first)):
        names = {change.name for change in setting_changes(baseline, candidate)}
        assert ("strategy" in names) == differ


def _recorded(folder: Path, workers: int) -> float:
    """A recording of a generated job whose batches take 5 ms each to load; its true step time, µs."""
    spec = JobSpec(
        ranks=2, steps=8, model=ModelSpec(tokens=2048), end_sync=True, network=NetworkSpec(busbw_gbps=600.0),
        noise=0.02, seed=workers, loader=LoaderSpec(workers=workers, load_ns=5 * MS),
    )  # fmt: skip
    job = simulate(spec)
    for rank, trace in enumerate(job.write(folder / "traces")):
        trace.rename(paths.trace_file(folder, rank, 0))
        run = RunMetadata(
            rank=rank, world_size=2, local_world_size=2, host="node0", backend="nccl", cpu_count=32,
            strategies=("ddp",), dataloaders=(DataLoaderMetadata(num_workers=workers, batches=20, batch_size=8),),
            steps=StepsMetadata(seen=20, detected_by="optimizer"),
        )  # fmt: skip
        metadata.save(run, paths.run_file(folder, rank))
    (folder / "traces").rmdir()
    return job.truth.step_time_ns / 1e3


def test_advice_followed_in_a_job_that_knows_the_truth(tmp_path: Path) -> None:
    """The advice for the job that waits for data is followed and exceeded: both predictions match the truth."""
    folders = {workers: tmp_path / f"{workers}-workers" for workers in (0, 2, 4)}
    truth = {workers: _recorded(folder, workers) for workers, folder in folders.items()}
    comparison = perfscope.compare(folders[0], folders[2], folders[4], workers=1)
    for difference, workers in zip(comparison.differences, (2, 4), strict=True):
        (check,) = difference.predictions
        assert (check.rule, check.verdict) == ("dataloader-workers", "as predicted")
        assert check.as_advised == (workers == 2)
        assert check.candidate == {"dataloader.num_workers": str(workers)}
        assert check.measured_us == pytest.approx(truth[workers], rel=0.01)
        assert check.realised == pytest.approx(1.0, abs=0.05)
        assert [row.name for row in difference.categories if row.significant] == ["idle_dataloader"]
        assert [(change.rule, change.status) for change in difference.findings] == [("dataloader-workers", "gone")]


def test_a_change_that_was_predicted_is_no_unknown_cause() -> None:
    baseline, candidate = _before(), _after(60.0)
    step = step_change(baseline, candidate)
    assert step.verdict == "faster"
    assert any("the cause may be the machines" in note for note in cautions(baseline, candidate, step, ()))
    checked = _tried(candidate)
    assert checked
    assert not any("machines" in note for note in cautions(baseline, candidate, step, (), predictions=checked))


def test_without_a_trace_there_are_no_findings_and_no_predictions() -> None:
    baseline, candidate = _before(), replace(_after(85.0), time_breakdown=(), dataloader=(), stragglers=())
    assert finding_changes(baseline, candidate) == ()
    assert _tried(candidate) == ()
    words = " ".join(cautions(baseline, candidate, step_change(baseline, candidate), ()))
    assert "The candidate has step times but no trace" in words
