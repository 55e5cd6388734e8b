"""The worker processes of a data loader, as the training process sees them: CPU time, batches fetched."""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from perfscope.collectors import cpu
from perfscope.collectors.phases.fetching import COUNT, NAME


class Worked(NamedTuple):
    """What workers did between two looks."""

    cpu_ns: int
    """CPU time of their processes."""
    batches: int
    """Batches that they fetched; 0 also where that is not known."""
    fetch_ns: int
    """Wall time that these took."""


class Workers:
    """The worker processes of one iterator, as the training process sees them."""

    def __init__(self, pids: tuple[int, ...]) -> None:
        self.pids = pids
        self._cpu_ns: int | None = None
        self._counts: dict[int, mmap.mmap] = {}
        self._fetched = (0, 0)

    def look(self) -> Worked | None:
        """What they did since the last look; None at the first, and where one has ended or cannot be asked."""
        used, before = cpu.of_processes(self.pids), self._cpu_ns
        known, last = len(self._counts), self._fetched
        self._cpu_ns = used
        self._find()
        counts = [COUNT.unpack_from(count) for count in self._counts.values()]
        self._fetched = sum(count[0] for count in counts), sum(count[1] for count in counts)
        if used is None or before is None:
            return None
        # What one did before it was found is not to count.
        batches, fetch_ns = (self._fetched[0] - last[0], self._fetched[1] - last[1]) if known == len(counts) else (0, 0)
        return Worked(used - before, batches, fetch_ns)

    def _find(self) -> None:
        """Open the counts of those that have begun to count since."""
        for pid in self.pids if len(self._counts) < len(self.pids) else ():
            if pid not in self._counts and (path := _count_of(pid)) is not None:
                with suppress(OSError, ValueError), path.open("rb") as file:
                    self._counts[pid] = mmap.mmap(file.fileno(), mmap.PAGESIZE, access=mmap.ACCESS_READ)


def _count_of(pid: int) -> Path | None:
    """The memory in which a worker counts; None where it does not, or that is not to be seen."""
    name = f"/memfd:{NAME.format(pid=pid)} (deleted)"
    with suppress(OSError):
        return next((path for path in Path(f"/proc/{pid}/fd").iterdir() if _name(path) == name), None)
    return None


def _name(open_file: Path) -> str:
    """Of what a process has open; empty where it is closed meanwhile."""
    with suppress(OSError):
        return str(open_file.readlink())
    return ""
