"""Makes the captures of one rank: as planned, and as the ranks agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from perfscope.collectors.annotate import Annotator
from perfscope.collectors.capture import Capture
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.discovery import Found, discover
from perfscope.collectors.foreign import ForeignProfiler
from perfscope.collectors.identity import Identity
from perfscope.collectors.problems import Problems
from perfscope.collectors.ranges import Ranges
from perfscope.collectors.record import RunRecord
from perfscope.collectors.schedule import Due, Schedule
from perfscope.collectors.writer import TraceWriter
from perfscope.metadata import CaptureRecord


class Recorder:
    """The captures of one rank. The session tells it when a step has been completed."""

    def __init__(
        self, config: CollectorConfig, identity: Identity, record: RunRecord, schedule: Schedule, problems: Problems
    ) -> None:
        self._config = config
        self._identity = identity
        self._record = record
        self._problems = problems
        self._annotator = Annotator(nvtx=config.nvtx)
        self.ranges = Ranges(self._annotator, problems)
        self._schedule = schedule
        self._writer = TraceWriter(config.folder, identity.rank, problems)
        self._foreign = ForeignProfiler()
        self._postponed = False
        self._capture: Capture | None = None
        self._due = Due(0, config.active)
        self._found = Found()
        self._optimizers: list[Any] = []

    @property
    def busy(self) -> bool:
        """Does anything of ours disturb the training at the moment?"""
        return self._capture is not None or self._writer.busy()

    def at_edge(self, completed: int) -> bool:
        """Does the boundary after ``completed`` steps start a capture, or is it where its kept steps begin or end?"""
        if self._capture is None:
            return self._schedule.wants(completed)
        return self._capture.completed + 1 in (self._config.warmup, self._config.warmup + self._due.active)

    def boundary(self, completed: int, optimizers: Callable[[], Iterable[Any]]) -> None:
        """``completed`` training steps have ended; the next begins when this returns."""
        if self._capture is not None:
            self._advance(self._capture, completed)
        elif self._schedule.wants(completed):
            due, missed = self._schedule.due(completed)
            for problem in missed:
                self._problems.add(problem)
            if due is not None:
                self._start(completed, due, list(optimizers()))

    def restart(self) -> None:
        """What was taken for steps may not have been: drop the capture under way and start it anew."""
        if self._capture is not None:
            capture, self._capture = self._capture, None
            capture.discard()
            self._schedule.hurry()

    def forget(self) -> None:
        """In a forked child of a process that records: write nothing more."""
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.forget()

    def close(self) -> None:
        """The process ends, perhaps in the middle of a step: write the completed steps."""
        capture, self._capture = self._capture, None
        if capture is None:
            return
        if not capture.can_stop():
            capture.abandon()
            self._problems.add("the device did not finish its work, so the capture under way could not be written")
        elif capture.active_completed:
            self._keep(capture, complete=False)
        else:
            capture.discard()

    def join(self) -> None:
        """Wait until every trace is compressed."""
        self._writer.join()

    def _start(self, step: int, due: Due, optimizers: list[Any]) -> None:
        if self._foreign.at_work():
            self._postpone(step, due)
            return
        found = discover(optimizers)
        if self._foreign.remember(found.profilers):
            self._postpone(step, due)
            return
        if not found.roots:
            self._problems.add("no module holds what the optimizer trains: forward ranges and the model are missing")
        capture = Capture(
            dataclasses.replace(self._config, active=due.active),
            step,
            self._identity.rank,
            self.ranges,
            self._annotator,
            self._problems,
            lambda: self._problems.guard("making way for the script's own profiler", self._yield),
        )
        try:
            self._annotator.rank(self._identity.rank, self._identity.world_size)
            capture.start(found)
        except Exception as error:
            self._give_up(f"the profiler did not start at step {step}", error)
            return
        self._capture, self._due, self._found, self._optimizers = capture, due, found, optimizers

    def _advance(self, capture: Capture, completed: int) -> None:
        try:
            finished = capture.step()
        except Exception as error:
            self._give_up("the profiler failed", error)
            return
        if finished:
            self._keep(capture, complete=True)
            self._schedule.ended(self._due, completed)

    def _keep(self, capture: Capture, *, complete: bool) -> None:
        """Stop a capture, write it, and describe the run as it now stands."""
        self._capture = None
        try:
            name = capture.cut(lambda export: self._writer.write(self._due.number, export))
        except Exception as error:
            self._give_up("the trace could not be written", error)
            return
        self._record.count_backwards(capture.backwards, capture.completed)
        self._record.count_cpu(capture.times)
        self._record.captures.append(
            CaptureRecord(
                file=name,
                first_step=capture.first_active,
                last_step=capture.first_active + capture.active_completed - 1,
                complete=complete,
                reason=self._due.reason,
            )
        )
        self._record.flops = capture.flops or self._record.flops
        self._record.describe(self._found, self._optimizers, self.ranges)
        self._found, self._optimizers = Found(), []

    def _yield(self) -> None:
        """The script's own profiler is about to start: ours stops first."""
        capture = self._capture
        if capture is None:
            return
        if capture.active_completed:
            self._problems.add(
                f"the script started a profiler of its own; the capture ends after {capture.active_completed} of "
                f"{self._due.active} steps"
            )
            self._keep(capture, complete=False)
            self._schedule.ended(self._due, capture.first + capture.completed)
            self._schedule.put_off(self._config.warmup + self._config.active)
        else:
            self._problems.add("the script started a profiler of its own; recording waits until it has finished")
            self._postponed = True
            self.restart()

    def _postpone(self, step: int, due: Due) -> None:
        if due.agreed:
            self._problems.add(f"the script's own profiler was at work at step {step}: the capture there was not made")
        elif not self._postponed:
            self._postponed = True
            self._problems.add(f"the script's own profiler was at work at step {step}; recording waits for its end")

    def _give_up(self, what: str, error: Exception) -> None:
        """Nothing more is recorded; the training goes on as if nothing had been."""
        capture, self._capture = self._capture, None
        self._schedule.stop()
        self._found, self._optimizers = Found(), []
        if capture is not None:
            self._problems.guard("stopping the profiler", capture.discard)
        self._problems.add(f"{what} ({type(error).__name__}: {error}); this process is recorded no further")
