"""Times the phases of every step of a run with two looks at the clock each.

Only the training thread's time counts, and each phase only its own: what runs inside another (an optimizer within the
backward, a closure's forward within the optimizer) is taken out of the outer one, so the phases never exceed the step.
What a collective takes is in the phase that waits for it; times of its own would need every function of
``torch.distributed`` replaced for the whole run, which compiled code does not bear.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

from perfscope.recording.history import STAGES


class PhaseClock:
    """The sink that times the phases of one process's steps."""

    what = "timing the phases"

    def __init__(self) -> None:
        self._totals = [0] * len(STAGES)
        self._open: list[tuple[int, int]] = []
        """Phases under way: which, and when it began; innermost last."""
        self._inner = 0
        """Time of phases that have ended within the innermost one under way."""
        self._outer: list[int] = []
        """``_inner`` of each one further out."""

    def begin(self, phase: int, subject: Any = None) -> None:
        """A phase begins."""
        self._outer.append(self._inner)
        self._inner = 0
        self._open.append((phase, perf_counter_ns()))

    def end(self, phase: int) -> None:
        """It has ended. Phases within it that never ended, because an exception went through them, end with it."""
        now = perf_counter_ns()
        while self._open:
            innermost, began = self._open.pop()
            self._totals[innermost] += now - began - self._inner
            self._inner = self._outer.pop() + now - began
            if innermost == phase:
                return

    def take(self) -> tuple[int, ...]:
        """The times since the last call, ns, in the order of ``STAGES``. Called between steps, outside any phase."""
        taken = tuple(self._totals)
        self._totals[:] = (0,) * len(STAGES)
        self._open.clear()
        self._outer.clear()
        self._inner = 0
        return taken
