"""Runs without a trace: the stages of their steps tell what changed. Histories are made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers.compare.check import check
from perfscope.analyzers.compare.compare import compare
from perfscope.analyzers.history.steps_only import untraced_job, untraced_summary
from perfscope.analyzers.history.stragglers import FEWEST_STEPS
from perfscope.recording.job import Job
from perfscope.reports.compare import page, terminal, words
from perfscope.results.budget import FAILED, PASSED
from perfscope.results.history import History, HistoryBin, HistoryStraggler
from perfscope.results.rows import Verdict
from perfscope.results.summary import Summary

STEPS = 4 * FEWEST_STEPS


def run(seed: int, loading_us: float = 2000.0, *, stages: bool = True, straggler_us: float = 0.0) -> Summary:
    """A run of steps of 50 ms and its loading, with 1 % of noise in each of its stages."""
    random = np.random.default_rng(seed)
    usual = {"dataloader": loading_us, "forward": 15_000.0, "backward": 30_000.0, "other": 5000.0}
    bins = []
    for step in range(STEPS):
        us = {name: mean * (1 + 0.01 * random.standard_normal()) for name, mean in usual.items()}
        whole = sum(us.values())
        bins.append(
            HistoryBin(first_step=step, last_step=step, median_us=whole, max_us=whole, stages_us=us if stages else {})
        )
    late = HistoryStraggler(
        ranks=(1,), hosts=("node0",), pattern="steady", stage="backward", stages_us={"backward": straggler_us},
        steps=STEPS, share_of_steps=1.0, first_step=0, last_step=STEPS - 1, excess_us=straggler_us,
        cost_us=straggler_us, cost_share=0.1,
    )  # fmt: skip
    history = History(
        ranks=(), bins=tuple(bins), outliers=(), slow_ranks=(), stragglers=(late,) if straggler_us else (),
        compared=True,
    )  # fmt: skip
    job = Job(path=Path(f"run{seed}"), sources=())
    info = untraced_job(job, (0, 1), (), (), steps_from="made by hand")
    info = replace(info, step_time_us=float(np.mean([entry.median_us for entry in bins])))
    verdict = Verdict(headline="Steps take 50 ms.", healthy=False, first_action=None)
    return untraced_summary(job, info, verdict, "no trace", history=history)


def test_the_stage_that_changed_is_the_cause() -> None:
    comparison = compare(run(1), run(2, loading_us=12_000.0))
    (difference,) = comparison.differences
    assert difference.step.verdict == "slower"
    rows = {row.name: row for row in difference.stages}
    assert rows["dataloader"].delta_us == pytest.approx(10_000, rel=0.01)
    assert [name for name, row in rows.items() if row.significant] == ["dataloader"]
    assert words.because(difference) == "Each step spends 10.0 ms more loading data."
    assert "Data loading" in terminal.comparison(comparison)
    html = page.render(comparison)
    assert "Stages of a step" in html
    assert "Time breakdown of a step" not in html  # there is none to draw
    assert not any("unknown" in note for note in difference.notes)


def test_equal_runs_differ_in_no_stage() -> None:
    wrong = 0
    for seed in range(40):
        (difference,) = compare(run(seed), run(1000 + seed)).differences
        assert difference.step.verdict == "same"
        wrong += any(row.significant for row in difference.stages)
    assert wrong <= 2  # of 40, at a level of 1 %


def test_a_stage_that_changed_though_the_step_did_not_is_named_as_that() -> None:
    (difference,) = compare(run(1), run(2, loading_us=2600.0)).differences
    assert difference.step.verdict == "same"
    assert words.because(difference) == "Each step nevertheless spends 602 µs more loading data."


def test_unprofiled_steps_are_not_told_from_themselves() -> None:
    (difference,) = compare(run(1), run(2, loading_us=12_000.0)).differences
    assert difference.step.baseline_unprofiled_us is None
    assert "Unprofiled" not in words.certainty(difference)


def test_without_stages_the_cause_stays_unknown() -> None:
    (difference,) = compare(run(1, stages=False), run(2, 12_000.0)).differences
    assert not difference.stages
    assert not words.because(difference)
    assert any("the cause of the change is unknown" in note for note in difference.notes)


def test_budgets_of_loading_and_of_stragglers(tmp_path: Path) -> None:
    budget = tmp_path / "budget.toml"
    budget.write_text('[dataloader]\nmax = "5 %"\nregression = "1 %"\n[straggler_cost]\nmax = "2 ms"\n')
    good = check(run(1), budget, baselines=[run(2)])
    assert [row.status for row in good.rows] == [PASSED] * 3
    bad = check(run(1, 12_000.0, straggler_us=5000.0), budget, baselines=[run(2)])
    assert [row.status for row in bad.rows] == [FAILED] * 3
    assert bad.rows[0].measured == pytest.approx(12 / 62, rel=0.01)
