"""Memory that is given back stays with the process where the allocator is glibc's."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

ARRAYS = """
import resource
import numpy as np
from perfscope.execution import allocator

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(1 << 20)  # 8 MiB: 2048 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

SETTLE
print(faults())
"""

FREED = """
import os
from pathlib import Path
import numpy as np
from perfscope.execution import allocator

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

allocator.settle()
arrays = [np.ones(1 << 14) for _ in range(200)]  # 128 KiB each
last = np.ones(1 << 14)
del arrays
before = resident()
allocator.give_back()
print(before - resident())
"""


def faults(*, settled: bool) -> int:
    """Pages that the system gives a process which makes an array twenty times."""
    code = ARRAYS.replace("SETTLE", "allocator.settle()" if settled else "")
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_an_array_like_one_before_needs_no_new_pages() -> None:
    assert faults(settled=True) < 3 * 2048


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_what_is_free_below_what_is_not_can_be_given_back() -> None:
    freed = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True).stdout
    assert int(freed) > 15 << 20


def test_another_library_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from perfscope.execution import allocator

    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    allocator.settle()
    allocator.give_back()
