"""Why an allocation failed, from what the allocator and the driver had at that moment."""

from __future__ import annotations

from typing import Final, Literal

from perfscope.analyzers.snapshots.holders import Allocations, failed, of_site
from perfscope.results.memory.snapshots import OutOfMemoryRow

LARGE: Final = 0.5
"""Share of the device from which a single request is too large by itself."""
IDLE: Final = 0.05
"""Share of what the allocator holds that must be idle for its pieces to be the cause: some is always."""
_Cause = Literal["fragmentation", "full", "others", "request"]
OTHERS: Final = 0.25
"""Share of the device in use outside of the allocator from which that is the cause."""


def out_of_memory(found: Allocations, rank: int | None, capacity: int | None) -> OutOfMemoryRow | None:
    """The last allocation that failed; None where none did. ``capacity`` is the device's memory where it is known."""
    at = next(reversed(failed(found)), None)
    if at is None:
        return None
    device = found.device
    requested, free = int(device.size[at]), int(device.address[at])
    allocated, reserved = found.lives.allocated_after(at), int(found.reserved[at])
    site = found.of_stack[int(device.stack[at])]
    return OutOfMemoryRow(
        rank=rank,
        device=device.device,
        requested_bytes=requested,
        device_free_bytes=free,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        cause=_cause(requested, free, reserved - allocated, reserved, capacity),
        **of_site(site),
    )


def _cause(requested: int, free: int, idle: int, reserved: int, capacity: int | None) -> _Cause:
    """``idle``: what the allocator held without using it. What the driver has free serves a request, too."""
    size = capacity or reserved + free
    if requested > LARGE * size:
        return "request"
    if idle + free >= requested and idle >= IDLE * reserved:
        return "fragmentation"
    if capacity is not None and capacity - free - reserved >= OTHERS * capacity:
        return "others"
    return "full"
