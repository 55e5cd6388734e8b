"""Money in words: amounts with their currency, bounds called bounds, savings never added."""

from __future__ import annotations

import dataclasses

from perfscope.prices import Price, priced
from perfscope.reports import money, terminal
from perfscope.summary import Plan, Summary
from tests.reports.examples import starved


def with_price(**changes: object) -> Summary:
    summary = dataclasses.replace(starved(), **changes)
    job = dataclasses.replace(summary.job, world_size=8, step_time_us=360_000.0, unprofiled_step_us=None)
    return priced(dataclasses.replace(summary, job=job), Price(per_device_hour=2.5, currency="EUR"))


def finding(**changes: object):
    return dataclasses.replace(starved().findings[0], **changes)


def test_the_price_comes_first_and_nothing_where_nothing_is_saved():
    first, *_ = money.savings(with_price())
    assert first == "What the changes save, at 2.50 EUR per device-hour:"
    assert money.savings(with_price(findings=(), plan=None)) == ()


def test_a_ceiling_saves_at_most():
    bounded = finding(predicted_step_us=None, ceiling=0.25)
    assert money.savings(with_price(findings=(bounded,)))[1] == "  finding 1 saves at most 96.0 EUR a day"


def test_a_prediction_has_its_range_and_a_plan_says_that_savings_overlap():
    times = {"low": 180_000.0, "mid": 270_000.0, "high": 360_000.0}
    told = money.savings(
        with_price(findings=(finding(predicted_step_us=times),), plan=Plan(whatif={}, predicted_step_us=times))
    )
    assert told[1] == "  finding 1 saves 120 EUR a day (between 0 and 240)"
    assert told[2] == "  all that can be played together saves 120 EUR a day (between 0 and 240); savings overlap"


def test_the_terminal_has_it_only_with_a_price():
    assert "EUR a day" in terminal.verdict(with_price())
    assert "a day" not in terminal.verdict(starved())
