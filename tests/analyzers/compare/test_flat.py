"""The flat dict of numbers: its names are a promise, its numbers those of the summary."""

from __future__ import annotations

from pathlib import Path

import pytest

import perfscope
from perfscope.analyzers.compare.flat import FLAT
from perfscope.results.categories import CATEGORIES

NAMES = [
    "ranks", "world_size", "steps", "healthy",
    "step_time_us", "samples_per_second", "mfu", "hfu", "exposed_communication", "idle", "dataloader",
    "overlapped_communication", "straggler_cost_us", "memory_peak_bytes", "memory_share", "batch_load_time_us",
    "unprofiled_step_time_us", "profiler_overhead", "replay_error",
    "stragglers", "straggler_rank",
    "findings", "findings_high", "findings_medium", "findings_low", "findings_info", "best_speedup", "plan_speedup",
    "share/compute", "share/exposed_comm_wait", "share/exposed_comm_transfer", "share/exposed_copy",
    "share/idle_dataloader", "share/idle_sync", "share/idle_launch", "share/idle_host", "share/idle_dependency",
    "share/idle_unknown",
    "run/steps", "run/median_step_us", "run/p99_step_us", "run/outlier_steps", "cost_per_day",
]  # fmt: skip
"""In their order. To take one away or to rename it breaks somebody's dashboard; add new ones."""


@pytest.fixture(scope="module")
def summary(samples: Path) -> perfscope.Summary:
    return perfscope.analyze(samples / "slow_rank", workers=1)


def test_names_stay() -> None:
    assert [number.name for number in FLAT] == NAMES


def test_the_numbers_are_the_summarys(summary: perfscope.Summary) -> None:
    numbers = summary.flat()
    assert set(numbers) <= set(NAMES)
    assert all(type(value) is float for value in numbers.values())
    assert (numbers["ranks"], numbers["steps"]) == (len(summary.job.ranks), len(summary.job.steps))
    assert numbers["step_time_us"] == summary.job.step_time_us
    assert numbers["straggler_rank"] == summary.stragglers[0].rank == 1
    assert numbers["straggler_cost_us"] == summary.stragglers[0].lost_us
    assert sum(numbers[f"share/{name}"] for name in CATEGORIES) == pytest.approx(1)
    assert numbers["findings"] == sum(numbers[f"findings_{each}"] for each in ("high", "medium", "low", "info"))
    assert "mfu" not in numbers  # the job ran on CPUs


def test_a_prefix_goes_before_every_name(summary: perfscope.Summary) -> None:
    assert summary.flat("perfscope/") == {f"perfscope/{name}": value for name, value in summary.flat().items()}


def test_every_number_is_documented(root: Path) -> None:
    text = (root / "docs" / "trackers.md").read_text(encoding="utf-8")
    for number in FLAT:
        assert f"| `{number.name}` | {number.meaning} |" in text, number.name
