"""Makes the captures of one rank: as planned, and as the ranks agree."""

from __future__ import annotations

import dataclasses
import importlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final

from perfscope.collectors.annotate import Annotator
from perfscope.collectors.capture.announcer import Announcer
from perfscope.collectors.capture.capture import RankCapture
from perfscope.collectors.capture.run_file import RankContext
from perfscope.collectors.capture.schedule import CaptureSchedule, Due
from perfscope.collectors.capture.writer import TraceWriter
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.discovery import JobObjects, discover
from perfscope.collectors.ranges.ranges import Ranges
from perfscope.recording.metadata import CaptureMetadata

WORTH: Final = 2
"""A step of a planned capture is worth as many of the job's first ones, which include what happens only once."""


class Capturer:
    """The captures of one rank. The session calls it when a step has been completed."""

    def __init__(self, context: RankContext, schedule: CaptureSchedule) -> None:
        self._config, self._identity = context.config, context.identity
        self._run_file, self._problems = context.run_file, context.problems
        self._annotator = Annotator(nvtx=self._config.nvtx)
        self.ranges = Ranges(context.phases, self._annotator, self._problems)
        self._schedule = schedule
        self._writer = TraceWriter(self._config.folder, self._identity.rank, self._problems)
        self._announcer = Announcer(self._config, self._identity.rank)
        self._foreign = ForeignProfiler()
        self._postponed = False
        self.yields = False
        """Does the script's own profiler run, which a capture would have to wait for?"""
        self._capture: RankCapture | None = None
        self._early: RankCapture | None = None
        """Of the job's first steps, stopped and kept in memory."""
        self._due = Due(0, self._config.active)
        self._found: tuple[JobObjects, list[Any]] | None = None
        """The job's objects and optimizers when the capture under way began; None once they have been described."""

    @property
    def busy(self) -> bool:
        """Does anything of ours disturb the training at the moment?"""
        return self._capture is not None or self._writer.busy()

    def at_edge(self, completed: int) -> bool:
        """Does the boundary after ``completed`` steps start a capture, or is it where recorded steps begin or end?"""
        if self._capture is None:
            return self._schedule.wants(completed)
        warmup = self._capture.warmup
        return self._capture.completed + 1 in (warmup, warmup + self._due.active)

    def boundary(self, completed: int, optimizers: Callable[[], Iterable[Any]]) -> None:
        """``completed`` training steps have ended; the next begins when this returns."""
        self.yields = False
        if self._capture is not None:
            self._advance(self._capture, completed)
        if self._capture is None and self._schedule.wants(completed):
            due, missed = self._schedule.due(completed)
            for problem in missed:
                self._problems.add(problem)
            if due is not None:
                self._start(completed, due, list(optimizers()))

    def restart(self) -> None:
        """What was taken for steps may not have been: drop the capture under way and start it anew."""
        self._early = None
        if self._capture is not None:
            capture, self._capture = self._capture, None
            capture.discard()
            self._schedule.hurry(self._due)

    def forget(self) -> None:
        """In a forked child of a process that records: write nothing more."""
        capture, self._capture = self._capture, None
        self._early = None
        if capture is not None:
            capture.forget()

    def close(self) -> None:
        """The process ends, perhaps in the middle of a step: write the completed steps."""
        capture, self._capture = self._capture, None
        early, self._early = self._early, None
        if capture is not None and not capture.can_stop():
            capture.abandon()
            self._problems.add("the device did not finish its work, so the running capture could not be written")
        elif capture is not None and self._due.early:
            capture.stop()
            early = capture
        elif capture is not None and capture.active_completed * WORTH >= max(_steps(early), 1):
            early = None
            self._write(capture, complete=False)
        elif capture is not None:
            capture.discard()
            self._found = None  # they were described with the first steps, of which more is known
        if early is not None and _steps(early):
            self._write_early(early)

    def join(self) -> None:
        """Wait until every trace is compressed."""
        self._writer.join()
        self._problems.guard("removing execution traces", self._writer.remove_unfinished)

    def _start(self, step: int, due: Due, optimizers: list[Any]) -> None:
        if self._foreign.at_work():
            self._postpone(step, due)
            return
        objects = discover(optimizers)
        if self._foreign.remember(objects.profilers):
            self._postpone(step, due)
            return
        if not objects.roots:
            self._problems.add("no module holds the optimizer's parameters: forward ranges and the model are missing")
        capture = RankCapture(
            self._options(due),
            step,
            self._identity.rank,
            self.ranges,
            self._annotator,
            self._problems,
            lambda: self._problems.guard("stopping for the script's own profiler", self._yield),
        )
        try:
            self._annotator.rank(self._identity.rank, self._identity.world_size)
            capture.start(objects)
        except Exception as error:
            self._give_up(f"the profiler did not start at step {step}", error)
            return
        self._capture, self._due, self._found = capture, due, (objects, optimizers)
        if not due.early:
            self._announcer.begins(capture.first_active, capture.warmup, due.active)

    def _options(self, due: Due) -> CollectorConfig:
        if due.early:
            return dataclasses.replace(self._config, warmup=0, active=due.active, count_flops=False)
        return dataclasses.replace(self._config, active=due.active)

    def _advance(self, capture: RankCapture, completed: int) -> None:
        try:
            finished = capture.step()
        except Exception as error:
            self._give_up("the profiler failed", error)
            return
        if finished and self._due.early:
            self._keep(capture, completed)
        elif finished:
            self._schedule.ended(self._due, completed)
            capture.last = not self._schedule.plans_more
            self._write(capture, complete=True)

    def _keep(self, capture: RankCapture, completed: int) -> None:
        """The job's first steps are recorded: keep them in memory, and describe the run as it now stands."""
        self._capture = None
        try:
            capture.stop()
        except Exception as error:
            self._give_up("the profiler failed", error)
            return
        self._early = capture
        self._schedule.ended(self._due, completed)
        self._describe()

    def _write_early(self, capture: RankCapture) -> None:
        """The job has ended before a planned capture had much to offer: write its first steps."""
        plan = f"--wait {self._config.wait} --warmup {self._config.warmup} --active {self._config.active}"
        reason = (
            f"the job ended before the steps that were to be recorded ({plan}), so these are its first ones, which "
            "include what happens only once"
        )
        self._due = Due(0, capture.active_completed, reason, early=True)
        self._write(capture, complete=capture.full)

    def _write(self, capture: RankCapture, *, complete: bool) -> None:
        """Stop a capture, write it, and describe the run as it now stands."""
        self._capture = self._early = None
        try:
            name = capture.cut(lambda export: self._writer.write(self._due.number, export))
        except Exception as error:
            self._give_up("the trace could not be written", error)
            return
        execution = capture.execution.take() if capture.execution is not None else None
        if execution is not None:
            self._problems.guard(
                "writing the execution trace", self._writer.write_execution_trace, self._due.number, execution
            )
        if not self._due.early:
            self._announcer.ends(capture.first_active, capture.active_completed)
        self._run_file.count_backwards(capture.backwards, capture.completed)
        self._run_file.count_cpu(capture.times)
        # Ranks begin at slightly different moments, which a warm-up step takes up; early ones have none to spare.
        lead_in = self._due.early and capture.active_completed > 1
        self._run_file.captures.append(
            CaptureMetadata(
                file=name,
                first_step=capture.first_active + lead_in,
                last_step=capture.first_active + capture.active_completed - 1,
                complete=complete,
                reason=self._due.reason,
                waited_ns=tuple(capture.times.waits[lead_in:]),
            )
        )
        self._run_file.flops = capture.flops or self._run_file.flops
        self._describe()

    def _describe(self) -> None:
        if self._found is not None:
            self._run_file.describe(*self._found, self.ranges)
        self._found = None

    def _yield(self) -> None:
        """The script's own profiler is about to start: ours stops first."""
        capture = self._capture
        if capture is None:
            return
        if self._due.early:
            self._keep(capture, capture.first + capture.completed)
        elif capture.active_completed:
            self._problems.add(
                f"the script started a profiler of its own; the capture ends after {capture.active_completed} of "
                f"{self._due.active} steps"
            )
            self._write(capture, complete=False)
            self._schedule.ended(self._due, capture.first + capture.completed)
            self._schedule.put_off(self._config.warmup + self._config.active)
        else:
            self._problems.add("the script started a profiler of its own; the capture waits until that has finished")
            self._postponed = True
            self.restart()

    def _postpone(self, step: int, due: Due) -> None:
        self.yields = True
        if due.agreed:
            self._problems.add(f"the script's own profiler ran at step {step}: the capture there is missing")
        elif not self._postponed and not due.early:
            self._postponed = True
            self._problems.add(f"the script's own profiler ran at step {step}; the capture waits for its end")

    def _give_up(self, what: str, error: Exception) -> None:
        """Nothing more is recorded; the training goes on as if nothing had been."""
        capture, self._capture = self._capture, None
        self._schedule.stop()
        self._found = None
        if capture is not None:
            self._problems.guard("stopping the profiler", capture.discard)
        self._problems.add(f"{what} ({type(error).__name__}: {error}); this process records nothing more")


def _steps(capture: RankCapture | None) -> int:
    """Steps that a capture has recorded."""
    return 0 if capture is None else capture.active_completed


def running(profilers: Iterable[Any]) -> list[Any]:
    """Those of the given ``torch.autograd.profiler.profile`` objects that are prepared or recording."""
    held = ((profiler, vars(profiler)) for profiler in profilers)
    return [profiler for profiler, state in held if state.get("entered") and state.get("kineto_results") is None]


class ForeignProfiler:
    """Knows whether the script's own profiler is at work."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Any]] = []

    def remember(self, profilers: Iterable[Any]) -> bool:
        """Remember those that are at work; are there any?"""
        self._known = [weakref.ref(profiler) for profiler in running(profilers)]
        return bool(self._known)

    def at_work(self) -> bool:
        """Is a profiler recording on this thread, or one that is remembered still at work?"""
        autograd: Any = importlib.import_module("torch.autograd")
        alive = [profiler for profiler in (ref() for ref in self._known) if profiler is not None]
        return bool(autograd._profiler_enabled()) or bool(running(alive))
