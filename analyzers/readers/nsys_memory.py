"""What a process held of each device's memory, from a report recorded with ``--cuda-memory-usage=true``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from perfscope.trace import NONE, Int64, MemoryCounter

MEMORY_EVENTS: Final = "CUDA_GPU_MEMORY_USAGE_EVENTS"
COLUMNS: Final = ("start", "deviceId", "bytes", "memKind", "memoryOperationType")

_ON_DEVICE: Final = (2, 3, 5)
"""ENUM_CUDA_MEM_KIND: device, array, static; pageable and pinned are the host's, managed memory is on either side."""
_FREED: Final = 1
"""ENUM_CUDA_DEV_MEM_EVENT_OPER: deallocation."""


def memory_counter(table: Mapping[str, Int64], epoch_ns: int) -> MemoryCounter:
    """The driver's account: what it gave the process, which is what the framework's allocator holds in ``reserved``.

    ``table`` has ``COLUMNS`` of the process's rows. What is freed but was allocated before the recording began must
    have been held until then: the course is raised so that it never falls below zero, and is a lower bound.
    """
    chosen = np.flatnonzero(np.isin(table["memKind"], _ON_DEVICE) & (table["bytes"] > 0))
    chosen = chosen[np.argsort(table["start"][chosen], kind="stable")]
    device = table["deviceId"][chosen]
    change = np.where(table["memoryOperationType"][chosen] == _FREED, -1, 1) * table["bytes"][chosen]
    held = np.empty(len(chosen), dtype=np.int64)
    for one in np.unique(device):
        mine = device == one
        course = np.cumsum(change[mine])
        held[mine] = course - min(int(course.min()), 0)
    return MemoryCounter(table["start"][chosen] + epoch_ns, device, np.full(len(chosen), NONE, dtype=np.int64), held)
