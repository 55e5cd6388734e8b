"""One verdict on a recording that has traces of some steps and the history of all: samples beside simulated runs."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.verdict import recoverable
from perfscope.analyzers.verdict_of_run import with_history
from perfscope.recording.history import Block, pack
from perfscope.recording.paths import steps_file
from perfscope.results.findings import Confidence
from perfscope.results.history import History, LongSteps, RankHistory
from perfscope.results.notes import note
from perfscope.results.rows import Verdict
from perfscope.results.summary import Summary
from perfscope.text import lower_first
from tests.analyzers.measured import advised
from tests.benchmarks.delayed_runs import PlantedDelay, RunPlan, simulate, write


def verdicts(sample: Path, ranks: int, cause: PlantedDelay | None, folder: Path) -> tuple[Verdict, Verdict]:
    """On a sample alone, and beside the history of a simulated run."""
    both = folder / "both"
    shutil.copytree(sample, both)
    alone = advised(both).verdict
    plan = RunPlan("ddp", ranks, steps=300, step_ms=50, noise=0.01, unlike=0.002, transfer=0.1, cause=cause, seed=4)
    write(simulate(plan), plan, folder / "run")
    for file in (folder / "run").glob("*.steps.bin"):
        shutil.copy(file, both)
    return alone, advised(both).verdict


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


def test_a_rank_that_delays_the_recorded_steps_alone_is_little_sure(samples: Path, tmp_path: Path) -> None:
    """In the run it is as quick as the others."""
    alone, both = verdicts(samples / "slow_rank", 3, None, tmp_path)
    assert both.headline == (
        f"{alone.headline} Over the whole run it costs next to nothing: the recorded steps are not typical."
    )
    summary = advised(tmp_path / "both")
    assert {row.confidence for row in summary.stragglers} == {"low"}
    assert [one.confidence for one in summary.findings if one.rule == "straggling-rank"] == [Confidence.LOW]


def test_pauses_that_the_recorded_steps_do_not_hold_lead_the_verdict(samples: Path, tmp_path: Path) -> None:
    """Of 200 steps of 50 ms every 25th takes a second, on both ranks; waiting was not measured."""
    shutil.copytree(samples / "healthy", tmp_path, dirs_exist_ok=True)
    alone = advised(tmp_path).verdict
    times = [1_000_000 if step % 25 == 24 else 50_000 for step in range(200)]
    for rank in range(2):
        block = Block(0, 0, 1_758_580_000_000_000_000, times, {}, bytes(len(times)))
        steps_file(tmp_path, rank).write_bytes(pack(block))
    summary = advised(tmp_path)
    assert summary.history is not None
    again = summary.history.long_steps
    assert again is not None
    assert (again.period, again.rank, again.on_all_ranks) == (25, None, False)
    assert again.share == pytest.approx(8 * 0.95 / (8 + 192 * 0.05), rel=0.01)
    told = again.in_words()
    assert summary.verdict.headline == (
        f"{told[0].upper()}{told[1:]}. The recorded steps hold none of them. They show: {alone.headline}"
    )
    assert summary.verdict.first_action is not None
    assert "--active 25" in summary.verdict.first_action
    assert all(row.rank is None for row in summary.history.outliers)


def with_long_steps(summary: Summary, steps: tuple[int, ...], *, period: int | None, share: float) -> Verdict:
    """The verdict beside a run in which these steps take 258 ms longer."""
    again = LongSteps(
        steps=steps, of_steps=40, longer_us=258_000, share=share, period=period, rank=None, stage="other",
        on_all_ranks=False,
    )  # fmt: skip
    history = History(ranks=(), bins=(), outliers=(), slow_ranks=(), long_steps=again)
    return with_history(summary, history).verdict


@pytest.mark.parametrize(
    ("sample", "from_step", "after_ms", "where"),
    [
        ("healthy", 30, 80, "first"),
        ("healthy", 30, 45, "first"),
        ("slow_rank", 30, 80, "first"),
        ("slow_rank", 30, 45, "last"),  # what slows the recorded steps is known
        ("healthy", 30, 10, "last"),
        ("healthy", 6, 80, "nowhere"),
    ],
)
def test_another_step_time_after_the_recorded_steps_is_told(
    samples: Path, sample: str, from_step: int, after_ms: int, where: str, tmp_path: Path
) -> None:
    """Steps from 8 on were recorded, those from 30 on take longer, or less; from 6 on it would be of these, too."""
    shutil.copytree(samples / sample, tmp_path, dirs_exist_ok=True)
    summary = advised(tmp_path)
    alone = summary.verdict
    times = [30_000 + step % 3 if step < from_step else 1_000 * after_ms + step % 3 for step in range(120)]
    for rank in summary.job.ranks:
        block = Block(0, 0, 1_758_580_000_000_000_000, times, {}, bytes(len(times)))
        steps_file(tmp_path, rank).write_bytes(pack(block))
    found = advised(tmp_path).verdict
    said = f"rom step 30 on steps take {after_ms}.0 ms instead of 30.0 ms. What was recorded, steps 8 to"
    assert (
        found.headline.partition(said)[0]
        == {
            "first": "F",
            "last": f"{alone.headline} F",
            "nowhere": alone.headline,
        }[where]
    )
    assert ("--wait 30" in (found.first_action or "")) is (where == "first")


def test_long_steps_that_come_as_the_evaluations_do_are_evaluations(samples: Path) -> None:
    """The recorded steps 8 and 12 are left out for their evaluation."""
    alone = advised(samples / "healthy")
    left_out = note("steps", "evaluation_left_out", steps=[8, 12], share=0.1, alone=[])
    summary = replace(alone, notes=(*alone.notes, left_out))
    for steps, period in (((20, 24, 28), None), ((20, 24, 28, 36), 4)):
        found = with_long_steps(summary, steps, period=period, share=0.5)
        assert found.headline.startswith(alone.verdict.headline)
        assert found.headline.endswith("They are evaluations.")
        assert found.first_action == "Evaluate in fewer steps, or fewer batches."
    for steps, period in (((21, 25, 29, 37), 4), ((17, 19, 30), None)):  # other steps than these
        other = with_long_steps(summary, steps, period=period, share=0.5)
        assert "The recorded steps hold none of them" in other.headline


def test_what_is_said_of_the_others_follows_where_evaluations_come_first_already(samples: Path) -> None:
    alone = advised(samples / "slow_rank")
    left_out = note("steps", "evaluation_left_out", steps=[8], share=0.6, alone=[])
    evaluated = "Steps with an evaluation, which are left out, take 60% of the recorded time."
    verdict = replace(alone.verdict, headline=f"{evaluated} Of the others: {lower_first(alone.verdict.headline)}")
    summary = replace(alone, notes=(*alone.notes, left_out), verdict=verdict)
    found = with_long_steps(summary, (18, 28, 38), period=10, share=0.6)
    assert found.headline.endswith(f"They are evaluations. Of the others: {lower_first(alone.verdict.headline)}")


@pytest.mark.parametrize(("share", "first"), [(0.6, True), (0.1, False)])
def test_evaluations_that_take_more_than_the_first_change_saves_come_first(
    samples: Path, share: float, first: bool
) -> None:
    alone = advised(samples / "slow_rank")
    left_out = note("steps", "evaluation_left_out", steps=[8], share=share, alone=[])
    told = (
        f"{alone.verdict.headline} Steps with an evaluation, which are left out, take {share:.0%} of the recorded time."
    )
    verdict = replace(alone.verdict, headline=told)
    summary = replace(alone, notes=(*alone.notes, left_out), verdict=verdict)
    found = with_long_steps(summary, (18, 28, 38), period=10, share=share)
    assert found.headline.startswith("Every 10 steps (18, 28, 38) one takes 258 ms longer") is first
    assert ("They are evaluations. Of the others: rank 1 is a straggler" in found.headline) is first
    assert ("which are left out" in found.headline) is not first
    assert (found.first_action == "Evaluate in fewer steps, or fewer batches.") is first


@pytest.mark.parametrize(("share", "said"), [(0.6, True), (0.1, False)])
def test_evaluations_of_the_run_that_were_not_recorded_are_named(samples: Path, share: float, said: bool) -> None:
    alone = advised(samples / "slow_rank")
    row = RankHistory(
        rank=0, host="", attempt=0, earlier_steps=0, first_step=1, last_step=50, steps=50, disturbed_steps=0,
        lost_steps=0, mean_us=1e5, median_us=1e4, p95_us=1e5, p99_us=1e5, max_us=1e5, outlier_steps=0, trend=None,
        stages_us={"evaluation": share * 1e5, "other": (1 - share) * 1e5},
    )  # fmt: skip
    found = with_history(alone, History(ranks=(row,), bins=(), outliers=(), slow_ranks=())).verdict
    words = " Over the whole run evaluations take 60% of the steps' time."
    assert found.headline == alone.verdict.headline + words * said
    assert found.first_action == alone.verdict.first_action


def test_a_change_that_saves_more_than_the_long_steps_take_stays_first(samples: Path) -> None:
    summary = advised(samples / "slow_rank")
    assert recoverable(summary) > 0.3
    behind = with_long_steps(summary, (20, 24, 28, 36), period=4, share=0.3)
    assert behind.headline.startswith(summary.verdict.headline)
    assert behind.first_action == summary.verdict.first_action
    before = with_long_steps(summary, (20, 24, 28, 36), period=4, share=0.9)
    assert before.headline.endswith(f"The recorded steps hold none of them. They show: {summary.verdict.headline}")
