"""Makes the planned captures of one rank and keeps what is known about the run on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from perfscope.collectors.annotate import Annotator
from perfscope.collectors.capture import Capture
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.describe import describe_process, describe_run
from perfscope.collectors.discovery import Found, discover
from perfscope.collectors.foreign import ForeignProfiler
from perfscope.collectors.identity import Identity
from perfscope.collectors.problems import Problems
from perfscope.collectors.ranges import Ranges
from perfscope.collectors.writer import TraceWriter
from perfscope.metadata import CaptureRecord, RunMetadata, StepRecord, save
from perfscope.paths import run_file


class Recorder:
    """Captures and metadata of one rank. The session tells it when a step has been completed."""

    def __init__(self, config: CollectorConfig, identity: Identity, problems: Problems) -> None:
        self._config = config
        self._identity = identity
        self._problems = problems
        self._annotator = Annotator(nvtx=config.nvtx)
        self.ranges = Ranges(self._annotator, problems)
        self._writer = TraceWriter(config.folder, identity.rank, problems)
        self._foreign = ForeignProfiler()
        self._postponed = False
        self._capture: Capture | None = None
        self._found = Found()
        self._optimizers: list[Any] = []
        self._next_start = config.wait
        self._off = False
        self._captures: list[CaptureRecord] = []
        self._run: RunMetadata = describe_process(identity)
        self._flops: float | None = None
        self._backwards = 0
        self._steps_with_ranges = 0

    @property
    def busy(self) -> bool:
        """Does anything of ours disturb the training at the moment?"""
        return self._capture is not None or self._writer.busy()

    @property
    def captures(self) -> int:
        """Captures on disk."""
        return len(self._captures)

    def boundary(self, completed: int, optimizers: Callable[[], Iterable[Any]]) -> None:
        """``completed`` training steps have ended; the next begins when this returns."""
        capture = self._capture
        if capture is not None:
            self._advance(capture, completed)
        elif not self._off and len(self._captures) < self._config.repeat and completed >= self._next_start:
            self._start(completed, list(optimizers()))

    def restart(self) -> None:
        """What was taken for steps may not have been: drop the capture under way and start it anew."""
        if self._capture is not None:
            capture, self._capture = self._capture, None
            capture.discard()
            self._next_start = 0

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

    def save(self, steps: StepRecord, outcome: str) -> None:
        """Write the run's metadata. Raises OSError."""
        run = self._run
        if self._steps_with_ranges:
            backwards = self._backwards / self._steps_with_ranges
            steps = dataclasses.replace(steps, backwards_per_step=backwards)
            if backwards > 1:
                accumulation = {"gradient_accumulation": {"backwards_per_step": backwards}}
                run = dataclasses.replace(run, settings={**run.settings, **accumulation})
        record = dataclasses.replace(
            run,
            steps=steps,
            captures=tuple(self._captures),
            model_flops_per_step=self._flops,
            problems=self._problems.as_tuple(),
            outcome=outcome,
        )
        save(record, run_file(self._config.folder, self._identity.rank))

    def _start(self, step: int, optimizers: list[Any]) -> None:
        if self._foreign.at_work():
            self._postpone(step)
            return
        found = discover(optimizers)
        if self._foreign.remember(found.profilers):
            self._postpone(step)
            return
        if not found.roots:
            self._problems.add("no module holds what the optimizer trains: forward ranges and the model are missing")
        capture = Capture(
            self._config,
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
        self._capture, self._found, self._optimizers = capture, found, optimizers

    def _advance(self, capture: Capture, completed: int) -> None:
        try:
            finished = capture.step()
        except Exception as error:
            self._give_up("the profiler failed", error)
            return
        if finished:
            self._keep(capture, complete=True)
            self._next_start = completed + self._config.wait

    def _keep(self, capture: Capture, *, complete: bool) -> None:
        """Stop a capture, write it, and describe the run as it now stands."""
        self._capture = None
        try:
            name = capture.cut(lambda export: self._writer.write(len(self._captures), export))
        except Exception as error:
            self._give_up("the trace could not be written", error)
            return
        self._backwards += capture.backwards
        self._steps_with_ranges += capture.completed
        last = capture.first_active + capture.active_completed - 1
        self._captures.append(
            CaptureRecord(file=name, first_step=capture.first_active, last_step=last, complete=complete)
        )
        self._flops = capture.flops or self._flops
        self._run = describe_run(self._run, self._found, self._optimizers, self.ranges, self._problems)
        self._found, self._optimizers = Found(), []

    def _yield(self) -> None:
        """The script's own profiler is about to start: ours stops first."""
        capture = self._capture
        if capture is None:
            return
        if capture.active_completed:
            self._problems.add(
                f"the script started a profiler of its own; the capture ends after {capture.active_completed} of "
                f"{self._config.active} steps"
            )
            self._keep(capture, complete=False)
            self._next_start += self._config.cycle
        else:
            self._problems.add("the script started a profiler of its own; recording waits until it has finished")
            self._postponed = True
            self.restart()

    def _postpone(self, step: int) -> None:
        if not self._postponed:
            self._postponed = True
            self._problems.add(f"the script's own profiler was at work at step {step}; recording waits for its end")

    def _give_up(self, what: str, error: Exception) -> None:
        """Nothing more is recorded; the training goes on as if nothing had been."""
        capture, self._capture = self._capture, None
        self._off = True
        self._found, self._optimizers = Found(), []
        if capture is not None:
            self._problems.guard("stopping the profiler", capture.discard)
        self._problems.add(f"{what} ({type(error).__name__}: {error}); this process is recorded no further")
