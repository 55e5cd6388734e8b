"""Pipelines on CPUs with a stage on each rank: which of them is slow, steadily or now and then, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfscope.analyzers.replay.engine import replay
from perfscope.analyzers.replay.pace import scaled
from perfscope.analyzers.replay.stragglers.host_parts import StepParts
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.results.rows import StragglerRow
from tests.analyzers.measured import measured
from tests.analyzers.replay.cpu_pipelines import CpuPipeline, Extra


def always(rank: int, us: float = 5000) -> Extra:
    """This rank takes so much longer in each step."""
    return lambda each, _: us * (each == rank)


def now_and_then(rank: int, every: int = 3, us: float = 9000) -> Extra:
    """In every so many steps."""
    return lambda each, step: us * (each == rank and step % every == 1)


def found(job: CpuPipeline, folder: Path) -> tuple[StragglerRow, ...]:
    job.write(folder)
    return measured(folder).stragglers


def lost_us(job: CpuPipeline, without: CpuPipeline) -> float:
    """By the simulator: how much shorter the run is without the cause, per step."""
    return (job.took - without.took) / job.steps


@pytest.mark.parametrize(
    ("stages", "rank", "cause"),
    [(2, 0, "compute"), (2, 1, "host"), (3, 0, "host"), (3, 2, "compute"), (4, 3, "compute")],
)
def test_a_slow_stage_is_named_though_no_stage_does_quite_the_same(
    stages: int, rank: int, cause: str, tmp_path: Path
) -> None:
    healthy = CpuPipeline(stages=stages)
    slow = replace(healthy, **{"operator" if cause == "compute" else "host": always(rank)})
    (row,) = found(slow, tmp_path / "slow")
    assert (row.ranks, row.cause, row.pattern) == ((rank,), cause, "steady")
    healthy.write(tmp_path / "healthy")
    assert row.lost_us == pytest.approx(lost_us(slow, healthy), abs=0.05 * slow.took / slow.steps)


@pytest.mark.parametrize(("stages", "rank"), [(2, 1), (3, 0), (4, 2)])
def test_what_is_the_same_work_on_all_stages_shows_smaller_delays(stages: int, rank: int, tmp_path: Path) -> None:
    """An operator that runs as often on each: 7 % of the step, less than stages usually differ by."""
    healthy = CpuPipeline(stages=stages, steps=24)
    slow = replace(healthy, operator=always(rank, us=2500))
    (row,) = found(slow, tmp_path / "slow")
    assert (row.ranks, row.cause, row.pattern) == ((rank,), "compute", "steady")
    healthy.write(tmp_path / "healthy")
    assert row.lost_us == pytest.approx(lost_us(slow, healthy), abs=0.03 * slow.took / slow.steps)


def test_stages_in_turn_are_found_in_the_operator_that_is_slow_though_the_rest_is_noise(tmp_path: Path) -> None:
    def jitter(rank: int, step: int) -> float:
        return 6000.0 * ((7 * rank + 5 * step) % 11) / 11

    slow = CpuPipeline(stages=2, steps=24, host=jitter, operator=lambda rank, step: 3000.0 * (step % 2 == rank))
    (row,) = found(slow, tmp_path / "slow")
    assert (row.ranks, row.pattern) == ((0, 1), "rotating")
    assert found(replace(slow, operator=lambda _rank, _step: 0.0), tmp_path / "healthy") == ()


def test_a_rank_of_which_nothing_is_known_is_not_slower_than_another() -> None:
    nothing = StepParts({}, {}, {}, steps=3)
    assert StepParts.mean([nothing, nothing]).excess(nothing).total.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("stages", "rank", "cause"), [(2, 0, "host"), (3, 1, "compute"), (4, 0, "host")])
def test_a_stage_that_is_slow_now_and_then_is_compared_with_its_other_steps(
    stages: int, rank: int, cause: str, tmp_path: Path
) -> None:
    healthy = CpuPipeline(stages=stages)
    slow = replace(healthy, **{"operator" if cause == "compute" else "host": now_and_then(rank)})
    (row,) = found(slow, tmp_path / "slow")
    assert (row.ranks, row.cause, row.pattern) == ((rank,), cause, "intermittent")
    assert set(row.steps) <= {step for step in range(slow.steps) if step % 3 in (1, 2)}  # a window may end in the next
    healthy.write(tmp_path / "healthy")
    assert row.lost_us == pytest.approx(lost_us(slow, healthy), abs=0.03 * slow.took / slow.steps)


@pytest.mark.parametrize(("stages", "rank", "us"), [(2, 1, 2300), (3, 1, 2700), (4, 2, 2700)])
def test_steps_that_are_plainly_slow_are_told_though_they_cost_little_of_all(
    stages: int, rank: int, us: float, tmp_path: Path
) -> None:
    """Five of 24 steps take about a tenth longer: less than 2 % of the mean step."""
    healthy = CpuPipeline(stages=stages, steps=24)
    slow = replace(healthy, operator=now_and_then(rank, every=5, us=us))
    (row,) = found(slow, tmp_path / "slow")
    assert (row.ranks, row.cause, row.pattern) == ((rank,), "compute", "intermittent")
    healthy.write(tmp_path / "healthy")
    lost = lost_us(slow, healthy)
    assert lost < 0.02 * slow.took / slow.steps
    assert row.lost_us == pytest.approx(lost, rel=0.15)


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_that_are_slow_in_turn_are_one_straggler_and_none_of_them_is_slow_alone(
    stages: int, tmp_path: Path
) -> None:
    """With two, half of the steps of each are slow, and nearly alike."""
    slow = CpuPipeline(stages=stages, operator=lambda rank, step: 9000.0 * (step % stages == rank))
    (row,) = found(slow, tmp_path)
    assert (row.ranks, row.cause, row.pattern) == (tuple(range(stages)), "compute", "rotating")


@pytest.mark.parametrize(
    "job",
    [
        CpuPipeline(stages=2, noise=0.15, seed=1),
        CpuPipeline(stages=4, noise=0.15, seed=2),
        *(CpuPipeline(stages=2 + seed % 3, noise=0.15, steps=24, seed=seed) for seed in range(3, 7)),
        CpuPipeline(stages=3, head=2.0),
        CpuPipeline(stages=3, operator=lambda _, step: 9000.0 * (step % 3 == 1)),
    ],
    ids=[
        "noise",
        "noise, 4 stages",
        *["noise, 24 steps"] * 4,
        "the last stage has the head",
        "all at once, as batches vary",
    ],
)
def test_nobody_is_named_where_no_stage_is_slow_for_its_work(job: CpuPipeline, tmp_path: Path) -> None:
    assert found(job, tmp_path) == ()


@pytest.mark.parametrize("sends_last", [False, True])
@pytest.mark.parametrize("all_forwards_first", [False, True])
def test_a_send_has_ended_when_it_is_received_whenever_its_stage_waits_for_it(
    sends_last: bool, all_forwards_first: bool, tmp_path: Path
) -> None:
    """Its range is open until then, which is no transfer: with all work halved, the steps are, too."""
    job = CpuPipeline(
        stages=2, batches=6, steps=6, product=5000, python=100, noise=0.0, head=2.0, sends_last=sends_last,
        all_forwards_first=all_forwards_first,
    )  # fmt: skip
    quicker = replace(job, product=job.product / 2, python=job.python / 2)
    job.write(tmp_path / "job")
    quicker.write(tmp_path / "quicker")
    recorded = context_of(tmp_path / "job", workers=1).recorded
    assert recorded.step_time_ns(replay(recorded.schedules)) / 1e3 == pytest.approx(job.took / job.steps, rel=0.01)
    halved = scaled(recorded.schedules, recorded.schedules.ranks, 0.5)
    assert recorded.step_time_ns(replay(halved)) / 1e3 == pytest.approx(quicker.took / job.steps, rel=0.01)
