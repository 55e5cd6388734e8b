"""A change to try, and what was predicted of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Value = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Step times in ns, played from the recording: ``recorded`` is the profiled step, the others with the change."""

    recorded: float
    low: float
    mid: float
    high: float

    @property
    def saved(self) -> float:
        """Share of the step that ``mid`` saves."""
        return 1 - self.mid / self.recorded

    def unprofiled(self, step_ns: float) -> tuple[float, float, float]:
        """Low, mid and high for the job without the profiler, where the unchanged step takes ``step_ns``.

        The profiler lengthens operators, and leaves sleeping and sending alone. So what a change saves lies between
        what was predicted of the profiled step (nothing of it was lengthened) and the same share of the unprofiled one
        (all of it was). ``mid`` is half way, the range holds both.

        Example: 300 ms recorded, 180 predicted, 250 unprofiled: between 250 - 120 = 130 and 250 * 180 / 300 = 150.
        """
        share = [told * step_ns / self.recorded for told in (self.low, self.mid, self.high)]
        whole = [max(step_ns - (self.recorded - told), 0.0) for told in (self.low, self.mid, self.high)]
        return min(share[0], whole[0]), (share[1] + whole[1]) / 2, max(share[2], whole[2])


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One setting with one value."""

    name: str
    """``dataloader.num_workers``, ``ddp.bucket_cap_mb``, ``env.OMP_NUM_THREADS``,
    ``deepspeed.zero_optimization.overlap_comm`` …"""
    new: Value
    """None: a variable is taken away."""
    old: Value
    """As the recorded run has it; None where it is not set."""
    why: str
    """What speaks for it."""
    predicted: Predicted | None = None
    found: bool = False
    """A finding of the analysis asks for it."""
    numerics: bool = False
    """It changes the numbers that the training computes."""

    @property
    def text(self) -> str:
        """``dataloader.num_workers=2``."""
        return f"{self.name}={shown(self.new)}"


def shown(value: Any) -> str:
    """A value as it stands in tables: ``true``, ``25``, ``(not set)``."""
    if value is None:
        return "(not set)"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def settings_of(candidates: tuple[Candidate, ...]) -> Mapping[str, Value]:
    """Name -> value."""
    return {each.name: each.new for each in candidates}
