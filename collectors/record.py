"""What is known of one rank's run, as it grows: its metadata file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.cpu import StepTimes, describe_cpu
from perfscope.collectors.identity import Identity
from perfscope.collectors.overrides_log import LOG
from perfscope.collectors.problems import Problems
from perfscope.collectors.process import describe_process
from perfscope.metadata import CaptureRecord, RunMetadata, StepRecord, save
from perfscope.paths import run_file

if TYPE_CHECKING:
    from perfscope.collectors.discovery import Found
    from perfscope.collectors.ranges import Ranges


class RunRecord:
    """Gathers one rank's metadata and writes them."""

    def __init__(
        self, config: CollectorConfig, identity: Identity, problems: Problems, earlier: RunMetadata | None = None
    ) -> None:
        self._earlier = earlier.captures if earlier is not None else ()
        self._path = run_file(config.folder, identity.rank)
        self._problems = problems
        self._run = describe_process(identity, config.mode)
        self._backwards = 0
        self._steps_with_ranges = 0
        self._times: list[StepTimes] = []
        self.captures: list[CaptureRecord] = []
        """Captures on disk."""
        self.unsaved = True
        """Is there more to tell than the file says?"""
        self.flops: float | None = None
        """Floating-point operations of one step, where they were counted."""

    def describe(self, found: Found, optimizers: Iterable[Any], ranges: Ranges) -> None:
        """Describe the run as it now stands. The objects are not kept."""
        from perfscope.collectors.describe import describe_run

        run = describe_run(self._run, found, optimizers, ranges, self._problems)
        self._run = dataclasses.replace(run, cpu=self._problems.guard("counting CPU time", describe_cpu, self._times))
        self.unsaved = True

    def count_cpu(self, times: StepTimes) -> None:
        """A capture's steps took that much CPU time."""
        self._times.append(times)

    def count_backwards(self, backwards: int, steps: int) -> None:
        """``backward`` was called that often in that many steps."""
        self._backwards += backwards
        self._steps_with_ranges += steps

    def save(self, steps: StepRecord, outcome: str) -> None:
        """Write the metadata; they count as saved also where that fails. Raises OSError."""
        self.unsaved = False
        if self._steps_with_ranges:
            steps = dataclasses.replace(steps, backwards_per_step=self._backwards / self._steps_with_ranges)
        record = dataclasses.replace(
            self._run,
            steps=steps,
            captures=(*self._captures_of_earlier_attempts(), *self.captures),
            model_flops_per_step=self.flops,
            applied=LOG.as_dict(),
            problems=self._problems.as_tuple(),
            outcome=outcome,
        )
        save(record, self._path)

    def _captures_of_earlier_attempts(self) -> list[CaptureRecord]:
        """Those whose files this attempt has not replaced."""
        replaced = {capture.file for capture in self.captures}
        return [capture for capture in self._earlier if capture.file not in replaced]
