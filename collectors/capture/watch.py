"""What happens in every step of the run, captures or not: the step is timed, stored and compared with the others."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable
from time import perf_counter_ns
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from perfscope.collectors.agreement import Board
from perfscope.collectors.background import Background
from perfscope.collectors.capture.history import StepHistory, StepTimer, block_age
from perfscope.collectors.capture.lazy import LazyCapturer
from perfscope.collectors.capture.run_file import RankContext
from perfscope.collectors.capture.trigger import Trigger
from perfscope.collectors.config import ALWAYS_ON, FOR_ANOTHER
from perfscope.collectors.ending import at_end_of_thread
from perfscope.collectors.phases.checkpoints import Checkpoints
from perfscope.collectors.phases.clock import PhaseClock
from perfscope.collectors.phases.cost import median_ns, phase_ns, wait_ns
from perfscope.collectors.phases.phases import BATCHES_DESCRIBED, OPTIMIZER
from perfscope.collectors.phases.waits import RankWaits
from perfscope.recording.history import STAGES, UNPROFILED_STEPS
from perfscope.recording.metadata import RecordingMetadata
from perfscope.recording.paths import steps_file

if TYPE_CHECKING:
    from perfscope.collectors.discovery import JobObjects
    from perfscope.collectors.phases._clock import PassingSteps

DESCRIBE_AFTER: Final = 4
"""Steps after the first hooks, by which loaders have been drawn from, DDP has built its buckets, and models that are
called as a whole have been.
"""

MOST_HOOKS: Final = 3
"""Times that the model is looked for: a script that makes a new one all the time would be slowed by it."""


class StepWatch:
    """The steps of one rank. The session calls it where they end and begin."""

    def __init__(self, context: RankContext, attempt: int, capturer: LazyCapturer) -> None:
        config = context.config
        self._problems, self._phases, self._run_file = context.problems, context.phases, context.run_file
        self._capturer = capturer
        self._always_on = config.mode in ALWAYS_ON
        self._clock = PhaseClock()
        self._phases.attach(self._clock, (OPTIMIZER,))
        self._waits = RankWaits(self._clock)
        self._checkpoints = Checkpoints(self._clock)
        history = steps_file(config.folder, context.identity.rank)
        self._history = StepHistory(history, attempt, block_age(context.identity.world_size))
        self._pace = StepTimer(self._history, self._clock)
        self._trigger: Trigger | None = None
        if config.mode not in FOR_ANOTHER:
            self._trigger = Trigger(config, context.identity.rank, Board(config.folder, attempt), capturer.schedule)
        self._signal = SignalHandler(config.signal if self._always_on else "none", self._asked)
        self._background = Background(self._look)
        self._save_at_end: Callable[[], None] | None = None
        self._thread: object = None
        self._thread_ended = False
        self._ended_at = 0
        self._objects: JobObjects | None = None
        self._phase_ns = self._wait_ns = self._phases_before = 0
        self._between: list[int] = []
        """Of the first steps that passed: from the end of the optimizer's step to the begin of the next step, ns."""
        self._measures = True
        """Are the steps that pass among those first ones still?"""
        self._cost_known = False
        self._passing: PassingSteps | None = None
        self._lost = False
        self._hooks = 0
        self._hooked_at = 0
        self._optimizers_met = -1  # none at all is looked at once, too
        self.hooked_for = 0
        """Number of optimizers for which :meth:`hook` has no more to do."""
        self._described = not self._always_on
        self._first_hook_at = 0
        self.batches_per_step: float | None = None
        """Batches drawn per step, over the first steps whose phases are timed; None where not known."""

    @property
    def unprofiled(self) -> list[int]:
        """Wall time of the first undisturbed steps, ns."""
        return self._pace.unprofiled

    @property
    def unprofiled_thread(self) -> list[int]:
        """CPU time of the training thread in them, ns."""
        return self._pace.unprofiled_thread

    def start(self) -> None:
        """Begin to store steps and to listen."""
        self._problems.guard("measuring what recording costs", self._measure_cost)
        self._problems.guard("the background thread", self._background.start)
        self._problems.guard("listening for a signal", self._signal.install)

    def save_at_end_of_thread(self, save: Callable[[], None]) -> None:
        """Where the training has a thread of its own: when that ends, write what there is, as frameworks may then end
        the process without its exit handlers. ``save`` writes the metadata.
        """
        if threading.current_thread() is not threading.main_thread():
            self._save_at_end = save
            self._thread = at_end_of_thread(self._end_of_thread)

    def _end_of_thread(self) -> None:
        self._thread_ended = True
        self._background.wake()

    def step_ends(self, completed: int, *, busy: bool) -> None:
        """``completed`` training steps have ended."""
        step = self._pace.step_ends(completed - 1, busy=busy)
        if step is None or self._trigger is None:
            return
        self._ended_at = step.began + step.duration
        if self._trigger.step_ended(completed, step.duration, disturbed=step.disturbed, now_ns=self._ended_at):
            self._background.wake()

    def step_begins(self, completed: int, *, busy: bool, disturbed: bool) -> None:
        """The next step begins. ``busy``: a capture is being made; ``disturbed``: or was until now."""
        began = self._pace.step_begins(disturbed=disturbed)
        if self._trigger is not None:
            paused = began - self._ended_at if self._ended_at else 0
            self._trigger.step_begins(completed, busy=busy, paused_ns=paused)

    def step_passes(self, completed: int) -> None:
        """``completed`` training steps have ended and the next begins, with nothing of ours at work: as
        :meth:`step_ends` and :meth:`step_begins` in one.
        """
        pace, trigger = self._pace, self._trigger
        disturbed, since = pace.disturbed, self._clock.since
        duration = pace.step_passes(completed - 1)
        if duration and trigger is not None:
            if not (trigger.watches or disturbed or trigger.busy):
                trigger.completed = completed
                trigger.note(duration)
            elif trigger.step_passed(completed, duration, disturbed=disturbed):
                self._background.wake()
        if self._measures:
            self._measure(duration, since, disturbed=disturbed)

    @property
    def passes(self) -> bool:
        """Is there nothing to do for a step that passes but to store it and to note how long it took?"""
        trigger = self._trigger
        return not (self._measures or (trigger is not None and (trigger.watches or trigger.busy)))

    def storing(self, passing: PassingSteps) -> tuple[Callable[[bytes], None], Callable[[int], None] | None]:
        """What takes the row of a step that ``passing`` handles, and what counts its waits for a core, if any does."""
        self._passing = passing
        return self._history.append, self._pace.core_waited if self._pace.core.counts else None

    def _measure(self, duration: int, since: int, *, disturbed: bool) -> None:
        """One of the first steps has passed: what it took, and what came between it and the next."""
        between, unprofiled = self._between, self._pace.unprofiled
        self._pace.keep(duration, disturbed=disturbed)
        if len(between) < UNPROFILED_STEPS:
            between.append(perf_counter_ns() - since)
        self._measures = len(between) < UNPROFILED_STEPS or len(unprofiled) < UNPROFILED_STEPS

    def hook(self, completed: int, optimizers: Callable[[], Iterable[Any]], optimizers_met: int) -> bool:
        """Between two steps: begin to time the phases, look again where there are new optimizers, describe the run.

        False where there was nothing to do, which is so at nearly all steps.
        """
        if self._always_on and optimizers_met != self._optimizers_met and self._hooks < MOST_HOOKS:
            self._optimizers_met, self._hooked_at = optimizers_met, completed
            self._hooks += 1
            self._first_hook_at = self._first_hook_at or completed
            self._problems.guard("timing the phases of every step", self._hook, list(optimizers()))
            return True
        if self._described and self._objects is None:
            self.hooked_for = optimizers_met
            return False
        if completed < self._hooked_at + DESCRIBE_AFTER:
            return False
        self._problems.guard("timing the forwards of every step", self._settle)
        if not self._described:
            self._described = True
            drawn = sum(loader.batches for loader in self._phases.loaders.records())
            if 0 < drawn < BATCHES_DESCRIBED:
                self.batches_per_step = drawn / (completed - self._first_hook_at)
            self._problems.guard("describing the run", self._describe, list(optimizers()))
        self._objects = None
        return True

    def cost(self, completed: int) -> RecordingMetadata | None:
        """What recording took of the ``completed`` steps; None where too few have ended."""
        if not self._between:
            return None
        # Nearly all steps pass as the last ones did.
        last = [] if self._passing is None else self._passing.between()
        return RecordingMetadata(
            between_ns=median_ns(last or self._between),
            phase_ns=self._phase_ns,
            wait_ns=self._wait_ns,
            steps=completed - self._first_hook_at,
            phases=self._clock.phases - self._phases_before,
            waits=self._clock.waits,
            thread_ns=self._background.cpu_ns,
            thread_steps=completed,
        )

    def restart(self) -> None:
        """What was taken for steps may not have been."""
        self._pace.restart()
        self._measures = True

    def forget(self) -> None:
        """In a forked child, which has no thread of ours: put everything back and store nothing."""
        self._problems.guard("restoring the signal", self._signal.remove)
        self._stop_timing()

    def close(self) -> None:
        """The process ends: put everything back, write what is left."""
        self._problems.guard("restoring the signal", self._signal.remove)
        self._problems.guard("restoring the phases", self._phases.remove)
        self._stop_timing()
        if self._background.stop():
            self._write()

    def _hook(self, optimizers: list[Any]) -> None:
        from perfscope.collectors.discovery import discover

        self._objects = discover(optimizers)
        if self._hooks == 1:
            self._phases_before = self._clock.phases
            self._phases.attach(self._clock, innermost=True)
            self._phases.describe_loaders()
            self._history.measured = frozenset(STAGES)
            self._problems.guard(self._checkpoints.what, self._checkpoints.install)
        self._clock.called = set()
        self._phases.settle([])  # what was enough to time may be another model's
        self._phases.patch(self._objects.to_hook())
        measured = self._problems.guard(self._waits.what, self._waits.install, self._objects)
        self._history.waits_measured = bool(measured)
        if measured:
            self._pace.core.begin()

    def _settle(self) -> None:
        """Time the parts of a model no longer that has been called as a whole: each takes some 10 µs of a step."""
        called, self._clock.called = self._clock.called, None
        if self._objects is not None and called and any(id(root) in called for root in self._objects.roots):
            self._phases.settle(self._objects.to_hook(called))

    def _measure_cost(self) -> None:
        self._phase_ns, self._wait_ns = phase_ns(self._problems), wait_ns()

    def _stop_timing(self) -> None:
        self._problems.guard("restoring waits", self._waits.remove)
        self._problems.guard("restoring checkpoints", self._checkpoints.remove)
        self._pace.core.end()

    def _describe(self, optimizers: list[Any]) -> None:
        """What was found is a few steps old and held so long, because looking again takes as long again."""
        if self._objects is not None:
            self._run_file.describe(self._objects, optimizers, self._capturer.made().ranges)

    def _asked(self) -> None:
        if self._trigger is not None:
            self._trigger.asked()
            self._background.wake()

    def _look(self) -> None:
        """On the background thread, every now and then."""
        if self._history.due() or self._thread_ended:
            self._write()
        if self._thread_ended and self._save_at_end is not None:
            self._thread_ended = False
            self._save_at_end()
        if self._trigger is not None:
            if self._passing is not None:
                self._trigger.passed(self._passing.completed, self._passing.take_recent())
            self._problems.guard("agreeing on captures", self._trigger.look)
        if not self._cost_known and len(self._between) >= UNPROFILED_STEPS:
            self._cost_known = self._run_file.unsaved = True

    def _write(self) -> None:
        self._problems.guard("writing the step history", self._try_to_write)

    def _try_to_write(self) -> None:
        """A file system that fails now may work later: try again each time, and report only the first failure."""
        try:
            self._history.write()
        except OSError as error:
            if not self._lost:
                self._lost = True
                self._problems.add(f"part of the step history could not be written ({error})")


class SignalHandler:
    """Has a signal ask for captures, where the script does nothing with it itself."""

    def __init__(self, name: str, asked: Callable[[], None]) -> None:
        self._number: int | None = None if name == "none" else getattr(signal, f"SIG{name}")
        self._asked = asked
        self._installed = False

    def install(self) -> None:
        """Begin to listen, in the main thread of a process that leaves the signal to its default."""
        if self._number is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(self._number) == signal.SIG_DFL:
            signal.signal(self._number, self._handle)
            self._installed = True

    def remove(self) -> None:
        """Put the default back, unless the script has installed a handler of its own since."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        # Bound methods are made anew at every access: they are equal, not the same.
        if self._number is not None and signal.getsignal(self._number) == self._handle:
            signal.signal(self._number, signal.SIG_DFL)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._asked()
