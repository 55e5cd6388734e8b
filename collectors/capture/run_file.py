"""The metadata file of one rank, as more becomes known of its run."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from perfscope._version import __version__
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.cpu import StepTimes, describe_cpu
from perfscope.collectors.ending import describe_error, uncaught
from perfscope.collectors.identity import Identity, attempt, rendezvous
from perfscope.collectors.overrides.log import LOG
from perfscope.collectors.problems import Problems
from perfscope.recording.metadata import CaptureMetadata, RecordingMetadata, RunMetadata, StepsMetadata, now, save
from perfscope.recording.paths import run_file
from perfscope.redact import performance_environment, redact_command

if TYPE_CHECKING:
    from perfscope.collectors.discovery import JobObjects
    from perfscope.collectors.phases.phases import StepPhases
    from perfscope.collectors.ranges.ranges import Ranges


class RunFile:
    """Gathers one rank's metadata and writes them."""

    def __init__(
        self,
        config: CollectorConfig,
        identity: Identity,
        problems: Problems,
        earlier: RunMetadata | None = None,
        role: str = "",
    ) -> None:
        self._earlier = earlier.captures if earlier is not None else ()
        self._path = run_file(config.folder, identity.rank)
        self._problems = problems
        self._run = dataclasses.replace(describe_process(identity, config.mode), role=role)
        self._backwards = 0
        self._steps_with_ranges = 0
        self._times: list[StepTimes] = []
        self.captures: list[CaptureMetadata] = []
        """Captures on disk."""
        self.unsaved = True
        """Is more known than the file contains?"""
        self.flops: float | None = None
        """Floating-point operations of one step, where they were counted."""
        self.recording: RecordingMetadata | None = None
        """What recording takes of the steps, where that is known."""

    def describe(self, objects: JobObjects, optimizers: Iterable[Any], ranges: Ranges) -> None:
        """Describe the run as it now stands. No reference to the objects stays."""
        from perfscope.collectors.describe.describe import describe_run

        run = describe_run(self._run, objects, optimizers, ranges, self._problems)
        self._run = dataclasses.replace(run, cpu=self._problems.guard("counting CPU time", describe_cpu, self._times))
        self.unsaved = True

    def count_cpu(self, times: StepTimes) -> None:
        """A capture's steps took that much CPU time."""
        self._times.append(times)

    def count_backwards(self, backwards: int, steps: int) -> None:
        """``backward`` was called that often in that many steps."""
        self._backwards += backwards
        self._steps_with_ranges += steps

    def save(self, steps: StepsMetadata, outcome: str) -> None:
        """Write the metadata; they count as saved also where that fails. Raises OSError."""
        self.unsaved = False
        if self._steps_with_ranges:
            steps = dataclasses.replace(steps, backwards_per_step=self._backwards / self._steps_with_ranges)
        error = None
        if outcome == "exception":
            error = self._problems.guard("describing the exception", describe_error, uncaught())
        record = dataclasses.replace(
            self._run,
            steps=steps,
            recording=self.recording,
            captures=(*self._captures_of_earlier_attempts(), *self.captures),
            model_flops_per_step=self.flops,
            applied=LOG.as_dict(),
            problems=self._problems.as_tuple(),
            outcome=outcome,
            ended_at="" if outcome == "running" else now(),
            error=error,
        )
        save(record, self._path)

    def _captures_of_earlier_attempts(self) -> list[CaptureMetadata]:
        """Those whose files this attempt has not replaced."""
        replaced = {capture.file for capture in self.captures}
        return [capture for capture in self._earlier if capture.file not in replaced]


@dataclasses.dataclass(frozen=True)
class RankContext:
    """What all that records one rank works with."""

    config: CollectorConfig
    """The options that hold in this process."""
    identity: Identity
    run_file: RunFile
    phases: StepPhases
    problems: Problems


def describe_process(identity: Identity, mode: str) -> RunMetadata:
    """Which rank this process is, on which host, and its environment; ``mode``: what is recorded."""
    affinity = getattr(os, "sched_getaffinity", None)
    return RunMetadata(
        perfscope_version=__version__,
        mode=mode,
        attempt=attempt(),
        **dataclasses.asdict(identity),
        host=socket.gethostname(),
        cpu_count=len(affinity(0)) if affinity is not None else os.cpu_count(),
        pid=os.getpid(),
        started_at=now("seconds"),
        # Where the interpreter was installed has nothing to do with the run.
        command=redact_command([os.path.basename(sys.orig_argv[0]), *sys.orig_argv[1:]]),  # noqa: PTH119 - a mere name
        rendezvous=rendezvous(os.environ),
        environment=performance_environment(os.environ),
    )
