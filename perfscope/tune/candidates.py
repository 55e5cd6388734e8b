"""A change to try, and what was predicted of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfscope.analyzers.whatif.predict import WhatIfAnswer
from perfscope.frozen import dataclass

Value = bool | int | float | str | None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One setting with one value."""

    name: str
    """``dataloader.num_workers``, ``ddp.bucket_cap_mb``, ``env.OMP_NUM_THREADS``,
    ``deepspeed.zero_optimization.overlap_comm`` …"""
    new: Value
    """None: a variable is removed."""
    old: Value
    """As the recorded run has it; None where it is not set."""
    why: str
    """Why it may help."""
    predicted: WhatIfAnswer | None = None
    recommended: bool = False
    """A finding recommends it, or the user asks for it."""
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
