"""Allocations of one device from their begin to their end, and the memory that they take after each action.

An allocation ends where it is freed (``free_requested``), as torch counts allocated memory; where those actions were
skipped, at ``free_completed``. What is freed or there at the end without having been allocated in the recorded actions
was there before them. For example, with actions ``alloc A 4``, ``free B 2``, ``alloc C 3`` and blocks A, C and D (5) at
the end: B and D were there before, and the memory is 11, 9 and 12 after the three actions; before them it was 7.
"""

from __future__ import annotations

import numpy as np

from perfscope.analyzers.readers.snapshot import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    DeviceSnapshot,
)
from perfscope.frozen import dataclass
from perfscope.trace.trace import Bool, Int64

BEFORE = -1
"""``begin`` of what was allocated before the first recorded action."""


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """A row for each allocation; ``begin`` and ``end`` number actions, and ``end`` is their count where it lives on."""

    begin: Int64
    end: Int64
    size: Int64
    """Requested bytes."""
    stack: Int64
    label: Int64
    allocated: Int64
    """Bytes of all allocations after each action."""

    def live_after(self, action: int) -> Bool:
        """Which allocations live after an action; ``BEFORE``: before the first."""
        return (self.begin <= action) & (self.end > action)

    @property
    def peak(self) -> int:
        """The action after which most is allocated; ``BEFORE`` where nothing after it is as much as before it."""
        highest = int(self.allocated.argmax()) if len(self.allocated) else BEFORE
        if highest == BEFORE or int(self.allocated[highest]) < self.at_begin:
            return BEFORE
        return highest

    @property
    def at_begin(self) -> int:
        """Bytes of what was allocated before the first action."""
        return int(self.size[self.begin == BEFORE].sum())

    def allocated_after(self, action: int) -> int:
        """Bytes of all allocations after an action."""
        return self.at_begin if action == BEFORE else int(self.allocated[action])


def lifetimes(device: DeviceSnapshot) -> Lifetimes:
    """Follow every allocation of a device."""
    count = len(device.action)
    rows: list[tuple[int, int, int, int, int]] = []
    living: dict[int, int] = {}
    """Address -> the action that allocated what is there."""
    requested: set[int] = set()
    """Addresses whose end has been asked for, and not yet been completed."""
    sizes, stacks, labels = device.size.tolist(), device.stack.tolist(), device.label.tolist()
    for at, (action, address) in enumerate(zip(device.action.tolist(), device.address.tolist(), strict=True)):
        if action == ALLOC:
            # Still there: its end was not recorded.
            _end(rows, living.pop(address, None), at, sizes, stacks, labels)
            living[address] = at
        elif action == FREE_REQUESTED or (action == FREE_COMPLETED and address not in requested):
            begun = living.pop(address, None)
            if begun is not None:
                _end(rows, begun, at, sizes, stacks, labels)
            else:
                rows.append((BEFORE, at, sizes[at], 0, 0))
        if action == FREE_REQUESTED:
            requested.add(address)
        elif action == FREE_COMPLETED:
            requested.discard(address)
    for begun in living.values():
        _end(rows, begun, count, sizes, stacks, labels)
    rows += [
        (BEFORE, count, block.requested, block.stack, 0)
        for block in device.blocks
        if block.state == "allocated" and block.address not in living
    ]
    begin, end, size, stack, label = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return Lifetimes(begin, end, size, stack, label, _allocated(begin, end, size, count))


def reserved_after(device: DeviceSnapshot) -> Int64:
    """Bytes that the allocator held after each action: from what it holds at the end, backwards."""
    change = np.zeros(len(device.action), dtype=np.int64)
    for action, sign in ((SEGMENT_ALLOC, 1), (SEGMENT_FREE, -1)):
        these = device.action == action
        change[these] = sign * device.size[these]
    total = sum(segment.size for segment in device.segments)
    reserved: Int64 = total - (change.sum() - np.cumsum(change))
    return reserved


def _end(
    rows: list[tuple[int, int, int, int, int]],
    begun: int | None,
    at: int,
    sizes: list[int],
    stacks: list[int],
    labels: list[int],
) -> None:
    if begun is not None:
        rows.append((begun, at, sizes[begun], stacks[begun], labels[begun]))


def _allocated(begin: Int64, end: Int64, size: Int64, count: int) -> Int64:
    change = np.zeros(count + 2, dtype=np.int64)
    np.add.at(change, begin + 1, size)
    np.add.at(change, end + 1, -size)
    return np.cumsum(change)[1 : count + 1]
