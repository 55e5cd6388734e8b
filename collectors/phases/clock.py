"""Times the phases of every step of a run with two looks at the clock each.

:class:`PhaseClock` is compiled (``_clock.c``), or :class:`PythonClock` where that was not built.

Only the training thread's time counts, and each phase only its own: what runs inside another (an optimizer within the
backward, a closure's forward within the optimizer) is taken out of the outer one, so the phases never exceed the step.
What a collective takes is in the phase that waits for it, and how much of the phase was waiting is counted beside it
(:mod:`perfscope.collectors.phases.waits`).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from perfscope.collectors.phases.compiled import IS_BUILT, BaseClock
from perfscope.recording.history import CORE_IN, STAGES, WAITS

if TYPE_CHECKING:
    from perfscope.collectors.phases.core import CoreWaits

FORWARD: Final = STAGES.index("forward")
BACKWARD: Final = STAGES.index("backward")
EVALUATION: Final = STAGES.index("evaluation")

FIRST_WAIT: Final = len(STAGES)
"""Place of the first of ``WAITS`` among the times of a step, after those of ``STAGES``."""
_FIRST_CORE: Final = FIRST_WAIT + WAITS.index(CORE_IN["dataloader"])
_OUTSIDE: Final = WAITS.index("other")
"""The stage of what is in no phase, in which nothing is timed but waiting."""
HEAD: Final = FIRST_WAIT + len(WAITS)
"""First of four places after them, for whoever stores the step: what tells which one it was."""
_NUMBER, _BEGAN, _DURATION, _DISTURBED = range(HEAD, HEAD + 4)
_NOTHING: Final = array("q", [0] * (HEAD + 4))
_LAYOUT: Final = (len(STAGES), len(WAITS), EVALUATION, BACKWARD, _FIRST_CORE, _OUTSIDE)
"""What the compiled clock is to know of the times' places."""
_MONOTONIC: Final = time.get_clock_info("perf_counter").implementation == "clock_gettime(CLOCK_MONOTONIC)"
"""Is that what ``perf_counter_ns`` asks, as on Linux, so that compiled code may ask it itself?"""

_Open = tuple[int, int, "_Open | None"]
"""A phase under way: which, the stage that its time counts for, the phase around it."""


class PythonClock:
    """The sink that times the phases of one process's steps.

    Called several times in every step of a run: it looks at the clock once a call, and gives what has gone by to the
    stage under way.
    """

    what = "timing the phases"

    def __init__(self) -> None:
        self.times = _NOTHING[:]
        """Since :meth:`clear`, ns: the time in each of ``STAGES``, and of that, waiting for each of ``WAITS``."""
        self._thread = get_ident()
        self._open: _Open | None = None
        """The innermost phase under way."""
        self.since = 0
        """When it, or what followed the last one, began: when this was last called."""
        self.began = 0
        """When the step under way began; 0 where that was not seen."""
        self.reducing = 0
        """When the backward under way began to wait for the gradients of other ranks; 0 before."""
        self.called: set[int] | None = None
        """Ids of the modules whose forwards are timed, each from its first call on; None: nobody asks."""
        self.core: CoreWaits | None = None
        """Where the stages of the step under way are to be asked about, what counts the thread's waits for a core."""
        self.phases = 0
        """Phases timed during the run, for what recording costs."""
        self.waits = 0
        """Waits timed during the run."""
        self._with_gradients: Callable[[], bool] = self._find_with_gradients

    def _find_with_gradients(self) -> bool:
        import torch

        self._with_gradients = torch.is_grad_enabled
        return self._with_gradients()

    def begin(self, phase: int, subject: Any = None) -> bool:
        """A phase begins; ``subject``: the module of a forward. False on another thread than that which made this."""
        if get_ident() != self._thread:
            return False
        stage = phase
        if subject is not None:
            if self.called is not None:
                self.called.add(id(subject))
            if not self._with_gradients() and evaluates(subject):
                stage = EVALUATION
        if self.core is not None:
            self.ask_core()
        now, around = perf_counter_ns(), self._open
        if around is not None:
            self.times[around[1]] += now - self.since
        self._open = phase, stage, around
        self.since = now
        return True

    def end(self, phase: int) -> None:
        """It has ended. Phases within it that never ended, because an exception went through them, end with it."""
        if self._open is None:
            return
        if self.core is not None:
            self.ask_core()
        innermost, stage, around = self._open
        now = perf_counter_ns()
        self.phases += 1
        self.times[stage] += now - self.since
        while innermost != phase and around is not None:
            innermost, _, around = around
        self._open = around
        self.since = now
        if self.reducing and phase == BACKWARD == innermost:
            self.times[FIRST_WAIT + BACKWARD] += now - self.reducing
            self.waits += 1
            self.reducing = 0

    def waited(self, ns: int) -> None:
        """The phase under way waited so long for other ranks."""
        self.waits += 1
        self.times[FIRST_WAIT + self._stage()] += ns
        if self.core is not None:
            self.core.since()  # what waits for ranks anyhow loses nothing by it

    def ask_core(self) -> None:
        """What the thread waited for a core since it was last asked about was in the stage under way."""
        if self.core is not None:
            waited = self.core.since()
            if not self.reducing:
                self.times[_FIRST_CORE + self._stage()] += waited

    def _stage(self) -> int:
        """The stage that time counts for now."""
        return _OUTSIDE if self._open is None else self._open[1]

    def take(self) -> tuple[list[int], list[int]]:
        """The times since the last call, ns: of the stages, as in ``STAGES``, and of waiting, as in ``WAITS``.

        Called between steps, outside any phase.
        """
        stages, waits = self.times[:FIRST_WAIT].tolist(), self.times[FIRST_WAIT:HEAD].tolist()
        self.clear()
        return stages, waits

    def clear(self) -> None:
        """Begin anew, between steps. In place: what each step allocates anew costs more than all looks at the clock."""
        self.times[:] = _NOTHING
        self._open, self.reducing = None, 0

    def set_wait(self, place: int, ns: int) -> None:
        """Set one of the waits; ``place``: in ``WAITS``."""
        self.times[FIRST_WAIT + place] = ns

    def row(self, number: int, began: int, duration: int, disturbed: bool) -> bytes:
        """The step as it is stored, the times and these: an object that the garbage collector need not look at."""
        times = self.times
        times[_NUMBER], times[_BEGAN], times[_DURATION], times[_DISTURBED] = number, began, duration, disturbed
        return times.tobytes()


class CompiledClock(BaseClock):  # type: ignore[misc, valid-type]
    """The same, compiled."""

    what = PythonClock.what

    def __init__(self) -> None:
        asks_itself = _MONOTONIC and perf_counter_ns is time.perf_counter_ns  # not so in tests that move time by hand
        super().__init__(_evaluates_now, None if asks_itself else perf_counter_ns, _LAYOUT)


if TYPE_CHECKING:
    PhaseClock: TypeAlias = PythonClock
else:
    PhaseClock = CompiledClock if IS_BUILT else PythonClock


def _evaluates_now(module: Any) -> bool:
    """Does a forward of this module that begins now count as an evaluation?"""
    import torch

    return not torch.is_grad_enabled() and evaluates(module)


def evaluates(module: Any) -> bool:
    """Is a forward of this module, which begins now and without gradients, in evaluation mode: not training?"""
    # DeepSpeed's engine puts what it holds into evaluation mode. A module's truth value is its length: an empty
    # one's is False, and a compiled one of no length raises.
    held = module._modules.get("module")
    inner = module if held is None else held
    return not (module.training and inner.training)
