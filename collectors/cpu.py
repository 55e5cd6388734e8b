"""CPU time by the kernel's clocks: of this process, of its training thread, and of data loader workers.

Each look takes about a microsecond. Where a system has no such clock, nothing is counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from perfscope.recording.metadata import CpuMetadata

_SCHEDULED: Final = 2
"""The clock of the time for which a process ran (``CPUCLOCK_SCHED``, the kernel's ``linux/posix-timers_types.h``)."""

_SCHEDSTAT: Final = Path("/proc/thread-self/schedstat")
"""Run time, time in the run queue (ns), turns: the kernel's ``Documentation/scheduler/sched-stats.rst``."""


class Times(NamedTuple):
    """Looks at three clocks, or what went by between two looks; ns."""

    wall: int
    thread: int
    """CPU time of the thread that looks."""
    process: int
    """CPU time of all threads of its process."""

    def since(self, earlier: Times) -> Times:
        """What went by."""
        return Times(self.wall - earlier.wall, self.thread - earlier.thread, self.process - earlier.process)


def now() -> Times:
    """The clocks as they stand."""
    return Times(time.perf_counter_ns(), time.thread_time_ns(), time.process_time_ns())


def of_processes(pids: Iterable[int]) -> int | None:
    """CPU time of other processes together, ns; None where one has ended, or the system does not report it.

    A process's clock is called by its inverted number, as by clock_getcpuclockid(3), which Python does not offer.
    """
    try:
        return sum(time.clock_gettime_ns((~pid << 3) | _SCHEDULED) for pid in pids)
    except (AttributeError, OSError, OverflowError):
        return None


def waited_for_core() -> int | None:
    """How long this thread was ready to run and waited for a core so far, ns; None where not known."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return None


class StepTimes:
    """CPU time of the steps that a capture records. Called by the training thread, between steps."""

    def __init__(self) -> None:
        self.steps = 0
        """Those that have ended."""
        self.took = Times(0, 0, 0)
        """By them."""
        self.waits: list[int] = []
        """Time for which the training thread waited for a core in each of them, ns; empty where not known."""
        self._began: Times | None = None
        self._waited_before: int | None = None

    @property
    def waited(self) -> int | None:
        """Time for which the training thread waited for a core in all of them, ns; None where not known."""
        return sum(self.waits) if self.waits else None

    def begin(self) -> None:
        """The first recorded step begins."""
        self._began, self._waited_before = now(), waited_for_core()

    def step_ended(self) -> None:
        """A recorded step has ended."""
        if self._began is None:
            return
        self.steps += 1
        self.took = now().since(self._began)
        before, self._waited_before = self._waited_before, waited_for_core()
        if before is None or self._waited_before is None:
            self.waits.clear()
            self._waited_before = None
        else:
            self.waits.append(self._waited_before - before)


def describe_cpu(captures: Iterable[StepTimes]) -> CpuMetadata:
    """The cores that this process may use, and the CPU time of its captures' steps together."""
    from perfscope.collectors.sampler.host import cores_quota

    every = list(captures)
    waited = [each.waited for each in every]
    return CpuMetadata(
        cores=_cores(),
        quota=cores_quota(),
        steps=sum(each.steps for each in every),
        wall_ns=sum(each.took.wall for each in every),
        process_ns=sum(each.took.process for each in every),
        thread_ns=sum(each.took.thread for each in every),
        waited_ns=sum(each for each in waited if each is not None) if waited and None not in waited else None,
    )


def _cores() -> str:
    """As the kernel lists them: ``0-3,8``; empty where the system does not report it."""
    affinity = getattr(os, "sched_getaffinity", None)
    allowed = sorted(affinity(0)) if affinity is not None else []
    runs: list[list[int]] = []
    for core in allowed:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
