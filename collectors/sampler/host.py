"""A Linux host's counters, read from ``/proc`` and ``/sys``: no package needed, and a fraction of a millisecond a time.

Formats: proc(5), ``Documentation/accounting/psi.rst`` and ``Documentation/admin-guide/cgroup-v2.rst`` of the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from perfscope.recording.samples import HOST_COLUMNS

SECTOR: Final = 512
"""Bytes: the unit of ``/proc/diskstats``, whatever the disk's own sectors are."""
RDMA_WORD: Final = 4
"""Bytes: the unit of InfiniBand's ``port_…_data`` counters (IBTA: 32-bit words)."""

_ROOT: Final = Path("/")
_TICKS_MS: Final = 1000 / os.sysconf("SC_CLK_TCK")

Values = dict[str, int]


class ProcHost:
    """The host, or as much of it as a container lets one see. ``root`` is where ``proc`` and ``sys`` are."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._group = _cpu_group(root)
        self._disks = _disks(root)
        self._links = _links(root)
        self._ports = sorted(root.glob("sys/class/infiniband/*/ports/*/counters"))
        self._parts: list[Callable[[], Values]] = [
            self._cpu, self._pressure, self._quota, self._memory, self._swapping, self._shm, self._disk, self._network,
            self._rdma,
        ]  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """What does not change while a job runs."""
        memory = self._meminfo()
        return {
            "cores": os.cpu_count(),
            "cores_physical": _physical_cores(self._root),
            "cores_quota": cores_quota(self._root),
            "memory_bytes": memory.get("MemTotal"),
            "swap_bytes": memory.get("SwapTotal"),
        }

    def sample(self) -> list[int | None]:
        """One value for each of ``HOST_COLUMNS``; None where this system does not report it."""
        values: Values = {}
        for part in list(self._parts):
            try:
                values.update(part())
            except (OSError, ValueError, IndexError, KeyError):
                self._parts.remove(part)  # not on this kernel: not asked again
        return [values.get(name) for name in HOST_COLUMNS]

    def _cpu(self) -> Values:
        values: Values = {}
        for line in self._lines("proc/stat"):
            name, _, rest = line.partition(" ")
            if name == "cpu":
                user, nice, system, idle, iowait, irq, softirq, steal = (int(word) for word in rest.split()[:8])
                ticks = {
                    "user_ms": user + nice,
                    "system_ms": system + irq + softirq,
                    "idle_ms": idle,
                    "iowait_ms": iowait,
                    "steal_ms": steal,
                }
                values.update({column: round(count * _TICKS_MS) for column, count in ticks.items()})
            elif name == "procs_running":
                values["runnable"] = max(int(rest) - 1, 0)
            elif name == "procs_blocked":
                values["blocked"] = int(rest)
        return values

    def _pressure(self) -> Values:
        return {
            f"{name}_pressure_us": int(_read(self._root / "proc/pressure" / name).split()[4].partition("=")[2])
            for name in ("cpu", "io", "memory")
        }

    def _quota(self) -> Values:
        if self._group is None:
            raise FileNotFoundError
        counts = dict(line.split() for line in _read(self._group / "cpu.stat").splitlines())
        if "throttled_usec" in counts:
            return {"throttled_us": int(counts["throttled_usec"])}
        return {"throttled_us": int(counts["throttled_time"]) // 1000}  # version 1 counts ns

    def _memory(self) -> Values:
        memory = self._meminfo()
        return {
            "memory_used_bytes": memory["MemTotal"] - memory["MemAvailable"],
            "swap_used_bytes": memory["SwapTotal"] - memory["SwapFree"],
        }

    def _swapping(self) -> Values:
        counts = dict(line.split() for line in self._lines("proc/vmstat") if line.startswith("pswp"))
        return {"swapped_bytes": (int(counts["pswpin"]) + int(counts["pswpout"])) * os.sysconf("SC_PAGE_SIZE")}

    def _shm(self) -> Values:
        place = os.statvfs(self._root / "dev/shm")
        return {"shm_used_bytes": (place.f_blocks - place.f_bfree) * place.f_frsize}

    def _disk(self) -> Values:
        rows = [line.split() for line in self._lines("proc/diskstats")]
        mine = [row for row in rows if row[2] in self._disks]
        return {
            "disk_read_bytes": sum(int(row[5]) for row in mine) * SECTOR,
            "disk_written_bytes": sum(int(row[9]) for row in mine) * SECTOR,
        }

    def _network(self) -> Values:
        received = sent = loopback = 0
        for line in self._lines("proc/net/dev")[2:]:
            name, _, rest = line.partition(":")
            counts = rest.split()
            if name.strip() == "lo":
                loopback = int(counts[0])
            elif name.strip() in self._links:
                received, sent = received + int(counts[0]), sent + int(counts[8])
        return {"network_received_bytes": received, "network_sent_bytes": sent, "loopback_bytes": loopback}

    def _rdma(self) -> Values:
        if not self._ports:
            raise FileNotFoundError
        return {
            column: sum(int(_read(port / name)) for port in self._ports) * RDMA_WORD
            for column, name in (("rdma_received_bytes", "port_rcv_data"), ("rdma_sent_bytes", "port_xmit_data"))
        }

    def _meminfo(self) -> Values:
        values = {}
        for line in self._lines("proc/meminfo"):
            name, _, rest = line.partition(":")
            values[name] = int(rest.split()[0]) * (1024 if rest.endswith("kB") else 1)
        return values

    def _lines(self, name: str) -> list[str]:
        return _read(self._root / name).splitlines()


def _disks(root: Path) -> set[str]:
    """Whole disks: not their partitions, which count the same bytes again, nor what is made of other disks."""
    names = [path.name for path in sorted(root.glob("sys/block/*"))]
    return {name for name in names if not name.startswith(("loop", "ram", "zram", "dm-", "md"))}


def _links(root: Path) -> set[str]:
    """Interfaces with hardware below them (bridges and bonds count the same bytes again); in a container, all."""
    entries = [path for path in sorted(root.glob("sys/class/net/*")) if path.name != "lo"]
    return {path.name for path in entries if (path / "device").exists()} or {path.name for path in entries}


def _cpu_group(root: Path) -> Path | None:
    """The folder of the control group that limits this process's CPU time; None where none counts it."""
    for group in _cpu_groups(root):
        if (group / "cpu.stat").exists():
            return group
    return None


def _cpu_groups(root: Path) -> Iterator[Path]:
    """Candidates: the process's own group, and the top one, as which a container often sees its own."""
    try:
        lines = _read(root / "proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers
            yield top / inside.lstrip("/")
            yield top


def cores_quota(root: Path = _ROOT) -> float | None:
    """Cores' worth of time that this process's control group may use; None without a limit."""
    group = _cpu_group(root)
    if group is None:
        return None
    try:
        if (group / "cpu.max").exists():
            quota, period = _read(group / "cpu.max").split()
        else:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        return None


def _physical_cores(root: Path) -> int | None:
    """Cores, hyper-threads of one core counted once."""
    lists = root.glob("sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list")
    return len(set(map(_read, lists))) or None


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace").strip()
