"""The recordings in sample_traces are whole, small, anonymous, and hold what their stopwatch measured as planted."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

import perfscope
from perfscope.recording import metadata, paths
from perfscope.recording.vocabulary import PROFILER_STEP_PREFIX
from perfscope.results.summary import Summary
from tests.test_gpu_samples import PLANTED

WORLD_SIZES = {"healthy": 2, "starved": 2, "slow_rank": 3}
LARGEST_BYTES = 1_600_000
PLACES = re.compile(r"/(?:home|root|Users|work|workspace|tmp(?!/tmp\.)|mnt|opt|srv|data)/[\w.-]+")
"""Absolute paths that reveal something of the machine; the recordings were made in a folder from mktemp."""

every_sample = pytest.mark.parametrize("name", WORLD_SIZES)


@dataclass(frozen=True)
class Sample:
    """One recording and the script's own timings of the same run."""

    folder: Path
    truth: dict[str, Any]
    runs: tuple[metadata.RunMetadata, ...]

    def typical_ms(self, rank: int, what: str) -> float:
        """Median of ``what`` over the recorded steps, by the script's stopwatch."""
        (capture,) = self.runs[rank].captures
        values: list[float] = self.truth["ranks"][rank][what]
        return median(values[capture.first_step : capture.last_step + 1])


def _sample(samples: Path, name: str) -> Sample:
    folder = samples / name
    runs = tuple(metadata.load_run(paths.run_file(folder, rank)) for rank in range(WORLD_SIZES[name]))
    return Sample(folder, json.loads((folder / "truth.json").read_text(encoding="utf-8")), runs)


@pytest.fixture(scope="module")
def summaries(samples: Path) -> dict[str, Summary]:
    """Each sample as analyzed."""
    return {name: perfscope.analyze(samples / name) for name in WORLD_SIZES}


def _text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def test_no_recording_is_left_out(samples: Path) -> None:
    found = {path.parent.name for path in samples.glob(f"*/{paths.LAUNCH_FILE}")}
    assert found == {*WORLD_SIZES, *PLANTED}


@every_sample
def test_whole(samples: Path, name: str) -> None:
    sample = _sample(samples, name)
    assert metadata.load_launch(sample.folder / paths.LAUNCH_FILE).exit_code == 0
    for rank, run in enumerate(sample.runs):
        assert (run.rank, run.world_size, run.outcome) == (rank, WORLD_SIZES[name], "finished")
        assert run.problems == ()
        (capture,) = run.captures
        assert capture.complete
        assert capture.file == paths.trace_file(sample.folder, rank, 0).name
        events = json.loads(_text(sample.folder / capture.file))["traceEvents"]
        steps = {event["name"] for event in events if event.get("name", "").startswith(PROFILER_STEP_PREFIX)}
        # The last warm-up step is in the trace before the recorded ones.
        assert steps == {f"{PROFILER_STEP_PREFIX}{n}" for n in range(capture.first_step - 1, capture.last_step + 1)}
        assert len(steps) >= 7


@every_sample
def test_small(samples: Path, name: str) -> None:
    assert sum(path.stat().st_size for path in (samples / name).iterdir()) <= LARGEST_BYTES


@every_sample
def test_anonymous(samples: Path, name: str) -> None:
    for path in (samples / name).iterdir():
        assert not PLACES.findall(_text(path)), path.name


@every_sample
def test_readme_says_how_it_was_made(samples: Path, name: str) -> None:
    command = metadata.load_launch(samples / name / paths.LAUNCH_FILE).command
    assert " ".join(command) in _text(samples / name / "README.md").replace("\\\n    ", "")


def test_healthy_is_healthy(samples: Path) -> None:
    """The ranks are alike, hardly load, and their steps are long enough to measure."""
    sample = _sample(samples, "healthy")
    for rank in range(2):
        step = sample.typical_ms(rank, "step_ms")
        assert step > 100
        assert sample.typical_ms(rank, "load_ms") < 0.02 * step
    assert sample.typical_ms(0, "forward_ms") == pytest.approx(sample.typical_ms(1, "forward_ms"), rel=0.15)


def test_loading_takes_as_long_as_was_planted(samples: Path) -> None:
    sample = _sample(samples, "starved")
    planted = sample.truth["planted"]
    assert planted["workers"] == 0
    for rank in range(2):
        assert planted["load_ms"] <= sample.typical_ms(rank, "load_ms") <= 1.15 * planted["load_ms"]


def test_slow_rank_is_slow_in_its_forward_and_the_others_wait_for_it(samples: Path) -> None:
    sample = _sample(samples, "slow_rank")
    planted = sample.truth["planted"]
    slow, others = planted["slow_rank"], {0, 1, 2} - {planted["slow_rank"]}
    for other in others:
        later = sample.typical_ms(slow, "forward_ms") - sample.typical_ms(other, "forward_ms")
        assert later == pytest.approx(planted["slow_ms"], rel=0.25)
        # The gradients' all-reduce, inside the backward, is where they wait.
        waited = sample.typical_ms(other, "backward_ms") - sample.typical_ms(slow, "backward_ms")
        assert waited == pytest.approx(later, rel=0.25)


@every_sample
def test_analysis_and_stopwatch_agree_on_every_step(samples: Path, summaries: dict[str, Summary], name: str) -> None:
    """The job's steps are one rank's, number by number; the stopwatch's last also holds the writing of the trace."""
    job, truth = summaries[name].job, _sample(samples, name).truth
    assert len(job.steps) >= 6
    found = [time / 1e3 for time in job.step_time_us_per_step][:-1]
    by_stopwatch = [[rank["step_ms"][step] for step in job.steps][:-1] for rank in truth["ranks"]]
    assert any(found == pytest.approx(steps, rel=0.02) for steps in by_stopwatch), (found, by_stopwatch)


@every_sample
def test_analysis_and_stopwatch_agree_on_loading(samples: Path, summaries: dict[str, Summary], name: str) -> None:
    summary, truth = summaries[name], _sample(samples, name).truth
    for row in summary.dataloader:
        expected = mean(truth["ranks"][row.rank]["load_ms"][step] for step in summary.job.steps)
        assert row.wait_us / 1e3 == pytest.approx(expected, rel=0.02, abs=0.25)


@every_sample
def test_time_breakdown_adds_up(summaries: dict[str, Summary], name: str) -> None:
    summaries[name].self_check()
    assert [row.rank for row in summaries[name].time_breakdown] == list(range(WORLD_SIZES[name]))


def test_verdict_on_healthy(summaries: dict[str, Summary]) -> None:
    summary = summaries["healthy"]
    assert summary.verdict.healthy
    assert not [finding for finding in summary.findings if finding.severity in ("high", "medium")]
    for row in summary.time_breakdown:
        assert row.compute_us > 0.85 * row.step_time_us


def test_verdict_on_slow_loading(summaries: dict[str, Summary]) -> None:
    summary = summaries["starved"]
    assert not summary.verdict.healthy
    assert [finding.rule for finding in summary.findings if finding.severity == "high"] == ["dataloader-workers"]
    (advice,) = (finding.action for finding in summary.findings if finding.rule == "dataloader-workers")
    assert (advice.old, advice.new) == ("0", "1")
    for row in summary.time_breakdown:
        assert row.idle_dataloader_us / 1e3 == pytest.approx(120, rel=0.1)


def test_verdict_on_slow_rank(samples: Path, summaries: dict[str, Summary]) -> None:
    summary = summaries["slow_rank"]
    worst = summary.stragglers[0]
    assert (worst.rank, worst.cause) == (1, "host")
    assert worst.lost_us / 1e3 == pytest.approx(80, rel=0.15)
    assert summary.findings[0].rule == "straggling-rank"
    assert "Rank 1" in summary.verdict.headline
    for row in summary.time_breakdown:
        if row.rank == 1:
            assert row.idle_host_us / 1e3 == pytest.approx(80, rel=0.15)
            assert row.exposed_comm_wait_us < 0.02 * row.step_time_us
        else:
            assert row.exposed_comm_wait_us / 1e3 == pytest.approx(80, rel=0.15)
