"""Watches, from a thread of its own, whether this process makes steps."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from perfscope.collectors.background import PERIOD_S, Background
from perfscope.collectors.config import CollectorConfig, RankSelection
from perfscope.collectors.ending import at_end, outcome, uncaught
from perfscope.collectors.hang import flight
from perfscope.collectors.hang.log import CollectiveLog
from perfscope.collectors.hang.stacks import StuckInterpreter, waits_for_processes, write_stacks
from perfscope.collectors.identity import Identity, identify
from perfscope.collectors.problems import Problems
from perfscope.recording.paths import flight_file, partial, stacks_file

if TYPE_CHECKING:
    from perfscope.collectors.phases._clock import PassingSteps

SHARE_OF_WATCHDOG: Final = 0.75
"""Of the process group's own timeout, after which torch ends the process: the files are to be written before."""

LOOKS: Final = 8
"""In one timeout: how late a hang is noticed."""


class HangWatch:
    """One process's watch. Made when torch is imported; begins with the first process group or optimizer."""

    def __init__(self, config: CollectorConfig) -> None:
        self._config = config
        self._problems = Problems()
        self._patience_s = config.hang_timeout
        self._identity: Identity | None = None
        """Once nothing can change it."""
        self._said_rank: int | None = None
        self._steps = 0
        self._steps_seen = 0
        self._passing: PassingSteps | None = None
        self._passed_before = 0
        self._progress_at = time.monotonic()
        self._next_s = self._patience_s
        """Idle time at which to write, or to write anew."""
        self._written = False
        self._background: Background | None = None
        self._heeds_forks = False
        self._interpreter = StuckInterpreter(config.folder)
        self._log = CollectiveLog(self._problems)

    def begin(self, rank: int | None = None) -> None:
        """This process trains. ``rank`` is what the script itself says, before anything else knows."""
        self._said_rank = rank if rank is not None else self._said_rank
        if self._background is None and not self._problems.broke("watching for hangs"):
            self._progress_at = time.monotonic()
            self._background = Background(self._look, min(PERIOD_S, self._patience_s / LOOKS))
            self._problems.guard("watching for hangs", self._background.start)
            if not self._heeds_forks:
                self._heeds_forks = True
                os.register_at_fork(
                    before=self._interpreter.before_fork,
                    after_in_parent=self._interpreter.after_fork,
                    after_in_child=self._forked,
                )
            at_end(self._end)

    def groups_made(self) -> None:
        """The default process group is there."""
        self._problems.guard("noting messages", self._log.install)

    def end_before(self, watchdog_s: float) -> None:
        """Torch's own watchdog ends the process ``watchdog_s`` after a collective was issued."""
        self._patience_s = min(self._patience_s, SHARE_OF_WATCHDOG * watchdog_s)
        self._next_s = min(self._next_s, self._patience_s)

    def progress(self) -> None:
        """An optimizer step has ended. Called at every one."""
        self._steps += 1
        self._progress_at = time.monotonic()

    def follow(self, passing: PassingSteps) -> None:
        """Optimizer steps that these handle are not told by :meth:`progress`."""
        if passing is not self._passing:
            self._passing, self._passed_before = passing, passing.passed

    def _made(self) -> int:
        """Optimizer steps that have ended."""
        return self._steps + (self._passing.passed - self._passed_before if self._passing is not None else 0)

    def _idle_s(self) -> float:
        """Since the last one, or what counts as progress."""
        at = self._progress_at if self._passing is None else max(self._progress_at, self._passing.ended / 1e9)
        return time.monotonic() - at

    def stop(self) -> None:
        """This process is not to be watched after all."""
        background, self._background = self._background, None
        if background is not None:
            background.stop()
            self._interpreter.close()

    def _look(self) -> None:
        """On the thread of the watch."""
        steps = self._made()
        if not steps and not self._place().backend and waits_for_processes():
            self._progress_at = time.monotonic()  # for ranks that it has started, and that are watched themselves
            return
        idle_s = self._idle_s()
        if steps != self._steps_seen:
            self._moves_on(first=self._steps_seen == 0)
            self._steps_seen = steps
        if idle_s >= self._next_s:
            self._next_s = 2 * idle_s
            self._problems.guard("writing where a rank stands still", self._write, None)
        place = self._place()
        if self._identity is not None:
            self._problems.guard("watching the interpreter", self._interpreter.arm, place.rank, self._patience_s)

    def _moves_on(self, *, first: bool) -> None:
        if self._written:
            self._patience_s *= 2  # steps take as long as that
        if self._written or first:  # the first: of an attempt before this one
            self._remove()
        self._next_s = self._patience_s

    def _place(self) -> Identity:
        """Which rank this is: for certain once there is a process group, or steps are made without one."""
        if self._identity is not None:
            return self._identity
        known = identify()
        if known.backend or self._made():
            self._identity = known
        elif self._said_rank is not None:
            return replace(known, rank=self._said_rank)
        return known

    def _write(self, error: BaseException | None) -> None:
        """Raises OSError where the folder cannot be written."""
        place = self._place()
        if place.rank not in RankSelection.parse(self._config.ranks):
            return
        self._written = True
        error = error or uncaught()
        stacks = stacks_file(self._config.folder, place.rank)
        if not self._interpreter.take(partial(stacks)):
            write_stacks(partial(stacks), error)
        partial(stacks).replace(stacks)
        moment = flight.Moment(place.rank, place.world_size, self._made(), self._idle_s())
        dump = flight.dump(self._log, moment)
        flights = flight_file(self._config.folder, place.rank)
        partial(flights).write_bytes(dump)
        partial(flights).replace(flights)  # a kill leaves a whole file or none

    def _remove(self) -> None:
        self._written = False
        rank = self._place().rank
        for path in (stacks_file(self._config.folder, rank), flight_file(self._config.folder, rank)):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _end(self) -> None:
        """The process ends by itself."""
        if self._background is None:
            return
        self.stop()
        error = uncaught()
        if isinstance(error, Exception):
            self._problems.guard("writing where a rank ended", self._write, error)
        elif self._written and outcome() == "finished":
            self._remove()

    def _forked(self) -> None:
        """In the child, which is watched from its own first process group or step on: it may be no rank at all."""
        self._interpreter.forget()
        self._log.forget()
        self._background = self._identity = self._said_rank = self._passing = None
        self._steps = self._steps_seen = 0
        self._written = False
        self._next_s = self._patience_s


watches: list[HangWatch] = []
"""This process's watch; empty where none is wanted."""


def make(config: CollectorConfig) -> HangWatch:
    """Make this process's watch. Called once."""
    watches[:] = [HangWatch(config)]
    return watches[0]


def begin() -> None:
    """This process trains: watch it, where that is wanted."""
    for watch in watches:
        watch.begin()


def end() -> None:
    """This process is not one to be recorded."""
    for watch in watches:
        watch.stop()


def drop() -> None:
    """The recording that wanted the watch has ended: the next one, if any, makes its own."""
    end()
    watches.clear()
