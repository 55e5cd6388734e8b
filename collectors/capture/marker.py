"""Writes ranges and nothing else, for a profiler that is not ours: the user's own, or Nsight Systems."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from perfscope.collectors.annotate import Annotator
from perfscope.collectors.capture.run_file import RankContext
from perfscope.collectors.device import device_types
from perfscope.collectors.discovery import discover
from perfscope.collectors.ranges.gc_ranges import GcRanges
from perfscope.collectors.ranges.ranges import Ranges
from perfscope.recording.vocabulary import BACKWARD

DESCRIBE_AFTER: Final = 4
"""Steps with ranges after which loaders have been drawn from and DDP has built its buckets."""


class Marker:
    """The ranges of one rank, from its first step to its end. Stands where a ``Capturer`` stands otherwise."""

    busy = yields = False

    def __init__(self, context: RankContext) -> None:
        self._config, self._identity = context.config, context.identity
        self._run_file, self._problems = context.run_file, context.problems
        self._annotator = Annotator(nvtx=True)
        self.ranges = Ranges(context.phases, self._annotator, self._problems)
        self._gc_ranges = GcRanges(self._annotator, self._problems)
        self._installed_at: int | None = None
        self._described = False
        self._on_device = False
        self._recording = False

    def at_edge(self, completed: int) -> bool:
        """Do the recorded steps begin or end after ``completed`` steps?"""
        first = self._config.wait + self._config.warmup
        return completed in (first, first + self._config.active)

    def boundary(self, completed: int, optimizers: Callable[[], Iterable[Any]]) -> None:
        """``completed`` training steps have ended; the next begins when this returns."""
        if self._installed_at is None:
            self._installed_at = completed
            self._problems.guard("installing the ranges", self._install, list(optimizers()))
        elif not self._described and completed >= self._installed_at + DESCRIBE_AFTER:
            self._described = True
            self._problems.guard("describing the run", self._describe, list(optimizers()), completed)
        if self._config.mode == "nsys" and self.at_edge(completed):
            self._problems.guard("starting or stopping Nsight Systems", self._edge)
        self._annotator.step(completed)

    def restart(self) -> None:
        """What was taken for steps may not have been. Ranges need nothing anew."""

    def forget(self) -> None:
        """In a forked child: write nothing more."""
        self._gc_ranges.remove()
        self.ranges.forget()

    def close(self) -> None:
        """The process ends: put everything back. The range of the step under way stays open: it never ended."""
        self._gc_ranges.remove()
        self.ranges.remove()

    def join(self) -> None:
        """Nothing is written that could be waited for."""

    def _install(self, optimizers: list[Any]) -> None:
        if not self._annotator.writes_nvtx:
            self._problems.add(
                "NVTX ranges cannot be written: there is neither the package nvtx (pip install nvtx) nor a CUDA device"
            )
        objects = discover(optimizers)
        self._on_device = "cuda" in device_types(objects.roots)
        self._annotator.rank(self._identity.rank, self._identity.world_size)
        self.ranges.install(objects.to_hook())
        self._gc_ranges.install()

    def _describe(self, optimizers: list[Any], completed: int) -> None:
        assert self._installed_at is not None
        self._run_file.count_backwards(self.ranges.calls[BACKWARD], completed - self._installed_at)
        self._run_file.describe(discover(optimizers), optimizers, self.ranges)

    def _edge(self) -> None:
        """``nsys --capture-range=cudaProfilerApi`` records between these two calls."""
        if not self._on_device:
            return
        import torch.cuda.profiler

        if self._recording:
            torch.cuda.synchronize()  # the kernels of the last step are to be in the report
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        else:
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        self._recording = not self._recording
