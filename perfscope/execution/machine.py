"""Cores and memory that this process may use, within the limits of its job or container."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from perfscope.errors import PerfscopeError

MEMORY_VARIABLE: Final = "PERFSCOPE_MEMORY"
"""The most memory that reading traces may take, such as ``16GB``; without it, what is free."""

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_UNITS: Final = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_ROOT: Final = Path("/")
_UNKNOWN_MEMORY: Final = 8 << 30
"""Assumed where the system does not report it."""


def available_cores(root: Path = _ROOT) -> int:
    """Cores this process may run on: its affinity and its control group's CPU quota, at least 1.

    ``root`` is where ``proc`` and ``sys`` are; tests put their own there.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups(root, ""):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def available_memory(root: Path = _ROOT) -> int:
    """Bytes available without swapping, on the machine and within the limits of the control group."""
    free = _machine_memory(root)
    for group in _groups(root, ""):
        free = min(free, _left(group, "memory.max", "memory.current", "inactive_file", free))
    for group in _groups(root, "memory"):
        free = min(free, _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", free))
    return max(free, 0)


def memory_limit() -> int | None:
    """Bytes that reading traces may take, where the user says so. Raises PerfscopeError where that is no size."""
    return size_of(MEMORY_VARIABLE)


def size_of(variable: str) -> int | None:
    """Bytes that an environment variable names, such as ``20GB``; None where it is not set.

    Raises PerfscopeError where it is no size.
    """
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    match = _SIZE.fullmatch(text)
    if match is None:
        raise PerfscopeError(f"{variable}={text}: not a size; write 500MB or 20GB, for example")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def _machine_memory(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return _UNKNOWN_MEMORY


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The process's control group and those above it, each of which may limit it.

    ``controller`` is empty for version 2's one hierarchy. A container often has its own group as the top one.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, inside = line.split(":", 2)
        if controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
            group = top / inside.lstrip("/")
            yield group
            yield from (above for above in group.parents if above == top or top in above.parents)


def _left(group: Path, limit_file: str, used_file: str, reclaimable: str, unlimited: int) -> int:
    limit, used = _read(group / limit_file), _read(group / used_file)
    if not (limit.isdigit() and used.isdigit()):
        return unlimited
    # Cached files count as used, but are freed when memory is short.
    cached = [
        line.split()[1] for line in _read(group / "memory.stat").splitlines() if line.startswith(f"{reclaimable} ")
    ]
    return int(limit) - int(used) + sum(map(int, cached))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
