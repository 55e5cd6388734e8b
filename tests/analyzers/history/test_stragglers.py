"""Who delays a run: by hand, and in simulated jobs. ``tests/benchmarks/delays.py`` has hundreds of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from perfscope.analyzers.history.excess import cost_of, measure_excess
from perfscope.analyzers.history.own_times import COLUMNS, OwnTimes, common_steps, without_waits
from perfscope.analyzers.history.stragglers import find_stragglers
from perfscope.results.history import CORE, HistoryStraggler
from tests.benchmarks.delayed_runs import PlantedDelay, RunPlan
from tests.benchmarks.delays import is_right, reported

STEPS = 100
DATALOADER, FORWARD, BACKWARD, OPTIMIZER = map(COLUMNS.index, ("dataloader", "forward", "backward", "optimizer"))


def ranks(count: int, step_us: float = 10_000, own_us: float = 6_000) -> dict[int, OwnTimes]:
    """Ranks that all do 4 ms of forward and backward each step and wait for the rest of it."""
    own = np.zeros((STEPS, len(COLUMNS)), np.float32)
    own[:, FORWARD] = own_us / 3
    own[:, BACKWARD] = own_us * 2 / 3
    return {
        rank: OwnTimes(
            number=np.arange(STEPS),
            step_us=np.full(STEPS, step_us, np.float32),
            own_us=own.copy(),
            wait_us=np.full(STEPS, step_us - own_us, np.float32),
            core_us=np.zeros(STEPS, np.float32),
        )
        for rank in range(count)
    }


def test_a_cost_that_two_share_is_divided_and_the_rest_is_the_slower_ones() -> None:
    """Over the others rank 1 is late by 3 ms, rank 2 by 5 ms, rank 3 (no suspect) by 1 ms."""
    job = ranks(5)
    for rank, ms in ((1, 3), (2, 5), (3, 1)):
        job[rank].own_us[:, BACKWARD] += 1000 * ms
    together = common_steps(job)
    assert together is not None
    excess = measure_excess(together, [range(5)])
    costs = cost_of(excess, [1, 2], np.ones((STEPS, 2), bool))
    assert costs[0].tolist() == [1000, 3000]


def test_a_rank_that_is_slow_in_its_backward_is_named_with_its_cost() -> None:
    job = ranks(4)
    job[2].own_us[:, BACKWARD] += 2000
    job[2].wait_us[:] -= 2000
    found = find_stragglers(job, {2: "b"})
    assert found is not None
    (row,) = found.rows
    assert (row.ranks, row.hosts, row.pattern, row.stage) == ((2,), ("b",), "steady", "backward")
    assert (row.steps, row.excess_us, row.cost_us) == (STEPS, 2000, pytest.approx(2000))
    assert row.cost_share == pytest.approx(0.2)
    assert "rank 2 is a straggler in the backward: waiting for it costs 20% of the time" in row.in_words()
    assert (found.delays.rank == 2).all()


def test_evaluations_that_vary_do_not_make_one_rank_s_delay_rotate() -> None:
    """All evaluate in every 20th step, for 40 ms and some more or less; rank 7 is late by 2 ms in 30 others."""
    job, rng = ranks(64), np.random.default_rng(0)
    evaluates = np.arange(STEPS) % 20 == 0
    late = np.flatnonzero(~evaluates)[::3][:30]
    for times in job.values():
        longer, noise = rng.normal(40_000, 3_000, int(evaluates.sum())), rng.uniform(0, 100, STEPS)
        times.own_us[:, OPTIMIZER] += noise
        times.wait_us[:] -= noise
        times.own_us[evaluates, COLUMNS.index("evaluation")] = longer
        times.step_us[evaluates] += 55_000
        times.wait_us[evaluates] += 55_000 - longer
    job[7].own_us[late, OPTIMIZER] += 2000
    job[7].wait_us[late] -= 2000
    found = find_stragglers(job, {})
    assert found is not None
    assert [(row.ranks, row.stage, row.pattern) for row in found.rows] == [((7,), "optimizer", "intermittent")]


@pytest.mark.parametrize("count", [64, 150])
def test_a_delay_rotates_also_over_more_ranks_than_there_are_steps(count: int) -> None:
    """In each step another one is late by 2 ms."""
    job, rng = ranks(count), np.random.default_rng(0)
    for rank, times in job.items():
        noise = rng.uniform(0, 100, STEPS)
        noise[np.arange(STEPS) % count == rank] += 2000
        times.own_us[:, OPTIMIZER] += noise
        times.wait_us[:] -= noise
    found = find_stragglers(job, {})
    assert found is not None
    (row,) = found.rows
    assert (row.stage, row.pattern, row.steps) == ("optimizer", "rotating", STEPS)
    assert len(row.ranks) == {64: 64, 150: 100}[count]


def test_ranks_that_do_not_wait_delay_nobody() -> None:
    job = ranks(4)
    job[2].own_us[:, BACKWARD] += 2000
    for each in job.values():
        each.wait_us[:] = 0
    found = find_stragglers(job, {})
    assert found is not None
    assert found.rows == ()


def test_too_few_steps_and_one_rank_are_not_compared() -> None:
    assert find_stragglers(ranks(1), {}) is None
    few = {rank: dataclasses.replace(each, number=each.number + 90 * rank) for rank, each in ranks(2).items()}
    assert find_stragglers(few, {}) is None


@pytest.mark.parametrize(("all_wait", "found"), [(False, True), (True, False)])
def test_who_waits_for_a_core_is_named_where_the_others_have_one(all_wait: bool, found: bool) -> None:
    job = ranks(4)
    for rank, each in job.items():
        each.core_us[:] = 2500 if rank == 1 else 1000 * all_wait
    result = find_stragglers(job, {})
    assert result is not None
    assert [(row.ranks, row.stage) for row in result.rows] == ([((1,), CORE)] if found else [])


@pytest.mark.parametrize("count", [2, 3])
def test_few_ranks_that_are_late_in_turn_rotate_and_none_is_steady(count: int) -> None:
    """Of an odd number of steps with two ranks one is late more often than not; it is not accused for that."""
    job = {rank: last(each, 99) for rank, each in ranks(count).items()}
    for rank, each in job.items():
        each.own_us[rank::count, DATALOADER] += 1000
    found = find_stragglers(job, {})
    assert found is not None
    assert [(row.pattern, row.stage, row.ranks) for row in found.rows] == [("rotating", "dataloader", (*range(count),))]


@pytest.mark.parametrize("pattern", ["intermittent", "rotating"])
def test_a_delay_is_plain_in_its_stage_where_the_noise_of_others_hides_it(pattern: str) -> None:
    """The optimizer is 2 ms late; backwards vary by 1 ms, on both ranks."""
    rng = np.random.default_rng(5)
    job = ranks(2)
    for rank, each in job.items():
        each.own_us[:, BACKWARD] += rng.normal(0, 1000, STEPS)
        every = slice(rank, None, 2) if pattern == "rotating" else slice(0, None if rank else 0, 3)
        each.own_us[every, OPTIMIZER] += 2000
    found = find_stragglers(job, {})
    assert found is not None
    ranks_late = (0, 1) if pattern == "rotating" else (1,)
    assert [(row.pattern, row.stage, row.ranks) for row in found.rows] == [(pattern, "optimizer", ranks_late)]


def test_the_stage_is_the_one_that_shows_the_delay_where_others_vary_by_more() -> None:
    """Rank 1 loads for 3 ms longer in a quarter of the steps; forwards and backwards of both vary by 3 ms each."""
    job, rng = ranks(2, step_us=80_000, own_us=60_000), np.random.default_rng(11)
    for each in job.values():
        each.own_us[:, FORWARD] += rng.normal(0, 3000, STEPS)
        each.own_us[:, BACKWARD] += rng.normal(0, 3000, STEPS)
        each.own_us[:, DATALOADER] = 1000 + rng.normal(0, 20, STEPS)
    job[1].own_us[::4, DATALOADER] += 3000
    found = find_stragglers(job, {})
    assert found is not None
    assert [(row.pattern, row.stage, row.ranks) for row in found.rows] == [("intermittent", "dataloader", (1,))]


def test_what_two_ranks_that_are_late_in_turn_differ_by_is_no_noise() -> None:
    """Forwards differ by 2 ms, one way or the other, and by their noise, of a quarter of a ms on each rank."""
    rng = np.random.default_rng(7)
    job = ranks(2)
    for rank, each in job.items():
        each.own_us[:, FORWARD] += rng.normal(0, 250, STEPS)
        each.own_us[rank::2, FORWARD] += 2000
    for step, longer in enumerate(rng.uniform(0, 6000, STEPS)):  # batches of unlike size, the same on both
        for each in job.values():
            each.own_us[step, FORWARD] += longer
    found = find_stragglers(job, {})
    assert found is not None
    assert [(row.pattern, row.stage, row.ranks) for row in found.rows] == [("rotating", "forward", (0, 1))]


@pytest.mark.parametrize("seed", range(5))
def test_two_ranks_that_are_late_in_turn_by_little_more_than_their_noise_rotate(seed: int) -> None:
    """Each is late by 3 ms in every second backward, and both vary by 0.9 ms: the difference varies by 1.3."""
    rng = np.random.default_rng(seed)
    late, healthy = ranks(2), ranks(2)
    for rank, each in late.items():
        noise = rng.normal(0, 900, STEPS)
        for times in (each, healthy[rank]):
            times.own_us[:, BACKWARD] += noise
        each.own_us[rank::2, BACKWARD] += 3000
    found, nothing = find_stragglers(late, {}), find_stragglers(healthy, {})
    assert found is not None
    assert nothing is not None
    assert [(row.pattern, row.stage, row.ranks) for row in found.rows] == [("rotating", "backward", (0, 1))]
    assert nothing.rows == ()


def test_a_rank_that_is_late_more_often_in_turn_is_not_accused_alone() -> None:
    """Rank 1 has 64 of the 100 slow steps, ranks 0 and 2 have 18 each."""
    job = ranks(3)
    for step in range(STEPS):
        job[1 if step % 25 < 16 else 2 * (step % 2)].own_us[step, OPTIMIZER] += 2000
    found = find_stragglers(job, {})
    assert found is not None
    assert [(row.pattern, row.stage, row.ranks) for row in found.rows] == [("rotating", "optimizer", (0, 1, 2))]


def test_a_rank_that_is_late_by_much_is_no_rotation_beside_others_that_are_by_little() -> None:
    """Rank 1 is late by 3 ms in a quarter of the steps, ranks 0 and 2 by 0.9 in an eighth each; all vary by 0.05."""
    job = ranks(3)
    rng = np.random.default_rng(3)
    for each in job.values():
        each.own_us[:, FORWARD] += rng.normal(0, 50, STEPS)
    for step in range(STEPS):
        late = {0: (1, 3000), 4: (1, 3000), 2: (0, 900), 6: (2, 900)}.get(step % 8)
        if late is not None:
            job[late[0]].own_us[step, FORWARD] += late[1]
    found = find_stragglers(job, {})
    assert found is not None
    assert [(row.pattern, row.stage, row.ranks) for row in found.rows][:1] == [("intermittent", "forward", (1,))]
    assert all(row.pattern != "rotating" for row in found.rows)


def test_a_stage_that_takes_what_another_leaves_delays_nobody() -> None:
    """Now and then rank 1 does in its optimizer what it otherwise does in its backward."""
    job = ranks(3)
    job[1].own_us[::3, OPTIMIZER] += 2000
    job[1].own_us[::3, BACKWARD] -= 2000
    found = find_stragglers(job, {})
    assert found is not None
    assert found.rows == ()


def test_a_median_that_noise_explains_accuses_nobody() -> None:
    """Ranks vary by a third of their step, so the median of a hundred differences is off by some hundreds of µs."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        job = ranks(2)
        for each in job.values():
            each.own_us[:, BACKWARD] += rng.normal(0, 3000, STEPS)
        found = find_stragglers(job, {})
        assert found is not None
        assert found.rows == ()


def test_a_stage_of_two_that_is_late_now_and_then_is_no_rotation() -> None:
    """Rank 0 is late by 6 ms in 36 of 100 steps; rank 1, which is below it there, is late in none."""
    job, rng = ranks(2, step_us=50_000, own_us=12_000), np.random.default_rng(5)
    for each in job.values():
        each.own_us[:, FORWARD] += rng.normal(0, 300, STEPS)
        each.own_us[:, BACKWARD] += rng.normal(0, 700, STEPS)
    late = np.arange(STEPS) % 25 < 9
    job[0].own_us[late, FORWARD] += 6000
    found = find_stragglers(job, {}, [[0], [1]])
    assert found is not None
    assert [(row.pattern, row.stage, row.ranks) for row in found.rows] == [("intermittent", "forward", (0,))]


def test_stages_of_a_pipeline_that_are_late_in_turn_rotate() -> None:
    """Rank 1 has more to do than rank 0 always, by less than what counts as uneven."""
    job = ranks(2)
    job[1].own_us[:, BACKWARD] += 500
    for rank, each in job.items():
        each.own_us[rank::2, FORWARD] += 3000
    found = find_stragglers(job, {}, [[0], [1]])
    assert found is not None
    assert [(row.pattern, row.stage) for row in found.rows] == [("rotating", "forward")]


def last(each: OwnTimes, steps: int) -> OwnTimes:
    """A rank's last steps."""
    return OwnTimes(**{name: value[-steps:] for name, value in vars(each).items()})


PLANS = [
    ("ddp", "backward", "steady"), ("ddp", "optimizer", "intermittent"), ("fsdp", "forward", "late"),
    ("fsdp", "dataloader", "rotating"), ("zero1", "backward", "rotating"), ("pipeline", "backward", "steady"),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "stage", "pattern"), PLANS)
def test_planted_delays_are_found_and_healthy_jobs_have_none(strategy: str, stage: str, pattern: str) -> None:
    plan = RunPlan(strategy=strategy, ranks=8, steps=120, step_ms=50, noise=0.01, unlike=0.003, transfer=0.1, seed=3)
    cause = PlantedDelay(stage, pattern, (5,), 0.25)
    assert reported(plan) == ()
    rows = reported(dataclasses.replace(plan, cause=cause))
    assert is_right(cause, rows), rows


@pytest.mark.parametrize("pattern", ["steady", "intermittent", "rotating"])
@pytest.mark.parametrize("stage", ["forward", "backward", "optimizer"])
def test_what_threads_wait_for_a_core_in_a_stage_hides_no_delay_there(stage: str, pattern: str) -> None:
    """Threads are put off for 6 ms of 50, here or there; the delay is one of 6 ms."""
    plan = RunPlan("fsdp", ranks=3, steps=120, step_ms=50, noise=0.01, unlike=0.003, transfer=0.1, put_off=0.12, seed=5)
    cause = PlantedDelay(stage, pattern, (1,), 0.12)
    assert reported(plan) == ()
    rows = reported(dataclasses.replace(plan, cause=cause))
    assert is_right(cause, rows), rows


def test_a_burst_of_waiting_for_a_core_is_where_a_step_is_longer() -> None:
    """Steps of 30 ms: 10 in the forward, 20 in the backward, of which 8 wait for a rank. In one the forward takes 6 ms
    longer, and the thread waited 5 ms for a core, nobody knows where; in another 3 ms, and nothing took longer.
    """
    stages = np.array([[10.0, 20, 0]] * 5)
    waits = np.array([[0.0, 8, 0]] * 5)
    core = np.zeros((5, 4))
    stages[1, 0] += 6
    core[1:3, -1] = 5, 3
    own, waited = without_waits(stages.sum(axis=1), stages, waits, core)
    assert own.tolist() == [[10, 12, 0], [11, 12, 0], *[[10, 12, 0]] * 3]
    assert waited.tolist() == [0, 5, 0, 0, 0]


def test_what_threads_wait_for_in_each_step_is_spread_evenly() -> None:
    """10 of 40 ms, of which 20 are own time."""
    stages, waits, core = np.array([[10.0, 30, 0]] * 3), np.array([[0.0, 20, 0]] * 3), np.array([[0.0, 0, 0, 10]] * 3)
    own, waited = without_waits(stages.sum(axis=1), stages, waits, core)
    assert own.tolist() == [[7.5, 7.5, 0]] * 3
    assert waited.tolist() == [5.0] * 3


def test_a_slow_host_is_one_straggler(tmp_path: Path) -> None:
    plan = RunPlan(strategy="fsdp", ranks=32, steps=80, step_ms=50, noise=0.01, unlike=0.003, transfer=0.1, seed=4)
    cause = PlantedDelay("forward", "steady", tuple(range(8, 16)), 0.1)
    (row,) = reported(dataclasses.replace(plan, cause=cause))
    assert isinstance(row, HistoryStraggler)
    assert (row.ranks, row.hosts, row.stage) == (tuple(range(8, 16)), ("host1",), "forward")


@pytest.mark.parametrize(("regularly", "found"), [(True, True), (False, False)])
def test_five_pauses_of_one_rank_are_its_own_where_they_come_regularly(regularly: bool, found: bool) -> None:
    """So few may come by chance, each where it likes."""
    job, at = ranks(3), np.array([15, 30, 45, 60, 75] if regularly else [15, 33, 45, 61, 75])
    job[1].own_us[at, COLUMNS.index("other")] += 200_000
    for rank, times in job.items():
        times.step_us[at] += 200_000
        if rank != 1:
            times.wait_us[at] += 200_000
    told = find_stragglers(job, {})
    assert told is not None
    assert [(row.ranks, row.period, row.stage) for row in told.rows] == ([((1,), 15, "other")] if found else [])
    assert all("in one of every 15 steps" in row.in_words() for row in told.rows)
