"""The system sampler's own process: looks at the host's counters now and then, and appends them to the host's file."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from perfscope._version import __version__
from perfscope.collectors.claims import holder_of_rank
from perfscope.collectors.sampler.host import ProcHost
from perfscope.collectors.sampler.nvml import Nvml
from perfscope.collectors.sampler.psutil import PsutilHost, PsutilTasks
from perfscope.collectors.sampler.sampler import QUIT, SamplerOptions
from perfscope.collectors.sampler.tasks import ProcTasks, Task
from perfscope.recording.paths import samples_file
from perfscope.recording.samples import DEVICE_COLUMNS, HOST_COLUMNS, PROCESS_COLUMNS, RANK, SCHEMA

FULL_RATE: Final = 7200
"""Samples at one rate; the period then doubles, so that a job of days leaves tens of thousands, not millions."""

ALIVE_S: Final = 0.5
"""How often to see whether the parent is still there."""

NICENESS: Final = 10
"""The training comes first."""

PATIENCE_S: Final = 300.0
"""Time after which ranks that have not shown up are not waited for: they may not be recorded (``--ranks``)."""

_HAS_PROC: Final = Path("/proc/self/stat").exists()

_LAST_FILE: Final = 65536
"""Inherited file descriptors are closed up to this one; the limit on open files may be a thousand million."""


Host = ProcHost | PsutilHost
Tasks = ProcTasks | PsutilTasks


class Sampler:
    """Samples one host into its file."""

    def __init__(self, options: SamplerOptions, host: Host | None, tasks: Tasks | None, devices: Nvml | None) -> None:
        self._options = options
        self._host = host
        self._tasks = tasks
        self._devices = devices
        self._ranks = LocalRanks(options)
        self._members: dict[int, Task] = {}
        self._seen: set[int] = set()
        self._file = os.open(
            samples_file(Path(options.folder), socket.gethostname()), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )

    def begin(self, problems: list[str]) -> None:
        """Write the header, and what cannot be sampled. Raises OSError."""
        header = {
            "schema": SCHEMA,
            "perfscope_version": __version__,
            "host": socket.gethostname(),
            "period_s": self._options.period_s,
            "started_ns": time.time_ns(),
            **(self._host.describe() if self._host else {}),
            "devices": self._devices.describe() if self._devices else [],
            "host_columns": list(HOST_COLUMNS),
            "device_columns": list(DEVICE_COLUMNS),
            "process_columns": list(PROCESS_COLUMNS),
        }
        # A line break first: a predecessor may have been killed in the middle of a line.
        os.write(self._file, b"\n")
        self._write(header)
        for problem in problems:
            self._write({"problem": problem})

    def sample(self) -> None:
        """Take one sample and append it. Raises OSError when it cannot be written."""
        now = time.time_ns()
        host = self._host.sample() if self._host else []
        processes = self._sample_processes() if self._tasks else []
        devices = self._devices.sample() if self._devices else []
        self._write([now, host, devices, processes])

    def _sample_processes(self) -> list[list[int | None]]:
        assert self._tasks is not None
        for rank, pid in self._ranks.newly_found():
            self._meet(self._tasks.rank(pid, rank))
        ranks = [task for task in self._members.values() if task.kind == RANK]
        workers = {worker.pid: worker for rank in ranks for worker in self._tasks.workers(rank)}
        for pid, worker in workers.items():
            # Not at first sight: any child looks like its parent before it has become another program.
            if pid in self._seen and pid not in self._members and self._tasks.sample(pid) is not None:
                self._meet(worker)
        self._seen = set(workers)
        rows: list[list[int | None]] = []
        for pid in list(self._members):
            values = self._tasks.sample(pid)
            if values is None:
                del self._members[pid]
            else:
                rows.append([pid, *values])
        return rows

    def _meet(self, task: Task) -> None:
        self._members[task.pid] = task
        self._write({"process": task.pid, "rank": task.rank, "kind": task.kind, "cores": task.cores})

    def _write(self, value: object) -> None:
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        if os.write(self._file, line) != len(line):
            raise OSError("the disk is full")


class LocalRanks:
    """Finds the processes of this host's ranks by their claims, once each."""

    def __init__(self, options: SamplerOptions) -> None:
        self._folder = Path(options.folder)
        self._missing = options.local_world_size
        first = options.rank - options.local_rank
        self._likely = set(range(max(first, 0), min(first + options.local_world_size, options.world_size)))
        self._others = set(range(options.world_size)) - self._likely
        self._host = socket.gethostname()
        self._until = time.monotonic() + PATIENCE_S
        self._pause_s = 5.0
        self._next_look = time.monotonic()
        self._dealt = False

    def newly_found(self) -> list[tuple[int, int]]:
        """(rank, pid) of ranks that have come to light since the last call."""
        if not self._missing or time.monotonic() > self._until:
            return []
        here = self._look(self._likely)
        if self._missing and self._dealt and time.monotonic() >= self._next_look:
            here += self._look(self._others)
            # Ever more seldom: there may be thousands, on a file system that all hosts share.
            self._pause_s *= 2
            self._next_look = time.monotonic() + self._pause_s
        return here

    def _look(self, ranks: set[int]) -> list[tuple[int, int]]:
        here = []
        for rank in sorted(ranks):
            claim = holder_of_rank(self._folder, rank)
            if claim is not None:
                ranks.discard(rank)
                if claim.host == self._host and claim.alive():
                    here.append((rank, claim.pid))
                    self._missing -= 1
                else:
                    self._dealt = True  # launchers may deal ranks out to hosts in turn
        return here


class Clock:
    """Waits from one sample to the next; samples become rarer the longer a job runs.

    ``words`` is the file descriptor on which the parent's words come, standard input.
    """

    def __init__(self, period_s: float, parent: int, words: int = 0) -> None:
        self._words = words
        self._full = self._period = period_s
        self._parent = parent
        self._left = FULL_RATE
        self._next = time.monotonic()

    def wait(self) -> bool:
        """Wait until the next sample is due; False when the sampler is to end."""
        self._left -= 1
        if not self._left:
            self._period, self._left = 2 * self._period, FULL_RATE
        self._next = max(self._next + self._period, time.monotonic())
        while True:
            if os.getppid() != self._parent:
                return False
            left = self._next - time.monotonic()
            # Words come first: a sampler that is late, as where a sample takes longer than the period, heeds them too.
            if select.select([self._words], [], [], max(min(left, ALIVE_S), 0.0))[0]:
                word = os.read(self._words, 64)
                if not word or QUIT in word:
                    return False
                self._period, self._left, self._next = self._full, FULL_RATE, time.monotonic()
                return True
            if left <= 0:
                return True


def main(options: str) -> None:
    """Sample until the parent asks to stop, or ends."""
    # Without close-on-exec, sockets of the training's libraries would outlive the training here.
    os.closerange(3, min(os.sysconf("SC_OPEN_MAX"), _LAST_FILE))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the training decides what an interrupt means
    with suppress(OSError):
        os.nice(NICENESS)
    wanted = SamplerOptions.from_json(options)
    problems: list[str] = []
    host = _source(problems, "the host", ProcHost if _HAS_PROC else PsutilHost)
    tasks = _source(problems, "the job's processes", ProcTasks if _HAS_PROC else PsutilTasks)
    devices = _source(problems, "the devices", _devices)
    clock = Clock(wanted.period_s, wanted.parent)
    with suppress(OSError):  # the disk is full or the folder gone: there is nothing left to do
        sampler = Sampler(wanted, host, tasks, devices)
        sampler.begin(problems)
        sampler.sample()
        while clock.wait():
            sampler.sample()
        sampler.sample()


def _source(problems: list[str], what: str, make: Callable[[], Any]) -> Any:
    """A source, or None and a problem."""
    try:
        return make()
    except Exception as error:
        problems.append(f"{what} cannot be sampled: {error}")
        return None


def _devices() -> Nvml | None:
    try:
        return Nvml()
    except (ImportError, RuntimeError) as error:
        if not list(Path("/proc/driver").glob("nvidia")):
            return None  # nothing is missing
        hint = "install nvidia-ml-py in the training environment (pip install nvidia-ml-py)"
        raise RuntimeError(hint if isinstance(error, ImportError) else error) from None
