"""Memory and cores that a process may use: limits of control groups, of both hierarchies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perfscope.execution.machine import available_cores, available_memory

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8000 MiB available and no limits."""
    write(tmp_path / "proc/meminfo", "MemTotal: 16384000 kB\nMemAvailable: 8192000 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/slurm/job_7\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limit(group: Path, limit_mib: int, used_mib: int, cached_mib: int = 0) -> None:
    write(group / "memory.max", f"{limit_mib * MIB}\n")
    write(group / "memory.current", f"{used_mib * MIB}\n")
    write(group / "memory.stat", f"anon 5\ninactive_file {cached_mib * MIB}\n")


def test_without_limits_it_is_what_the_machine_has(root):
    write(root / "sys/fs/cgroup/slurm/job_7/memory.max", "max\n")
    assert available_memory(root) == 8000 * MIB


def test_the_job_s_limit_less_what_it_uses(root):
    limit(root / "sys/fs/cgroup/slurm/job_7", 4000, 1000, cached_mib=300)
    assert available_memory(root) == 3300 * MIB


def test_limits_above_count_too(root):
    limit(root / "sys/fs/cgroup/slurm/job_7", 4000, 0)
    limit(root / "sys/fs/cgroup/slurm", 5000, 4500)
    assert available_memory(root) == 500 * MIB


def test_the_older_hierarchy(root):
    write(root / "proc/self/cgroup", "9:name=systemd:/\n4:memory:/slurm/job_7\n")
    group = root / "sys/fs/cgroup/memory/slurm/job_7"
    write(group / "memory.limit_in_bytes", str(2000 * MIB))
    write(group / "memory.usage_in_bytes", str(500 * MIB))
    assert available_memory(root) == 1500 * MIB


def test_a_container_that_sees_its_own_group_as_the_top(root):
    limit(root / "sys/fs/cgroup", 600, 100)
    assert available_memory(root) == 500 * MIB


def test_a_limit_overdrawn_is_nothing_not_less(root):
    limit(root / "sys/fs/cgroup", 600, 700)
    assert available_memory(root) == 0


def test_a_system_that_reports_nothing(tmp_path):
    assert available_memory(tmp_path) > 0


def test_cores_by_quota(root):
    assert available_cores(root) >= 1
    write(root / "sys/fs/cgroup/cpu.max", "150000 100000\n")
    assert available_cores(root) == 1
    write(root / "sys/fs/cgroup/cpu.max", "max 100000\n")
    unlimited = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert available_cores(root) == unlimited
