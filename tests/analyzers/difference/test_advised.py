"""What was advised, tried and came true; on summaries written down by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import perfscope
from perfscope import metadata, paths
from perfscope.analyzers.difference.advised import finding_changes, tried_changes
from perfscope.analyzers.difference.cautions import cautions
from perfscope.analyzers.difference.noise import step_change
from perfscope.analyzers.difference.settings import setting_changes
from perfscope.comparison import Tried
from perfscope.metadata import DataLoaderRecord, RunMetadata, StepRecord
from perfscope.summary import DataLoaderRow, Summary
from tests.generator import MS, JobSpec, LoaderSpec, ModelSpec, NetworkSpec, simulate
from tests.reports.examples import job, starved

PREDICTED = {"low": 80_000.0, "mid": 85_000.0, "high": 95_000.0}


def _before(**changes: Any) -> Summary:
    """Starved at 120 ms a step; two workers are predicted to bring 85."""
    summary = starved()
    finding = replace(
        next(finding for finding in summary.findings if "worker" in finding.action.setting),
        whatif={"dataloader.num_workers": "2"},
        predicted_step_us=PREDICTED,
    )
    described = job(2, (119.0, 120.0, 121.0, 119.5, 120.5, 120.0))
    return replace(summary, job=described, findings=(finding,), dataloader=_loaders(0), **changes)


def _loaders(workers: int) -> tuple[DataLoaderRow, ...]:
    return tuple(
        DataLoaderRow(rank=rank, wait_us=1.0, blocking_us=1.0, batch_us=None, num_workers=workers) for rank in (0, 1)
    )


def _after(mean_ms: float, workers: int = 2, **changes: Any) -> Summary:
    times = tuple(mean_ms + off for off in (-1.0, 0.0, 1.0, -0.5, 0.5, 0.0))
    return replace(_before(), job=job(2, times, **changes), findings=(), dataloader=_loaders(workers))


def _tried(after: Summary, ask: Any = None) -> tuple[Tried, ...]:
    before = _before()
    step = step_change(before, after)
    return tried_changes(before, after, step, setting_changes(before, after), ask)


@pytest.mark.parametrize(
    ("mean_ms", "verdict"),
    [
        (85.0, "came true"),
        (96.0, "came true"),  # beyond the range by less than the noise
        (70.0, "brought more"),
        (105.0, "brought less"),
        (120.5, "no effect"),
        (140.0, "made it slower"),
    ],
)
def test_the_outcome_is_judged_by_range_and_noise(mean_ms: float, verdict: str) -> None:
    (tried,) = _tried(_after(mean_ms))
    assert tried.verdict == verdict
    assert tried.as_advised
    assert (tried.before, tried.after) == ({"dataloader.num_workers": "0"}, {"dataloader.num_workers": "2"})
    assert tried.realised == pytest.approx((120 - mean_ms) / (120 - 85))
    assert tried.also_changed == ()


def test_what_was_not_changed_was_not_tried() -> None:
    assert _tried(_after(85.0, workers=0)) == ()


def test_other_changes_are_named_beside() -> None:
    settings = {"ddp": {"bucket_cap_mb": 100, "static_graph": False}}
    (tried,) = _tried(_after(85.0, settings=settings))
    assert tried.also_changed == ("ddp.bucket_cap_mb",)


def test_another_value_than_advised_is_held_against_a_prediction_of_its_own() -> None:
    (unasked,) = _tried(_after(85.0, workers=8))
    assert (unasked.as_advised, unasked.verdict, unasked.predicted_us) == (False, "not judged", None)
    asked: list[dict[str, str]] = []

    def ask(settings: dict[str, str]) -> dict[str, float]:
        asked.append(settings)
        return PREDICTED

    (tried,) = _tried(_after(85.0, workers=8), ask)
    assert (tried.verdict, tried.as_advised) == ("came true", False)
    assert asked == [{"dataloader.num_workers": "8"}]


def test_a_change_that_nobody_advised_is_predicted_where_it_can_be_played() -> None:
    before = replace(_before(), findings=())
    after = _after(85.0)
    step = step_change(before, after)
    changed = setting_changes(before, after)
    assert tried_changes(before, after, step, changed) == ()
    (tried,) = tried_changes(before, after, step, changed, lambda settings: PREDICTED)
    assert (tried.rule, tried.verdict) == ("", "came true")
    assert tried_changes(before, after, step, changed, lambda settings: None) == ()


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
            strategies=("ddp",), dataloaders=(DataLoaderRecord(num_workers=workers, batches=20, batch_size=8),),
            steps=StepRecord(seen=20, detected_by="optimizer"),
        )  # fmt: skip
        metadata.save(run, paths.run_file(folder, rank))
    (folder / "traces").rmdir()
    return job.truth.step_time_ns / 1e3


def test_advice_followed_in_a_job_that_knows_the_truth(tmp_path: Path) -> None:
    """What is advised for the starved job is done, and more than that: both predictions are held against the truth."""
    folders = {workers: tmp_path / f"{workers}-workers" for workers in (0, 2, 4)}
    truth = {workers: _recorded(folder, workers) for workers, folder in folders.items()}
    comparison = perfscope.compare(folders[0], folders[2], folders[4], workers=1)
    for difference, workers in zip(comparison.differences, (2, 4), strict=True):
        (tried,) = difference.tried
        assert (tried.rule, tried.verdict) == ("dataloader-workers", "came true")
        assert tried.as_advised == (workers == 2)
        assert tried.after == {"dataloader.num_workers": str(workers)}
        assert tried.measured_us == pytest.approx(truth[workers], rel=0.01)
        assert tried.realised == pytest.approx(1.0, abs=0.05)
        assert [row.name for row in difference.rows if row.real] == ["idle_dataloader"]
        assert [(change.rule, change.status) for change in difference.findings] == [("dataloader-workers", "gone")]


def test_a_recording_without_a_trace_tells_neither_of_findings_nor_of_what_was_tried() -> None:
    before, after = _before(), replace(_after(85.0), accounting=(), dataloader=(), stragglers=())
    assert finding_changes(before, after) == ()
    assert _tried(after) == ()
    words = " ".join(cautions(before, after, step_change(before, after), ()))
    assert "The recording after holds no trace" in words
