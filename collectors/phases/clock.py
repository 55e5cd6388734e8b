"""Times the phases of every step of a run with two looks at the clock each.

Only the training thread's time counts, and each phase only its own: what runs inside another (an optimizer within the
backward, a closure's forward within the optimizer) is taken out of the outer one, so the phases never exceed the step.
What a collective takes is in the phase that waits for it, and how much of the phase was waiting is counted beside it
(:mod:`perfscope.collectors.phases.waits`).
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any, Final

from perfscope.recording.history import STAGES, WAITS

FORWARD: Final = STAGES.index("forward")
BACKWARD: Final = STAGES.index("backward")
EVALUATION: Final = STAGES.index("evaluation")

_OUTSIDE: Final = len(STAGES)
"""Place of the time in no phase among the totals, which is that of other in ``WAITS``."""
_NO_TIMES: Final = (0,) * (_OUTSIDE + 1)
_NO_WAITS: Final = (0,) * len(WAITS)


class PhaseClock:
    """The sink that times the phases of one process's steps.

    Called several times in every step of a run: it looks at the clock once a call, and gives what has gone by to the
    stage under way.
    """

    what = "timing the phases"

    def __init__(self) -> None:
        self.totals = [*_NO_TIMES]
        """Time in each of ``STAGES``, and last in none, since :meth:`clear`, ns."""
        self.waiting = [*_NO_WAITS]
        """Of that, waiting for each of ``WAITS``."""
        self._open: list[tuple[int, int]] = []
        """Phases under way, innermost last: which, and the stage that time counts for when it has ended."""
        self._stage = _OUTSIDE
        """The stage that time counts for now."""
        self.since = 0
        """When it began to, which is when this was last called."""
        self.reducing = 0
        """When the backward under way began to wait for the gradients of other ranks; 0 before."""
        self.phases = 0
        """Phases timed during the run, for what recording costs."""
        self.waits = 0
        """Waits timed during the run."""

    def begin(self, phase: int, subject: Any = None) -> None:
        """A phase begins; ``subject``: the module of a forward."""
        stage = EVALUATION if phase == FORWARD and subject is not None and evaluates(subject) else phase
        now = perf_counter_ns()
        self.totals[self._stage] += now - self.since
        self._open.append((phase, self._stage))
        self._stage, self.since = stage, now

    def end(self, phase: int) -> None:
        """It has ended. Phases within it that never ended, because an exception went through them, end with it."""
        if not self._open:
            return
        now = perf_counter_ns()
        self.phases += 1
        self.totals[self._stage] += now - self.since
        self.since = now
        innermost = -1
        while innermost != phase and self._open:
            innermost, self._stage = self._open.pop()
        if phase == BACKWARD == innermost and self.reducing:
            self.waiting[BACKWARD] += now - self.reducing
            self.waits += 1
            self.reducing = 0

    def waited(self, ns: int) -> None:
        """The phase under way waited so long for other ranks."""
        self.waits += 1
        self.waiting[self._stage] += ns

    def take(self) -> tuple[list[int], list[int]]:
        """The times since the last call, ns: of the stages, as in ``STAGES``, and of waiting, as in ``WAITS``.

        Called between steps, outside any phase.
        """
        stages, waits = self.totals[:_OUTSIDE], [*self.waiting]
        self.clear()
        return stages, waits

    def clear(self) -> None:
        """Begin anew, between steps. In place: what each step allocates anew costs more than all looks at the clock."""
        self.totals[:] = _NO_TIMES
        self.waiting[:] = _NO_WAITS
        if self._open:
            self._open.clear()
        self._stage = _OUTSIDE
        self.reducing = 0


def evaluates(module: Any) -> bool:
    """Is a forward of this module, which begins now, in evaluation mode and without gradients: not training?"""
    import torch

    if torch.is_grad_enabled():
        return False
    # DeepSpeed's engine puts what it holds into evaluation mode. A module's truth value is its length: an empty
    # one's is False, and a compiled one of no length raises.
    held = module._modules.get("module")
    inner = module if held is None else held
    return not (module.training and inner.training)
