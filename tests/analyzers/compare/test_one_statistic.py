"""Verdict, range and causes of a comparison never contradict each other: random pairs of step tables."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import perfscope
from perfscope.reports.compare import words
from perfscope.results.comparison import Difference
from perfscope.results.summary import Summary
from tests.reports.examples import breakdown, healthy, job

pytestmark = pytest.mark.scale

NAMES = ("compute", "exposed_comm_transfer", "idle_dataloader", "idle_launch", "idle_host")
Table = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def recorded(table: Table) -> Summary:
    """A job of one rank whose steps (rows) took these times (ms) by category (columns)."""
    means = dict(zip(NAMES, table.mean(axis=0).tolist(), strict=True))
    rows = {name: tuple((1000 * table[:, column]).tolist()) for column, name in enumerate(NAMES)}
    return replace(
        healthy(),
        job=replace(job(1, tuple(table.sum(axis=1).tolist())), time_breakdown_us_per_step=rows),
        time_breakdown=(breakdown(0, **means),),
        critical_path=None,
        history=None,
    )


def drawn(rng: np.random.Generator, means: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Table:
    """Three to twenty steps that vary by some percent, now and then with an odd one, or a loader that stalls."""
    steps = int(rng.integers(3, 21))
    table = means * rng.normal(1, rng.choice((0.002, 0.02, 0.1)), (steps, len(means)))
    if rng.random() < 0.3:
        table[int(rng.choice((0, steps - 1))), int(rng.integers(len(NAMES)))] += rng.choice((-0.5, 2.0)) * means.sum()
    if rng.random() < 0.2:
        table[int(rng.integers(4)) :: 4, 2] += 2 * means.sum()
    return np.maximum(table, 0.0)


def pairs(count: int, seed: int, change: float) -> list[Difference]:
    """Pairs of recordings of which each category changed by up to this share of the step."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        means = rng.dirichlet(np.ones(len(NAMES))) * 100
        moved = np.maximum(means + rng.normal(0, change * 100 / 2, len(NAMES)), 0.0)
        both = recorded(drawn(rng, means)), recorded(drawn(rng, moved))
        found.append(perfscope.compare(*both).differences[0])
    return found


@pytest.fixture(scope="module")
def random_pairs() -> list[Difference]:
    return pairs(300, 1, 0.3) + pairs(100, 2, 0.02)


def test_the_range_excludes_no_change_exactly_where_it_is_significant(random_pairs: list[Difference]) -> None:
    verdicts = set()
    for difference in random_pairs:
        step = difference.step
        assert step.low_us is not None
        assert step.high_us is not None
        assert step.low_us <= step.delta_us <= step.high_us
        excluded = step.low_us > 0 or step.high_us < 0
        assert excluded == (step.verdict in ("faster", "slower"))
        assert step.verdict == "same" or (step.verdict == "slower") == (step.delta_us > 0)
        verdicts.add(step.verdict)
        for row in difference.categories:
            assert row.low_us is not None
            assert row.high_us is not None
            assert (row.low_us > 0 or row.high_us < 0) == row.significant
    assert verdicts == {"faster", "slower", "same"}


def test_categories_add_up_to_the_change_that_is_judged(random_pairs: list[Difference]) -> None:
    for difference in random_pairs:
        total = math.fsum(row.delta_us for row in difference.categories)
        assert total == pytest.approx(difference.step.delta_us, rel=1e-9, abs=1e-6)
        assert math.fsum(row.baseline_us for row in difference.categories) == pytest.approx(difference.step.baseline_us)


def test_causes_move_with_the_step_and_carry_most_of_its_change(random_pairs: list[Difference]) -> None:
    """And each one that is called the cause is significant by itself."""
    kinds = set()
    for difference in random_pairs:
        rows = {row.name: row for row in difference.categories}
        step = difference.step
        assert bool(difference.causes) == (step.verdict in ("faster", "slower"))
        moved = [rows[name].delta_us for name in difference.causes]
        assert all(us * step.delta_us > 0 for us in moved)
        assert [abs(us) for us in moved] == sorted((abs(us) for us in moved), reverse=True)
        if difference.causes:
            assert abs(sum(moved)) >= 0.5 * abs(step.delta_us)
            assert not difference.causes_significant or all(rows[name].significant for name in difference.causes)
            kinds.add(difference.causes_significant)
        text = words.because(difference)
        if step.verdict != "same":
            first = text.split(",")[0]
            assert ("more" if step.delta_us > 0 else "less") in first
    assert kinds == {True, False}


def test_no_alarm_where_nothing_changed() -> None:
    """At most one pair in a hundred has a verdict, and one in a hundred a category."""
    rng = np.random.default_rng(3)
    step_alarms = category_alarms = 0
    count = 400
    for _ in range(count):
        means = rng.dirichlet(np.ones(len(NAMES))) * 100
        tables = [means * rng.normal(1, 0.2, (8, len(means))) for _ in range(2)]
        difference = perfscope.compare(*map(recorded, tables), noise=0.0).differences[0]
        step_alarms += difference.step.verdict != "same"
        category_alarms += any(row.significant for row in difference.categories)
    # Three standard deviations of what 1 % gives.
    most = 0.01 * count + 3 * math.sqrt(0.01 * count)
    assert step_alarms <= most
    assert category_alarms <= most


@pytest.mark.parametrize("odd", [False, True])
def test_a_real_change_is_found_with_its_cause(odd: bool) -> None:
    rng = np.random.default_rng(4)
    found = 0
    for _ in range(100):
        means = np.array([60.0, 10.0, 20.0, 5.0, 5.0])
        tables = [means * rng.normal(1, 0.05, (8, len(means))) for _ in range(2)]
        tables[1][:, 2] -= 10
        if odd:
            tables[0][-1, 0] += 300
        difference = perfscope.compare(*map(recorded, tables)).differences[0]
        found += difference.step.verdict == "faster" and difference.causes == ("idle_dataloader",)
    assert found >= 90


def test_a_change_of_many_small_parts_says_what_it_is_made_up_of() -> None:
    """Ten slow parts of a millisecond each, in opposite steps: none stands out of its own noise, their sum does."""
    rng = np.random.default_rng(5)
    base = np.array([60.0, 10.0, 10.0, 10.0, 10.0])
    tables = []
    for shift in (0.0, 1.2):
        noise = rng.normal(0, 4, (8, 5))
        noise -= noise.mean(axis=1, keepdims=True)
        tables.append(base + shift + noise + rng.normal(0, 0.3, (8, 1)) / 5)
    difference = perfscope.compare(*map(recorded, tables)).differences[0]
    assert difference.step.verdict == "slower"
    assert not difference.causes_significant
    assert "The change is made up of" in words.because(difference)
    assert "not all significant alone" in words.because(difference)


def test_one_step_on_a_side_is_not_tested() -> None:
    one, many = (recorded(np.full((steps, 5), 20.0)) for steps in (1, 8))
    difference = perfscope.compare(one, many).differences[0]
    assert difference.step.verdict == "unknown"
    assert (difference.step.low_us, difference.step.p, difference.causes) == (None, None, ())
    assert "too few to judge" in difference.step.why
    assert {row.significant for row in difference.categories} == {None}


def test_what_explains_a_change_is_no_noise() -> None:
    """A loader that became slow, whose first batch was still ready: that step is whole, and counts."""
    rng = np.random.default_rng(4)
    before, after = np.zeros((6, len(NAMES))), np.zeros((6, len(NAMES)))
    before[:], after[:] = 0.1, 0.1
    before[:, 0] = after[:, 0] = 13 + rng.normal(0, 0.02, 6)
    before[:, 2], after[:, 2] = 0.0, (0.2, 2.0, 7.4, 6.1, 7.5, 7.3)
    difference = perfscope.compare(recorded(before), recorded(after)).differences[0]
    step = difference.step
    assert (step.verdict, step.candidate_steps, step.candidate_us) == ("slower", 6, step.candidate_mean_us)
    assert "Left out" not in step.why
    (row,) = [row for row in difference.categories if row.name in difference.causes]
    assert (row.name, row.significant) == ("idle_dataloader", False)
    assert words.category_verdict(difference, row) == "part of the change"
    cut = before.copy()
    cut[-1] *= 0.4
    left_out = perfscope.compare(recorded(before), recorded(cut)).differences[0]
    assert left_out.step.candidate_steps == 5


def test_odd_steps_are_named_and_the_mean_of_all_stays_visible() -> None:
    table = np.tile([60.0, 10.0, 20.0, 5.0, 5.0], (8, 1)) * np.random.default_rng(6).normal(1, 0.01, (8, 5))
    odd = table.copy()
    odd[3, 0] += 400
    difference = perfscope.compare(recorded(table), recorded(odd)).differences[0]
    assert difference.step.verdict == "same"
    assert difference.step.candidate_steps == 7
    assert difference.step.candidate_mean_us - difference.step.candidate_us == pytest.approx(50_000, rel=0.05)
    assert "Left out" in words.certainty(difference)
    assert "means of all steps" in words.certainty(difference)
