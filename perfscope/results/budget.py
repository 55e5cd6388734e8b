"""The budget of ``perfscope check`` and the result of the checks, as typed values (schema ``perfscope.check/1``)."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Annotated, Any, Final

from perfscope.frozen import dataclass
from perfscope.results.display import Displayed

SCHEMA: Final = "perfscope.check/1"

SEVERITIES: Final = ("high", "medium", "low", "info")
"""The most severe first."""

PASSED: Final = "passed"
FAILED: Final = "failed"
UNKNOWN: Final = "unknown"
"""It could not be judged, because the recording lacks the number. That fails the check: a budget that is not checked
must not pass."""
SKIPPED: Final = "skipped"
"""It could not be judged, and the budget says that this is allowed."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A value in a budget."""

    value: float
    unit: Annotated[
        str,
        "``us``, ``share``, ``bytes`` or ``per_second``; in a regression also ``percent`` of the baseline (1 is 100 "
        "%).",
    ]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The limits of one number."""

    metric: str
    at_most: Quantity | None = None
    at_least: Quantity | None = None
    regression: Annotated[
        Quantity | None, "How much worse than the baseline it may be; only a significant change fails."
    ] = None
    optional: Annotated[bool, "Skip the check where the recording lacks the number."] = False
    per_step: Annotated[float | None, "For ``tokens_per_second``: tokens per step, all ranks."] = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Everything that a job is checked against."""

    limits: tuple[Limit, ...] = ()
    fail_on: Annotated[str | None, "Findings of this severity or above fail; None: no finding does."] = None
    ignore: Annotated[tuple[str, ...], "Rules whose findings are ignored."] = ()
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """The check of one limit or one finding."""

    name: Annotated[str, "Such as ``step_time at most``; unique, so that test reports can follow it over time."]
    status: Annotated[str, "``passed``, ``failed``, ``unknown`` or ``skipped``."]
    message: Annotated[str, "The result in a sentence, and what to do where it is not passed."]
    unit: Annotated[str, "Of the numbers; empty for a finding."] = ""
    measured: float | None = None
    limit: float | None = None
    baseline: Annotated[float | None, "The baseline's value, in the check of a regression."] = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Check(Displayed):
    """The result of all checks of a job."""

    _shown_by = "check"

    source: str
    budget: str
    baseline: str | None
    headline: Annotated[str, "The verdict of the job's analysis."]
    rows: tuple[CheckRow, ...]
    notes: tuple[str, ...] = ()
    perfscope_version: str = ""
    schema: str = field(default=SCHEMA, init=False)

    def __repr__(self) -> str:
        return f"<Check of {self.source[:200]}: {len(self.failed)} of {len(self.rows)} failed>"

    @property
    def failed(self) -> tuple[CheckRow, ...]:
        """The checks that failed or could not be judged."""
        return tuple(row for row in self.rows if row.status in (FAILED, UNKNOWN))

    @property
    def passed(self) -> bool:
        """No check failed."""
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        """The JSON value of schema ``perfscope.check/1``."""
        return {"schema": self.schema, "passed": self.passed, **dataclasses.asdict(self)}
