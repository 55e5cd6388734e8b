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


def faults(*, settled: bool) -> int:
    """Pages that the system gives a process which makes an array twenty times."""
    code = ARRAYS.replace("SETTLE", "allocator.settle()" if settled else "")
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
def test_an_array_like_one_before_needs_no_new_pages() -> None:
    assert faults(settled=True) < 3 * 2048


def test_another_library_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from perfscope.execution import allocator

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: object())
    allocator.settle()
