"""What a command costs: wall time, CPU time and peak memory of its whole process tree (Linux)."""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SAMPLE_SECONDS = 0.02
_SAMPLING_SHARE = 0.03
"""Of one core: looking through the pages of large processes takes long, and must not slow what is measured."""


@dataclass(frozen=True)
class Cost:
    """What one run took."""

    wall_s: float
    cpu_s: float
    """User and system time of the command and all its descendants."""
    peak_bytes: int
    """Largest sum over the tree of proportional set sizes: pages that processes share count once. Sampled."""


def compiling() -> dict[str, str]:
    """The environment, in which Python keeps what it compiles, as where packages are installed: else each run pays."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Cost:
    """Run a command to its end. Raises RuntimeError with its output where it fails."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**compiling(), **(environment or {})}
    )
    peak = _Peak(process.pid)
    peak.start()
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    peak.stop()
    if process.returncode:
        tail = output.decode(errors="replace")[-2000:]
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{tail}")
    return Cost(wall_s, usage.ru_utime + usage.ru_stime, peak.bytes)


def interleaved(contenders: Mapping[str, Callable[[], Cost]], rounds: int) -> dict[str, list[Cost]]:
    """Run the contenders in turn, ``rounds`` times: what else the machine does meanwhile meets them all alike."""
    costs: dict[str, list[Cost]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            costs[name].append(contender())
    return costs


def median(costs: Sequence[Cost]) -> Cost:
    """Each of the three by itself."""
    return Cost(
        statistics.median(cost.wall_s for cost in costs),
        statistics.median(cost.cpu_s for cost in costs),
        int(statistics.median(cost.peak_bytes for cost in costs)),
    )


class _Peak(threading.Thread):
    """Samples the memory of a process and its descendants."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._root = root
        self._done = threading.Event()

    def run(self) -> None:
        pause = _SAMPLE_SECONDS
        while not self._done.wait(pause):
            started = time.thread_time()
            self.bytes = max(self.bytes, sum(map(_memory_of, _tree(self._root))))
            pause = max(_SAMPLE_SECONDS, (time.thread_time() - started) / _SAMPLING_SHARE)

    def stop(self) -> None:
        """Take no more samples."""
        self._done.set()
        self.join()


def _tree(root: int) -> list[int]:
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children[parent].append(int(entry.name))
    tree = [root]
    for process in tree:  # grows meanwhile
        tree.extend(children[process])
    return tree


def _parent(entry: Path) -> int | None:
    try:
        # The name before it is in parentheses and may hold any character.
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None  # it ended meanwhile


def _memory_of(process: int) -> int:
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:")), 0)
