"""The job's processes on a Linux host: its ranks and their data loader workers, what each uses of the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perfscope.recording.samples import LOADER, PROCESS_COLUMNS, RANK

_ROOT: Final = Path("/")
_TICKS_MS: Final = 1000 / os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

WORKER_NAME: Final = "pt_data_worker"
"""What a data loader's worker calls itself (torch ``utils/data/_utils/worker.py``, from 2.6 on)."""

SPAWNED: Final = "multiprocessing.spawn"
"""In the command line of a worker that was not forked (``multiprocessing/spawn.py``)."""


@dataclass(frozen=True)
class Task:
    """A process of the job."""

    pid: int
    rank: int
    kind: str
    cores: str
    """Those it may run on, as the kernel lists them: ``0-3,8``; empty where not known."""


class ProcTasks:
    """Processes by way of ``/proc``; ``root`` is where that is."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._proc = root / "proc"

    def rank(self, pid: int, rank: int) -> Task:
        """The process of a rank."""
        return Task(pid, rank, RANK, self._cores(pid))

    def workers(self, rank: Task) -> list[Task]:
        """The data loader workers that a rank has now.

        A worker names itself where torch is new enough. Before that its command line shows it: a forked one has
        its parent's, a spawned one multiprocessing's. Other children (compilers, servers, this sampler) have neither.
        """
        descendants = [pid for pid in self._descendants(rank.pid) if pid != os.getpid()]
        named = [pid for pid in descendants if self._text(pid, "comm").strip() == WORKER_NAME]
        if not named:
            own = self._text(rank.pid, "cmdline")
            lines = {pid: self._text(pid, "cmdline") for pid in descendants}
            named = [pid for pid, line in lines.items() if line and (line == own or SPAWNED in line)]
        return [Task(pid, rank.rank, LOADER, self._cores(pid)) for pid in named]

    def sample(self, pid: int) -> list[int | None] | None:
        """One value for each of ``PROCESS_COLUMNS``; None when the process has gone."""
        # After the name, which may hold spaces: state is field 3 of proc(5), utime 14, stime 15, threads 20, rss 24.
        fields = self._text(pid, "stat").rpartition(")")[2].split()
        if len(fields) < 22 or fields[0] in "ZX":
            return None
        waited = self._text(pid, "schedstat").split()
        values = {
            "cpu_ms": round((int(fields[11]) + int(fields[12])) * _TICKS_MS),
            "threads": int(fields[17]),
            "resident_bytes": int(fields[21]) * _PAGE,
            "waited_ms": int(waited[1]) // 1_000_000 if len(waited) > 1 else None,
        }
        return [values[name] for name in PROCESS_COLUMNS]

    def _descendants(self, pid: int) -> Iterator[int]:
        """Children of the process and theirs. Those of its main thread: loaders are made there."""
        for child in self._text(pid, f"task/{pid}/children").split():
            yield int(child)
            yield from self._descendants(int(child))

    def _cores(self, pid: int) -> str:
        for line in self._text(pid, "status").splitlines():
            if line.startswith("Cpus_allowed_list:"):
                return line.partition(":")[2].strip()
        return ""

    def _text(self, pid: int, name: str) -> str:
        try:
            return (self._proc / str(pid) / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
