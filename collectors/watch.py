"""What goes on in every step of the run, captures or not: the step is timed, kept, and compared with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from perfscope.collectors.agreement import Board
from perfscope.collectors.background import Background
from perfscope.collectors.config import ALWAYS_ON, FOR_ANOTHER, CollectorConfig
from perfscope.collectors.history import History
from perfscope.collectors.pace import Pace
from perfscope.collectors.problems import Problems
from perfscope.collectors.record import RunRecord
from perfscope.collectors.recording import Recording
from perfscope.collectors.signals import SignalHandler
from perfscope.collectors.stages import Stages
from perfscope.collectors.trigger import Trigger
from perfscope.paths import steps_file

if TYPE_CHECKING:
    from perfscope.collectors.discovery import Found

DESCRIBE_AFTER: Final = 4
"""Steps after the first hooks, by which loaders have been drawn from and DDP has built its buckets."""

MOST_HOOKS: Final = 3
"""Times that the model is looked for: a script that makes a new one all the time would be slowed by it."""


class Watch:
    """The steps of one rank. The session tells it where they end and begin."""

    def __init__(
        self,
        config: CollectorConfig,
        rank: int,
        attempt: int,
        recording: Recording,
        record: RunRecord,
        problems: Problems,
    ) -> None:
        self._problems = problems
        self._recording = recording
        self._record = record
        self._always_on = config.mode in ALWAYS_ON
        self.stages = Stages(problems)
        self._history = History(steps_file(config.folder, rank), attempt)
        self._history.measured = self.stages.measured
        self._pace = Pace(self._history, self.stages)
        self._trigger: Trigger | None = None
        if config.mode not in FOR_ANOTHER:
            self._trigger = Trigger(config, rank, Board(config.folder, attempt), recording.schedule)
        self._signal = SignalHandler(config.signal if self._always_on else "none", self._asked)
        self._background = Background(self._look)
        self._ended_at = 0
        self._found: Found | None = None
        self._lost = False
        self._hooks = 0
        self._hooked_at = 0
        self._optimizers_met = 0
        self._described = not self._always_on

    @property
    def unprofiled(self) -> list[int]:
        """Wall time of the first undisturbed steps, ns."""
        return self._pace.unprofiled

    def start(self) -> None:
        """Begin to keep steps and to listen."""
        self._problems.guard("the background thread", self._background.start)
        self._problems.guard("listening for a signal", self._signal.install)

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

    def hook(self, completed: int, optimizers: Callable[[], Iterable[Any]], optimizers_met: int) -> bool:
        """Between two steps: begin to time stages, look again where there are new optimizers, describe the run.

        False where there was nothing to do, which is so at nearly all steps.
        """
        if self._always_on and optimizers_met != self._optimizers_met and self._hooks < MOST_HOOKS:
            self._optimizers_met, self._hooked_at = optimizers_met, completed
            self._hooks += 1
            self._problems.guard("timing the stages", self._hook, list(optimizers()))
            return True
        if not self._described and completed >= self._hooked_at + DESCRIBE_AFTER:
            self._described = True
            self._problems.guard("describing the run", self._describe, list(optimizers()))
            return True
        return False

    def restart(self) -> None:
        """What was taken for steps may not have been."""
        self._pace.restart()

    def forget(self) -> None:
        """In a forked child, which has no thread of ours: put everything back and keep nothing."""
        self._problems.guard("leaving the signal alone", self._signal.remove)
        self.stages.remove()

    def close(self) -> None:
        """The process ends: put everything back, write what is left."""
        self._problems.guard("leaving the signal alone", self._signal.remove)
        self._problems.guard("leaving the stages alone", self.stages.remove)
        if self._background.stop():
            self._write()

    def _hook(self, optimizers: list[Any]) -> None:
        from perfscope.collectors.discovery import discover

        self._found = discover(optimizers)
        if self._hooks > 1:
            self.stages.rehook(self._found.to_hook())
        else:
            self.stages.install(self._found.to_hook())
        self._history.measured = self.stages.measured
        if self._described:
            self._found = None

    def _describe(self, optimizers: list[Any]) -> None:
        """What was found is a few steps old and kept so long, because looking again takes as long again."""
        found, self._found = self._found, None
        if found is not None:
            ranges = self._recording.made().ranges
            ranges.loaders, ranges.batch_shape = self.stages.loaders, self.stages.batch_shape
            self._record.describe(found, optimizers, ranges)

    def _asked(self) -> None:
        if self._trigger is not None:
            self._trigger.asked()
            self._background.wake()

    def _look(self) -> None:
        """On the background thread, every now and then."""
        if self._history.due():
            self._write()
        if self._trigger is not None:
            self._problems.guard("hearing of captures to make", self._trigger.look)

    def _write(self) -> None:
        self._problems.guard("writing the step history", self._try_to_write)

    def _try_to_write(self) -> None:
        """A file system that fails now may work later, so this is tried again, and only the first failure is said."""
        try:
            self._history.write()
        except OSError as error:
            if not self._lost:
                self._lost = True
                self._problems.add(f"part of the step history could not be written ({error})")
