"""When this rank's captures begin: as the options plan them, and as the ranks agree while the job runs."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from perfscope.collectors.agreement import CapturePlan
from perfscope.collectors.config import CollectorConfig

EARLY: Final = 4
"""First steps that are kept, in memory, until a planned capture has more to offer than they."""


@dataclass(frozen=True)
class Due:
    """A capture that begins now."""

    number: int
    """In the recording; the same on every rank."""
    active: int
    """Steps to record."""
    reason: str = ""
    agreed: bool = False
    """It was agreed upon, so it begins at its step or not at all; a planned one may also begin later."""
    early: bool = False
    """It is of the job's first steps, for the case that the job ends before the first planned capture has any."""


class CaptureSchedule:
    """Asked at the end of every step, so an answer of no costs a comparison.

    ``agree`` is called by the background thread, all else by the training thread.
    """

    def __init__(self, config: CollectorConfig) -> None:
        self._config = config
        self._planned = config.repeat if config.mode == "captures" else 0
        self._made = 0
        self._next_planned: float = config.wait if self._planned else math.inf
        self._early = self._planned > 0
        self.plans: deque[CapturePlan] = deque()
        """Captures that have been agreed upon and have not begun."""
        self._off = False

    def agree(self, plan: CapturePlan) -> None:
        """All ranks make this capture."""
        if not self._off:
            self.plans.append(plan)

    def wants(self, completed: int) -> bool:
        """Does a capture begin after ``completed`` steps?"""
        if self._early or completed >= self._next_planned:
            return True
        return bool(self.plans) and completed >= self.plans[0].start

    @property
    def plans_more(self) -> bool:
        """Are there captures yet to come that are planned or agreed upon?"""
        return math.isfinite(self._next_planned) or bool(self.plans)

    def quiet_until(self) -> float:
        """Completed steps up to which no capture begins but one that is agreed upon."""
        return 0 if self._early else self._next_planned

    def due(self, completed: int) -> tuple[Due | None, list[str]]:
        """The capture that begins after ``completed`` steps, and a problem for each agreed one that was missed."""
        missed: list[str] = []
        while self.plans and completed >= self.plans[0].start:
            plan = self.plans.popleft()
            if plan.start == completed:
                return Due(self._planned + plan.number, plan.active, plan.reason, agreed=True), missed
            missed.append(
                f"this rank misses the capture agreed for step {plan.start}: it was already at step {completed}, "
                "or in another capture"
            )
        if completed >= self._next_planned:
            self._early = False
            return Due(self._made, self._config.active), missed
        if self._early:
            return Due(self._made, min(EARLY, int(self._next_planned) - completed), early=True), missed
        return None, missed

    def ended(self, due: Due, completed: int) -> None:
        """A capture has been written after ``completed`` steps."""
        if due.early:
            self._early = False
        elif not due.agreed:
            self._made += 1
            self._next_planned = completed + self._config.wait if self._made < self._planned else math.inf

    def put_off(self, steps: int) -> None:
        """The script's own profiler needs the next ``steps`` steps: planned captures come after them."""
        self._next_planned += steps

    def hurry(self, due: Due) -> None:
        """The capture under way was dropped: make it anew as soon as a step ends."""
        if not due.early and math.isfinite(self._next_planned):
            self._next_planned = 0

    def stop(self) -> None:
        """No more captures."""
        self._off = True
        self._next_planned = math.inf
        self._planned = 0
        self._early = False
        self.plans.clear()
