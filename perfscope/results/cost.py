"""What the job costs, and what each change would save, at a price per device-hour."""

from __future__ import annotations

from typing import Annotated

from perfscope.frozen import dataclass
from perfscope.results.fields import Money, Us


@dataclass(frozen=True, kw_only=True)
class SavingRow:
    """What one change saves while the job does the same work: the cost of a day x (1 - new step time / step time)."""

    finding: Annotated[
        int | None, "Place in ``findings``, from 0; None for the plan, which is all changes replayed together."
    ]
    rule: Annotated[str, "Empty for the plan."]
    per_day: Annotated[
        Money,
        "Saved per day at the predicted step time; at most this where ``bounded``. Below 0 where the change would "
        "cost time.",
    ]
    per_day_low: Annotated[Money | None, "At the slowest step time within the prediction; None where ``bounded``."]
    per_day_high: Annotated[Money | None, "At the quickest."]
    bounded: Annotated[bool, "Made from a ceiling: nothing shows that so much can be saved."]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the job costs at a price per device-hour: devices x price x time, in ``currency``."""

    price_per_device_hour: Annotated[Money, "As given by ``--price``."]
    currency: Annotated[str, "As given by ``--currency``."]
    devices: Annotated[int, "One for each rank, those missing from the recording too."]
    step_time_us: Annotated[
        Us | None,
        "The step that is priced: unprofiled where the recording has unprofiled steps, since nobody pays for "
        "profiling. None where nothing marks steps.",
    ]
    per_step: Annotated[Money | None, "Of all devices."]
    per_1000_steps: Annotated[Money | None, "Of all devices."]
    per_day: Annotated[Money, "Of 24 hours, however many steps that is."]
    savings: Annotated[tuple[SavingRow, ...], "Of the findings that have a gain, in their order."] = ()
    plan: Annotated[
        SavingRow | None,
        "Of all changes that can be replayed, together; None where there is no such plan. Single savings overlap: "
        "never add them.",
    ] = None
