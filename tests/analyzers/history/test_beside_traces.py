"""One verdict on a recording that has traces of some steps and the history of all: samples beside simulated runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import perfscope
from perfscope.results.rows import Verdict
from tests.benchmarks.delayed_runs import PlantedDelay, RunPlan, simulate, write


def verdicts(sample: Path, ranks: int, cause: PlantedDelay | None, folder: Path) -> tuple[Verdict, Verdict]:
    """On a sample alone, and beside the history of a simulated run."""
    both = folder / "both"
    shutil.copytree(sample, both)
    alone = perfscope.analyze(both).verdict
    plan = RunPlan("ddp", ranks, steps=300, step_ms=50, noise=0.01, unlike=0.002, transfer=0.1, cause=cause, seed=4)
    write(simulate(plan), plan, folder / "run")
    for file in (folder / "run").glob("*.steps.bin"):
        shutil.copy(file, both)
    return alone, perfscope.analyze(both).verdict


def test_a_rank_that_delays_the_run_and_not_the_recorded_steps_is_in_the_verdict(samples: Path, tmp_path: Path) -> None:
    delay = PlantedDelay("backward", "intermittent", (1,), share=0.4, every=0.3)
    alone, both = verdicts(samples / "healthy", 2, delay, tmp_path)
    assert both.headline.startswith(alone.headline)
    assert "Over the whole run rank 1 is a straggler" in both.headline
    assert "in the backward" in both.headline
    assert not both.healthy


@pytest.mark.parametrize(
    ("sample", "ranks", "cause"),
    [
        ("healthy", 2, None),
        ("slow_rank", 3, PlantedDelay("forward", "steady", (1,), share=0.3)),
    ],
)
def test_a_run_like_its_recorded_steps_changes_no_verdict(
    samples: Path, sample: str, ranks: int, cause: PlantedDelay | None, tmp_path: Path
) -> None:
    alone, both = verdicts(samples / sample, ranks, cause, tmp_path)
    assert alone == both
