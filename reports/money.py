"""Money in words: what the job costs, and what its findings would save."""

from __future__ import annotations

from perfscope.reports.format import significant
from perfscope.summary import Summary
from perfscope.summary_cost import Cost, SavingRow


def amount(value: float, cost: Cost) -> str:
    """An amount of the cost's currency: ``1,200 USD``, ``0.0135 EUR``."""
    return f"{significant(value)} {cost.currency}"


def saving(row: SavingRow, cost: Cost) -> str:
    """What one change saves a day: ``40.5 USD a day (between 38.2 and 41.0)``, ``at most 120 USD a day``."""
    told = f"{amount(row.per_day, cost)} a day"
    if row.bounded:
        return f"at most {told}"
    if row.per_day_low is None or row.per_day_high is None:
        return told
    return f"{told} (between {significant(row.per_day_low)} and {significant(row.per_day_high)})"


def savings(summary: Summary) -> tuple[str, ...]:
    """What each finding saves, numbered as they are, and all of them together; empty where no price was given, or
    nothing is saved. The bill itself is one of the first screen's numbers.
    """
    cost = summary.cost
    if cost is None:
        return ()
    rows = [f"  finding {row.finding + 1} saves {saving(row, cost)}" for row in cost.savings if row.finding is not None]
    if cost.plan is not None:
        rows.append(f"  all that can be played together saves {saving(cost.plan, cost)}; savings overlap")
    if not rows:
        return ()
    return (f"What the changes save, at {amount(cost.price_per_device_hour, cost)} per device-hour:", *rows)
