"""What commands print as JSON besides a summary, a comparison and a check. Their schemas are made from it."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Annotated, Any, Final

from perfscope.frozen import dataclass
from perfscope.results.fields import Share, Us
from perfscope.results.findings import Prediction

WHATIF_SCHEMA: Final = "perfscope.whatif/1"
SWEEP_SCHEMA: Final = "perfscope.sweep/1"
DOCTOR_SCHEMA: Final = "perfscope.doctor/1"


class Document:
    """What a command prints, whose schema has a name."""

    schema: str

    def to_dict(self) -> dict[str, Any]:
        """The JSON value."""
        return {"schema": self.schema, **dataclasses.asdict(self)}  # type: ignore[call-overload]  # subclasses are dataclasses


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """The step time with settings changed. Times are of steps without the profiler where the recording timed some."""

    measured_step_us: Annotated[Us, "Mean of the recording's steps."]
    profiled_step_us: Annotated[
        Us | None, "The recorded step where ``measured_step_us`` is of others; None where it is the same."
    ]
    replayed_step_us: Annotated[Us, "The recorded step, replayed without a change."]
    predicted_step_us: Annotated[Prediction, "The step with the settings changed."]
    error: Annotated[Share, "Difference of the replayed from the recorded step, over the recorded."]
    settings: Annotated[dict[str, str], "Setting -> its value."]
    assumed: Annotated[
        tuple[str, ...], "What the prediction depends on and the recording does not contain, one sentence each."
    ]


@dataclass(frozen=True, kw_only=True)
class WhatIf(PredictedStep, Document):
    """What ``perfscope whatif --json`` prints: all settings changed together."""

    schema: str = field(default=WHATIF_SCHEMA, init=False)


@dataclass(frozen=True, kw_only=True)
class SweepPoint(PredictedStep):
    """One value of a sweep."""

    value: Annotated[str, "Of the setting that is swept."]


@dataclass(frozen=True, kw_only=True)
class Sweep(Document):
    """What ``perfscope whatif --sweep … --json`` prints."""

    setting: Annotated[str, "The setting that is swept."]
    points: Annotated[tuple[SweepPoint, ...], "One for each value, in the order given."]
    schema: str = field(default=SWEEP_SCHEMA, init=False)


@dataclass(frozen=True, kw_only=True)
class DoctorCheck:
    """One thing that was examined."""

    name: Annotated[str, "What was examined."]
    state: Annotated[str, "``ok``, ``note`` (works, or is not needed) or ``broken`` (a recording would fail)."]
    text: Annotated[str, "What came out."]
    remedy: Annotated[str, "What to do; empty where there is nothing to be done."]


@dataclass(frozen=True, kw_only=True)
class Doctor(Document):
    """What ``perfscope doctor --json`` prints."""

    works: Annotated[bool, "Recordings work here: nothing is broken."]
    python: Annotated[str, "The interpreter that trainings are started with."]
    output: Annotated[str, "Where recordings are to be written."]
    checks: tuple[DoctorCheck, ...]
    perfscope_version: str
    schema: str = field(default=DOCTOR_SCHEMA, init=False)
