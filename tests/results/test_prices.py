"""Money: devices x price x time, and what of it findings save."""

from __future__ import annotations

import dataclasses

import pytest

from perfscope.errors import PerfscopeError
from perfscope.results.cost import Cost
from perfscope.results.findings import Prediction, Severity
from perfscope.results.prices import Price, priced
from perfscope.results.rows import Plan
from perfscope.results.summary import Summary
from tests.reports.examples import healthy, starved, straggler


def cost(summary: Summary, price: float = 2.5, **changes: object) -> Cost:
    job = dataclasses.replace(summary.job, **changes)
    found = priced(dataclasses.replace(summary, job=job), Price(per_device_hour=price, currency="EUR")).cost
    assert found is not None
    return found


def test_a_day_is_devices_times_price_times_24_hours_and_a_step_its_part_of_it():
    found = cost(healthy(), world_size=8, step_time_us=360_000.0, unprofiled_step_us=None)
    assert (found.devices, found.currency) == (8, "EUR")
    assert found.per_day == pytest.approx(8 * 2.5 * 24)
    # 0.36 s is one ten-thousandth of an hour.
    assert found.per_step == pytest.approx(8 * 2.5 / 10_000)
    assert found.per_1000_steps == pytest.approx(8 * 2.5 / 10)


def test_profiling_is_not_priced():
    slowed = cost(healthy(), step_time_us=500.0, unprofiled_step_us=400.0)
    assert slowed.step_time_us == 400.0


def test_without_steps_there_is_no_cost_of_one():
    found = cost(healthy(), steps=())
    assert (found.per_step, found.per_1000_steps, found.step_time_us) == (None, None, None)
    assert found.per_day > 0


def test_missing_ranks_are_paid_for_too():
    assert cost(straggler(), world_size=None, ranks=(0, 1), missing_ranks=(2,)).devices == 3


def test_a_prediction_saves_its_part_of_the_bill():
    summary = starved()
    step = summary.job.step_us
    predicted = Prediction(low=0.5 * step, mid=0.6 * step, high=0.9 * step)
    finding = dataclasses.replace(summary.findings[0], predicted_step_us=predicted)
    found = cost(dataclasses.replace(summary, findings=(finding,), plan=Plan(whatif={}, predicted_step_us=predicted)))
    (saving,) = found.savings
    assert (saving.finding, saving.rule, saving.bounded) == (0, finding.rule, False)
    assert saving.per_day == pytest.approx(0.4 * found.per_day)
    assert (saving.per_day_low, saving.per_day_high) == pytest.approx((0.1 * found.per_day, 0.5 * found.per_day))
    assert found.plan is not None
    assert found.plan.finding is None
    assert found.plan.per_day == saving.per_day


def test_a_ceiling_saves_at_most_its_part():
    summary = starved()
    finding = dataclasses.replace(summary.findings[0], predicted_step_us=None, ceiling=0.25)
    (saving,) = cost(dataclasses.replace(summary, findings=(finding,))).savings
    # 1.25x faster: a step takes 80 % of its time.
    assert saving.per_day == pytest.approx(0.2 * cost(summary).per_day)
    assert saving.bounded
    assert saving.per_day_low is None


@pytest.mark.parametrize("ceiling", [None, float("inf")])
def test_what_states_no_gain_saves_nothing(ceiling):
    summary = starved()
    finding = dataclasses.replace(summary.findings[0], severity=Severity.INFO, predicted_step_us=None, ceiling=ceiling)
    assert cost(dataclasses.replace(summary, findings=(finding,))).savings == ()


def test_tables_and_json_have_it():
    summary = priced(starved(), Price(per_device_hour=1.0))
    assert list(summary.frames.cost["currency"]) == ["USD"]
    assert len(summary.frames.savings) == len(summary.cost.savings) > 0
    assert Summary.from_dict(summary.to_dict()).cost == summary.cost
    assert len(healthy().frames.cost) == 0


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(price):
    with pytest.raises(PerfscopeError, match=r"such as 2\.50"):
        Price(per_device_hour=price)


def test_a_currency_has_a_name():
    with pytest.raises(PerfscopeError, match="such as USD"):
        Price(per_device_hour=1.0, currency=" ")
