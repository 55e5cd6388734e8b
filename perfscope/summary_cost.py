"""The summary's money: what the job costs, and what each change would save, at a price per device-hour."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SavingRow:
    """What one change saves while the job does the same work: the cost of a day x (1 - new step time / step time)."""

    finding: int | None
    """Place in ``findings``, from 0; None for the plan, which is all changes played together."""
    rule: str
    """Empty for the plan."""
    per_day: float
    """Of the predicted step time; at most this where ``bounded``. Below 0 where the change would cost time."""
    per_day_low: float | None
    """Of the slowest step time within the prediction; None where ``bounded``."""
    per_day_high: float | None
    """Of the quickest."""
    bounded: bool
    """Made from a ceiling: nothing says that so much can be saved."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the job costs at a price per device-hour: devices x price x time, in ``currency``."""

    price_per_device_hour: float
    currency: str
    devices: int
    """One for each rank, those missing from the recording too."""
    step_time_us: float | None
    """The step that is priced: unprofiled where the recording knows how long those take, since nobody pays for
    profiling. None where nothing marks steps."""
    per_step: float | None
    per_1000_steps: float | None
    per_day: float
    """Of 24 hours, however many steps fit in."""
    savings: tuple[SavingRow, ...] = ()
    """Of the findings that have a gain, in their order."""
    plan: SavingRow | None = None
    """Of all that can be played, together; None where there is no such plan. Single savings overlap: never add them."""
