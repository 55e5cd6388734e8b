"""Takes CUPTI's only seat, as another profiler in the process would."""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from pathlib import Path
from typing import Any

_kept: list[Any] = []
"""What CUPTI has pointers to."""


def subscribe() -> None:
    """Subscribe to CUPTI's callbacks: it takes one subscriber, and torch.profiler would be the second.

    Raises OSError where the library cannot be found or refuses.
    """
    library = ctypes.CDLL(_library())
    handle = ctypes.c_void_p()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
    callback = kind(lambda *_: None)
    status = library.cuptiSubscribe(ctypes.byref(handle), callback, None)
    if status:
        raise OSError(f"cuptiSubscribe returned {status}")
    _kept.extend((library, handle, callback))


def _library() -> str:
    """The CUPTI that torch loads: its wheel's, else the system's."""
    for folder in map(Path, sys.path):
        found = sorted(folder.glob("nvidia/*/lib/libcupti.so.*"))
        if found:
            return str(found[-1])
    named = ctypes.util.find_library("cupti")
    if named is None:
        raise OSError("libcupti is not installed")
    return named
