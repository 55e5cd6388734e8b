"""A finding: what limits the job, the evidence, what to change and what that is worth."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Severity(str, enum.Enum):
    """How much of the step a finding is about: high from 20 %, medium from 5 %, low below; info costs nothing."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
    INFO = "info"

    @classmethod
    def of_share(cls, share: float) -> Severity:
        """Severity of a recoverable share (0..1) of the step."""
        if share >= 0.20:
            return cls.HIGH
        return cls.MEDIUM if share >= 0.05 else cls.LOW


class Confidence(str, enum.Enum):
    """How sure a finding is: low below five steps or when a part of the job is missing from the recording."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


class Obtained(str, enum.Enum):
    """How a gain was obtained."""

    MEASURED = "measured"
    REPLAYED = "replayed"
    BOUNDED = "bounded"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One number that a finding rests on."""

    what: str
    value: float
    unit: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Action:
    """What to change, as the user would write it."""

    setting: str
    old: str | None
    new: str | None
    how: str
    costs: str | None = None
    """What the change takes besides time: memory, precision, statistics; None where nothing."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted step time in ns."""

    low: float
    mid: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.mid <= self.high:
            raise ValueError(f"a prediction needs low <= mid <= high, got {self.low}, {self.mid}, {self.high}")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A limit of the job. Cannot exist without evidence.

    ``ceiling`` is T/(T-R) - 1 for R recoverable on the critical path: 0.25 means at most 25 % more steps a second.
    """

    rule: str
    title: str
    severity: Severity
    evidence: tuple[Evidence, ...]
    action: Action
    confidence: Confidence
    obtained: Obtained
    ceiling: float | None = None
    predicted_step_ns: Prediction | None = None
    whatif: Mapping[str, str] = field(default_factory=dict)
    """The same change as settings of ``perfscope whatif``; empty where it cannot be replayed."""

    def __post_init__(self) -> None:
        if not self.evidence:
            raise ValueError(f"finding {self.rule!r} has no evidence")
        if self.ceiling is None and self.predicted_step_ns is None and self.severity is not Severity.INFO:
            raise ValueError(f"finding {self.rule!r} states neither a ceiling nor a prediction")


def ceiling(step_ns: float, recoverable_ns: float) -> float:
    """T/(T-R) - 1: the speed-up that recovering R of a step T cannot exceed (0.25 = 25 % more steps a second)."""
    return step_ns / (step_ns - recoverable_ns) - 1 if recoverable_ns < step_ns else float("inf")
