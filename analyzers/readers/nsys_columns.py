"""Collects a trace's columns from the tables of an export: batches in, arrays in time order out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from perfscope.trace.columns import TYPES, InOrder, by_start_longer_first, narrowed, near_in_time, put_in_order
from perfscope.trace.distinct import distinct
from perfscope.trace.trace import NEVER, NONE, Bool, Category, Int8, Int32, Int64, MemoryCounter

MEMORY_EVENTS: Final = "CUDA_GPU_MEMORY_USAGE_EVENTS"
"""Table of reports that were recorded with ``--cuda-memory-usage=true``."""
MEMORY_COLUMNS: Final = ("start", "deviceId", "bytes", "memKind", "memoryOperationType")

_ON_DEVICE: Final = (2, 3, 5)
"""ENUM_CUDA_MEM_KIND: device, array, static; pageable and pinned are the host's, managed memory is on either side."""
_FREED: Final = 1
"""ENUM_CUDA_DEV_MEM_EVENT_OPER: deallocation."""


class NsysColumns:
    """Grows by batches of one table; columns that a table does not have are NONE."""

    def __init__(self) -> None:
        self.strings: InOrder[str] = InOrder()
        self.threads: InOrder[tuple[str, str]] = InOrder()
        """Tracks by (process or device, thread or stream)."""
        self.dropped = 0
        """Rows left out because they end before they start, never end, or have times that cannot be."""
        self._batches: list[tuple[int, dict[str, Any]]] = []
        """(rows, columns; None for those that a table does not have)."""

    def add(
        self,
        category: Category | Int8,
        name: Int32,
        start_ns: Int64,
        end_ns: Int64,
        thread: Int32,
        **more: Int64 | Int32,
    ) -> None:
        """Append rows; those that end before their start, or decades from now, are dropped and counted."""
        kept: Bool = (end_ns >= start_ns) & (start_ns > NEVER) & (end_ns < -NEVER)
        self.dropped += int((~kept).sum())
        every = np.full(len(start_ns), category, dtype=np.int8) if isinstance(category, Category) else category
        values: dict[str, Any] = {
            "category": every, "name": name, "start_ns": start_ns, "duration_ns": end_ns - start_ns, "thread": thread,
            **more,
        }  # fmt: skip
        batch = {
            column: None if values.get(column) is None else values[column][kept].astype(kind)
            for column, kind in TYPES.items()
        }
        self._batches.append((int(kept.sum()), batch))

    def finish(self) -> dict[str, Any]:
        """Every column, by start, and at one start the longer first."""
        # Column by column, each batch's part is released once it is copied: the peak is one column above the sum.
        joined = {column: narrowed(column, self._join(column)) for column in TYPES}
        order = by_start_longer_first(joined["start_ns"], joined["duration_ns"])
        near = near_in_time(joined["start_ns"], joined["duration_ns"])
        self.dropped += int((~near).sum())
        put_in_order(joined, order if near.all() else order[near[order]])
        return joined

    def _join(self, column: str) -> Any:
        whole = np.full(sum(rows for rows, _ in self._batches), NONE, dtype=TYPES[column])
        at = 0
        for rows, batch in self._batches:
            part = batch.pop(column)
            if part is not None:
                whole[at : at + rows] = part
            at += rows
        return whole


def numbered(values: Int64, number_of: Callable[[Any], int]) -> Int32:
    """``number_of`` each value, or each row of values. Works on the distinct ones, of which there are few."""
    distinct, place = np.unique(values, axis=0, return_inverse=True)
    numbers = np.array([number_of(value) for value in distinct.tolist()], dtype=np.int32)
    return numbers[place.reshape(-1)]


def memory_counter(table: Mapping[str, Int64], epoch_ns: int) -> MemoryCounter:
    """The memory that the driver gave the process, over time, as ``reserved``: the framework's allocator holds it.

    ``table`` has ``MEMORY_COLUMNS`` of the process's rows. What is freed but was allocated before the recording began
    was held until then, so the curve is raised until it never falls below zero; it is a lower bound.
    """
    chosen = np.flatnonzero(np.isin(table["memKind"], _ON_DEVICE) & (table["bytes"] > 0))
    chosen = chosen[np.argsort(table["start"][chosen], kind="stable")]
    device = table["deviceId"][chosen]
    change = np.where(table["memoryOperationType"][chosen] == _FREED, -1, 1) * table["bytes"][chosen]
    held = np.empty(len(chosen), dtype=np.int64)
    for one in distinct(device):
        mine = device == one
        course = np.cumsum(change[mine])
        held[mine] = course - min(int(course.min()), 0)
    return MemoryCounter(table["start"][chosen] + epoch_ns, device, np.full(len(chosen), NONE, dtype=np.int64), held)
