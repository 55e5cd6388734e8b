"""The cost of a job, from the price of a device-hour.

A change that makes the step x % shorter saves x % of the cost of the same training. The cost per day is devices x
price x 24 h; the saving of a finding is that cost x (1 - predicted step / step).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from perfscope.errors import PerfscopeError
from perfscope.frozen import dataclass
from perfscope.results.cost import Cost, SavingRow
from perfscope.results.findings import Finding, Prediction
from perfscope.results.summary import Summary

US_PER_HOUR: Final = 3.6e9
HOURS_PER_DAY: Final = 24


@dataclass(frozen=True, kw_only=True)
class Price:
    """The price of one device-hour. Raises PerfscopeError where it is not above 0."""

    per_device_hour: float
    currency: str = "USD"
    """Label written after amounts; amounts are not converted."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.per_device_hour) or self.per_device_hour <= 0:
            raise PerfscopeError(
                f"the price of a device-hour is {self.per_device_hour}; give a price above 0, such as 2.50"
            )
        if not self.currency.strip():
            raise PerfscopeError("the currency is empty; give a label, such as USD or EUR")


def priced(summary: Summary, price: Price) -> Summary:
    """The summary with its ``cost``; unchanged where it has no rank."""
    devices = summary.job.world_size or len(summary.job.ranks) + len(summary.job.missing_ranks)
    if not devices:
        return summary
    return replace(summary, cost=_cost(summary, price, devices))


def _cost(summary: Summary, price: Price, devices: int) -> Cost:
    hourly = devices * price.per_device_hour
    step_us = _step_us(summary)
    per_step = None if step_us is None else hourly * step_us / US_PER_HOUR
    return Cost(
        price_per_device_hour=price.per_device_hour,
        currency=price.currency.strip(),
        devices=devices,
        step_time_us=step_us,
        per_step=per_step,
        per_1000_steps=None if per_step is None else 1000 * per_step,
        per_day=hourly * HOURS_PER_DAY,
        savings=tuple(
            saving
            for place, finding in enumerate(summary.findings)
            if (saving := _saving(summary, place, finding, hourly * HOURS_PER_DAY)) is not None
        ),
        plan=_of_plan(summary, hourly * HOURS_PER_DAY),
    )


def _step_us(summary: Summary) -> float | None:
    """Step time without the profiler where it is known, else the profiled one; None without steps."""
    if not summary.job.steps and summary.history is None:
        return None
    return summary.job.step_us or None


def _saving(summary: Summary, place: int, finding: Finding, per_day: float) -> SavingRow | None:
    """None where the finding has neither a prediction nor a finite bound."""
    step_us = summary.job.step_us
    if finding.predicted_step_us is not None and step_us:
        return _predicted(place, finding.rule, finding.predicted_step_us, step_us, per_day)
    if finding.ceiling is None or not math.isfinite(finding.ceiling):
        return None
    return SavingRow(
        finding=place,
        rule=finding.rule,
        per_day=per_day * finding.ceiling / (1 + finding.ceiling),
        per_day_low=None,
        per_day_high=None,
        bounded=True,
    )


def _of_plan(summary: Summary, per_day: float) -> SavingRow | None:
    if summary.plan is None or not summary.job.step_us:
        return None
    return _predicted(None, "", summary.plan.predicted_step_us, summary.job.step_us, per_day)


def _predicted(place: int | None, rule: str, predicted_us: Prediction, step_us: float, per_day: float) -> SavingRow:
    return SavingRow(
        finding=place,
        rule=rule,
        per_day=per_day * (1 - predicted_us.mid / step_us),
        per_day_low=per_day * (1 - predicted_us.high / step_us),
        per_day_high=per_day * (1 - predicted_us.low / step_us),
        bounded=False,
    )
