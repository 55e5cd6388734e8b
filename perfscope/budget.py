"""What ``perfscope check`` holds a job to, and what came out: typed values (schema ``perfscope.check/1``)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final

SCHEMA: Final = "perfscope.check/1"

SEVERITIES: Final = ("high", "medium", "low", "info")
"""The gravest first."""

HELD: Final = "held"
EXCEEDED: Final = "exceeded"
UNKNOWN: Final = "unknown"
"""It could not be judged: the recording does not hold the number. A budget that cannot be checked is not held."""
SKIPPED: Final = "skipped"
"""Not judged, and the budget allows that."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A value of a budget in the unit of the numbers: ``us``, ``share``, ``bytes`` or ``per_second``."""

    value: float
    unit: str
    """``percent`` besides, of the baseline's value (1 is all of it)."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What one number must hold."""

    metric: str
    at_most: Quantity | None = None
    at_least: Quantity | None = None
    regression: Quantity | None = None
    """How much worse than the baseline it may be, beyond the noise."""
    optional: bool = False
    """Where the recording does not tell the number, that is no failure."""
    per_step: float | None = None
    """Of ``tokens_per_second``: tokens that all ranks train on in a step."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Everything that a job is held to."""

    limits: tuple[Limit, ...] = ()
    fail_on: str | None = None
    """Findings of this severity or graver break the budget; None: none does."""
    ignore: tuple[str, ...] = ()
    """Rules whose findings do not count."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """One limit, or one finding, and whether it held."""

    name: str
    """Such as ``step_time at most``; unique, so that test reports can follow it over time."""
    status: str
    """``held``, ``exceeded``, ``unknown`` or ``skipped``."""
    unit: str
    measured: float | None
    limit: float | None
    baseline: float | None
    message: str
    """What was found, in a sentence, and what to do where it is not held."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A job held against a budget."""

    source: str
    budget: str
    baseline: str | None
    headline: str
    """The job's own verdict."""
    rows: tuple[CheckRow, ...]
    notes: tuple[str, ...] = ()
    perfscope_version: str = ""
    schema: str = field(default=SCHEMA, init=False)

    @property
    def broken(self) -> tuple[CheckRow, ...]:
        """What does not hold, or could not be judged."""
        return tuple(row for row in self.rows if row.status in (EXCEEDED, UNKNOWN))

    @property
    def held(self) -> bool:
        """Nothing is broken."""
        return not self.broken

    def to_dict(self) -> dict[str, Any]:
        """The JSON value of schema ``perfscope.check/1``."""
        return {"schema": self.schema, "held": self.held, **dataclasses.asdict(self)}
