"""Stores how long every step took: a row in memory when it ends, a block on disk every few seconds."""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from struct import Struct
from time import perf_counter_ns, thread_time_ns
from typing import Final, NamedTuple

from perfscope.collectors.phases.clock import FIRST_WAIT, HEAD, PhaseClock
from perfscope.collectors.phases.core import CoreWaits
from perfscope.recording.history import CORE, DISTURBED, OCCASIONAL, STAGES, UNPROFILED_STEPS, WAITS, Block, pack

BLOCK_STEPS: Final = 512
"""Steps of a block at most: by then its header no longer counts."""

BLOCK_S: Final = 5.0
"""Age at which a block is written however few its steps: what a kill can cost."""

_BLOCKS_PER_S: Final = 64
"""Blocks that all ranks of a job together write in a second before their age grows: folders are often shared."""

_LEAST_BLOCK_S: Final = 2.0
"""Age at which the ranks of a small job write theirs, so that who watches the job sees what happens."""

MOST_WAITING: Final = 1 << 16
"""Steps held in memory while the file system does not answer; beyond, the oldest are lost."""

_CORE: Final = WAITS.index(CORE)

Stages = Sequence[int]
"""Time of one step in each of ``STAGES``, ns."""


class Step(NamedTuple):
    """One step as the training thread hands it over."""

    number: int
    began: int
    """``perf_counter_ns``."""
    duration: int
    """ns."""
    stages: Stages
    """Not changed any more."""
    disturbed: bool
    waits: Stages = (0,) * len(WAITS)
    """Of that, waiting for each of ``WAITS``."""


_ROW: Final = Struct(f"={HEAD + 4}q")
"""A step in memory: the clock's times, then number, began, duration, disturbed. Made with the fewest looks at memory:
between others' work what a step reads and writes is in no cache.
"""


def block_age(world_size: int) -> float:
    """Age in seconds at which each of so many ranks writes a block."""
    return min(max(world_size / _BLOCKS_PER_S, _LEAST_BLOCK_S), BLOCK_S)


class StepHistory:
    """One rank's step history. ``add`` is called by the training thread, ``write`` by one other."""

    def __init__(self, path: Path, attempt: int, block_s: float = BLOCK_S) -> None:
        self._path = path
        self._attempt = attempt
        self._block_s = block_s
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self.append: Callable[[bytes], None] = self._waiting.append
        """A step has ended: its row. One object per step, which the garbage collector need not look at."""
        self._written_at = time.monotonic()
        self._to_epoch_ns = time.time_ns() - perf_counter_ns()
        """Kept: a clock that is set in the course of a run makes no step begin hours after the one before it."""
        self.measured = frozenset({"optimizer"})
        """Stages that are measured; the others' times are left out."""
        self.waits_measured = False
        """Is waiting for other ranks?"""

    def add(self, step: Step) -> None:
        """A step has ended."""
        head = step.number, step.began, step.duration, step.disturbed
        self.append(array("q", [*step.stages, *step.waits, *head]).tobytes())

    def due(self) -> bool:
        """Is it time to write?"""
        if not self._waiting:
            return False
        return len(self._waiting) >= BLOCK_STEPS or time.monotonic() - self._written_at >= self._block_s

    def write(self) -> None:
        """Append what is waiting. Raises OSError when the folder cannot be written; what was waiting is then lost."""
        self._written_at = time.monotonic()
        rows = b"".join([self._waiting.popleft() for _ in range(len(self._waiting))])
        steps = [
            Step(number, began, duration, times[:FIRST_WAIT], bool(disturbed), times[FIRST_WAIT:])
            for *times, number, began, duration, disturbed in _ROW.iter_unpack(rows)
        ]
        # Numbers that follow one another share a block; so number - place is the same within one.
        for _, numbered in groupby(enumerate(steps), lambda entry: entry[1].number - entry[0]):
            consecutive = [step for _, step in numbered]
            for first in range(0, len(consecutive), BLOCK_STEPS):
                self._append(pack(self._block(consecutive[first : first + BLOCK_STEPS])))

    def _block(self, steps: list[Step]) -> Block:
        return Block(
            attempt=self._attempt,
            first_step=steps[0].number,
            began_ns=steps[0].began + self._to_epoch_ns,
            step_us=[step.duration // 1000 for step in steps],
            stages_us={
                name: column
                for name, column in _columns(STAGES, [step.stages for step in steps])
                if name in self.measured and (name not in OCCASIONAL or any(column))
            },
            waits_us={name: column for name, column in _columns(WAITS, [step.waits for step in steps]) if any(column)}
            if self.waits_measured
            else None,
            flags=bytes(DISTURBED if step.disturbed else 0 for step in steps),
        )

    def _append(self, data: bytes) -> None:
        """In one call, so that a kill leaves the block whole or, at worst, cut; readers step over a cut one."""
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.write(file, data) < len(data):
                raise OSError(f"{self._path.name} was cut while it was written; is the disk full?")
        finally:
            os.close(file)


def _columns(names: Sequence[str], rows: Sequence[Stages]) -> Iterator[tuple[str, list[int]]]:
    """The times of each name in every step, µs."""
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        yield name, [ns // 1000 for ns in column]


class StepTimer:
    """The clock of one process's steps."""

    def __init__(self, history: StepHistory, clock: PhaseClock) -> None:
        self._history = history
        self._append = history.append
        self._clock = clock
        self.disturbed = False
        """Is something of ours at work in the step under way, or was just before?"""
        self.core = CoreWaits()
        """Of the training thread; begun where waiting is measured."""
        self.unprofiled: list[int] = []
        """Wall time of the first undisturbed steps, ns."""
        self.unprofiled_thread: list[int] = []
        """CPU time of the training thread in them, ns."""
        self._thread_before = 0

    def step_ends(self, number: int, *, busy: bool) -> Step | None:
        """Step ``number`` has ended; what is known of it, None where its beginning was not seen.

        ``busy``: something of ours is at work.
        """
        now, began = perf_counter_ns(), self._clock.began
        if began:
            self._ask_core(now - began)
        stages, waits = self._clock.take()
        if not began:
            return None
        step = Step(number, began, now - began, stages, self.disturbed or busy, waits)
        self._history.add(step)
        self.keep(step.duration, disturbed=step.disturbed)
        return step

    def step_passes(self, number: int) -> int:
        """Step ``number`` has ended and the next begins, with nothing of ours at work; how long it took (ns), 0 where
        its beginning was not seen.

        As :meth:`step_ends` and :meth:`step_begins`, in one call; :attr:`unprofiled` is left to the caller.
        """
        clock = self._clock
        now, began, duration = perf_counter_ns(), clock.began, 0
        if began:
            duration = now - began
            self.core_waited(duration)
            self._append(clock.row(number, began, duration, self.disturbed))
        clock.clear()
        self.disturbed = False
        clock.began = perf_counter_ns()
        return duration

    def keep(self, duration: int, *, disturbed: bool) -> None:
        """Keep what a step took that has just ended, if it is one of the first undisturbed ones; 0: not known."""
        if len(self.unprofiled) >= UNPROFILED_STEPS:
            return
        before, self._thread_before = self._thread_before, thread_time_ns()
        if duration and not disturbed:
            self.unprofiled.append(duration)
            self.unprofiled_thread.append(max(self._thread_before - before, 0))

    def core_waited(self, duration: int) -> None:
        """The step that has just ended took so long (ns): count what the thread waited for a core."""
        core = self.core
        if core.skip and duration < core.long_ns:
            core.skip -= 1
        else:
            self._ask_core(duration)

    def _ask_core(self, duration: int) -> None:
        core, clock = self.core, self._clock
        clock.ask_core()
        clock.set_wait(_CORE, core.of_step(duration))
        clock.core = core if core.in_stages else None

    def step_begins(self, *, disturbed: bool) -> int:
        """The next step begins now; the time. ``disturbed``: something of ours, or the script's own profiler, is at
        work, or was just before.
        """
        self.disturbed = disturbed
        if len(self.unprofiled) < UNPROFILED_STEPS:
            self._thread_before = thread_time_ns()
        self._clock.clear()
        self._clock.began = began = perf_counter_ns()
        return began

    def restart(self) -> None:
        """What was taken for steps may not have been."""
        self._clock.began = 0
        self.unprofiled.clear()
        self.unprofiled_thread.clear()
