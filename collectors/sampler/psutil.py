"""A host and the job's processes by way of ``psutil``, where there is no ``/proc``: the interface of ``ProcHost`` and
``ProcTasks``. What psutil does not report (runnable threads, pressure, quotas, RDMA) stays unknown.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from perfscope.collectors.sampler.tasks import SPAWNED, WORKER_NAME, Task
from perfscope.recording.samples import HOST_COLUMNS, LOADER, PROCESS_COLUMNS, RANK


class PsutilHost:
    """The host. Raises ImportError where psutil is not installed."""

    def __init__(self) -> None:
        self._psutil: Any = importlib.import_module("psutil")

    def describe(self) -> dict[str, Any]:
        """What does not change while a job runs."""
        return {
            "cores": self._psutil.cpu_count(),
            "cores_physical": self._psutil.cpu_count(logical=False),
            "cores_quota": None,
            "memory_bytes": self._psutil.virtual_memory().total,
            "swap_bytes": self._psutil.swap_memory().total,
        }

    def sample(self) -> list[int | None]:
        """One value for each of ``HOST_COLUMNS``; None where psutil does not report it."""
        times = self._psutil.cpu_times()
        memory = self._psutil.virtual_memory()
        swap = self._psutil.swap_memory()
        disk = self._psutil.disk_io_counters()
        links = self._psutil.net_io_counters(pernic=True)
        outside = [link for name, link in links.items() if not name.startswith("lo")]
        values = {
            "user_ms": round((times.user + getattr(times, "nice", 0.0)) * 1000),
            "system_ms": round((times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)) * 1000),
            "idle_ms": round(times.idle * 1000),
            "iowait_ms": round(times.iowait * 1000) if hasattr(times, "iowait") else None,
            "steal_ms": round(times.steal * 1000) if hasattr(times, "steal") else None,
            "memory_used_bytes": memory.total - memory.available,
            "swap_used_bytes": swap.used,
            "swapped_bytes": swap.sin + swap.sout,
            "disk_read_bytes": disk.read_bytes if disk else None,
            "disk_written_bytes": disk.write_bytes if disk else None,
            "network_received_bytes": sum(link.bytes_recv for link in outside),
            "network_sent_bytes": sum(link.bytes_sent for link in outside),
            "loopback_bytes": sum(link.bytes_recv for name, link in links.items() if name.startswith("lo")),
        }
        return [values.get(name) for name in HOST_COLUMNS]


class PsutilTasks:
    """The job's processes. Raises ImportError where psutil is not installed."""

    def __init__(self) -> None:
        self._psutil: Any = importlib.import_module("psutil")

    def rank(self, pid: int, rank: int) -> Task:
        """The process of a rank."""
        return Task(pid, rank, RANK, self._cores(pid))

    def workers(self, rank: Task) -> list[Task]:
        """The data loader workers that a rank has now, found as ``ProcTasks`` does."""
        try:
            own = self._psutil.Process(rank.pid).cmdline()
            children = self._psutil.Process(rank.pid).children(recursive=True)
            lines = {child.pid: (child.name(), child.cmdline()) for child in children}
        except self._psutil.Error:
            return []
        named = [pid for pid, (name, _) in lines.items() if name == WORKER_NAME] or [
            pid for pid, (_, line) in lines.items() if line and (line == own or SPAWNED in " ".join(line))
        ]
        return [Task(pid, rank.rank, LOADER, self._cores(pid)) for pid in named]

    def sample(self, pid: int) -> list[int | None] | None:
        """One value for each of ``PROCESS_COLUMNS``; None when the process has gone."""
        try:
            process = self._psutil.Process(pid)
            if process.status() == self._psutil.STATUS_ZOMBIE:
                return None
            times = process.cpu_times()
            values = {
                "cpu_ms": round((times.user + times.system) * 1000),
                "threads": process.num_threads(),
                "resident_bytes": process.memory_info().rss,
            }
        except self._psutil.Error:
            return None
        return [values.get(name) for name in PROCESS_COLUMNS]

    def _cores(self, pid: int) -> str:
        if sys.platform == "darwin":
            return ""  # processes are not bound to cores there
        try:
            return ",".join(map(str, self._psutil.Process(pid).cpu_affinity()))
        except (self._psutil.Error, AttributeError):
            return ""
