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

_OTHER: Final = WAITS.index("other")

_NO_STAGES: Final = (0,) * len(STAGES)
_NO_WAITS: Final = (0,) * len(WAITS)


class PhaseClock:
    """The sink that times the phases of one process's steps."""

    what = "timing the phases"

    def __init__(self) -> None:
        self._totals = [*_NO_STAGES]
        self._waits = [*_NO_WAITS]
        self._open: list[tuple[int, int, int]] = []
        """Phases under way: which, the stage that its time counts for, when it began; innermost last."""
        self.reducing = 0
        """When the backward under way began to wait for the gradients of other ranks; 0 before."""
        self._inner = 0
        """Time of phases that have ended within the innermost one under way."""
        self._outer: list[int] = []
        """``_inner`` of each one further out."""

    def begin(self, phase: int, subject: Any = None) -> None:
        """A phase begins; ``subject``: the module of a forward."""
        self._outer.append(self._inner)
        self._inner = 0
        stage = EVALUATION if phase == FORWARD and subject is not None and evaluates(subject) else phase
        self._open.append((phase, stage, perf_counter_ns()))

    def end(self, phase: int) -> None:
        """It has ended. Phases within it that never ended, because an exception went through them, end with it."""
        now = perf_counter_ns()
        while self._open:
            innermost, stage, began = self._open.pop()
            self._totals[stage] += now - began - self._inner
            self._inner = self._outer.pop() + now - began
            if innermost == phase:
                if phase == BACKWARD and self.reducing:
                    self._waits[BACKWARD] += now - self.reducing
                    self.reducing = 0
                return

    def waited(self, ns: int) -> None:
        """The phase under way waited so long for other ranks."""
        self._waits[self._open[-1][1] if self._open else _OTHER] += ns

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The times since the last call, ns: of the stages, as in ``STAGES``, and of waiting, as in ``WAITS``.

        Called between steps, outside any phase.
        """
        taken = tuple(self._totals), tuple(self._waits)
        self._totals[:] = _NO_STAGES
        self._waits[:] = _NO_WAITS
        self._open.clear()
        self._outer.clear()
        self._inner = self.reducing = 0
        return taken


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
