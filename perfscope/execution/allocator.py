"""What the C library's allocator does with memory that is given back, where it is glibc's.

Numpy's arrays of an analysis are made and given back thousands of times. By default glibc returns them to the system,
which then clears each page of the next ones; and each thread allocates in a part of its own, which only grows.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

# malloc.h
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

_KEPT: Final = 64 << 20
"""Bytes at the end of the heap that stay with the process."""
_MAPPED: Final = 32 << 20
"""Arrays from this size on are mapped by themselves and returned at once: the largest bound that mallopt takes."""


def settle() -> None:
    """Set the allocator of this process and of those forked from it; nothing where it is another one."""
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        for option, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _MAPPED), (_M_TRIM_THRESHOLD, _KEPT)):
            mallopt(option, value)


def give_back() -> None:
    """Return to the system what is free, before another kind of work begins; nothing where it is another allocator."""
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_glibc(name: str) -> Any:
    """A function of glibc's; None where it is another library, or not a system that has one for all."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None
