"""How long each step takes, outside whatever this project does between two of them."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Final

from perfscope.collectors.history import History, Step
from perfscope.collectors.stages import Stages

UNPROFILED_STEPS: Final = 256
"""Unprofiled steps whose time goes into the metadata: enough for a steady median."""


class Pace:
    """The clock of one process's steps."""

    def __init__(self, history: History, stages: Stages) -> None:
        self._history = history
        self._stages = stages
        self._began: int | None = None
        self._disturbed = False
        self.unprofiled: list[int] = []
        """Wall time of the first undisturbed steps, ns."""

    def step_ends(self, number: int, *, busy: bool) -> Step | None:
        """Step ``number`` has ended; what is known of it, None where its beginning was not seen.

        ``busy``: something of ours is at work.
        """
        now = perf_counter_ns()
        stages = self._stages.take()
        if self._began is None:
            return None
        step = Step(number, self._began, now - self._began, stages, self._disturbed or busy)
        self._history.add(step)
        if not step.disturbed and len(self.unprofiled) < UNPROFILED_STEPS:
            self.unprofiled.append(step.duration)
        return step

    def step_begins(self, *, disturbed: bool) -> int:
        """The next step begins now; the time. ``disturbed``: something of ours is at work, or was just before."""
        self._disturbed = disturbed
        self._stages.take()
        self._began = perf_counter_ns()
        return self._began

    def restart(self) -> None:
        """What was taken for steps may not have been."""
        self._began = None
        self.unprofiled.clear()
