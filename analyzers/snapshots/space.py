"""What the allocator holds and nobody uses: rounding, free blocks between others, cached segments, private pools."""

from __future__ import annotations

from perfscope.analyzers.readers.snapshot import DeviceSnapshot, MemoryBlock, Snapshot
from perfscope.analyzers.snapshots.holders import Allocations, failed
from perfscope.grouping import grouped
from perfscope.results.memory.snapshots import SnapshotRow


def device_row(snapshot: Snapshot, found: Allocations, rank: int | None, steps: int) -> SnapshotRow:
    """The state of a device's allocator when the snapshot was taken."""
    device = found.device
    free = {
        segment: [block.size for block in blocks if block.state == "free"] for segment, blocks in _by_segment(device)
    }
    used = {block.segment for block in device.blocks if block.state != "free"}
    allocated = [block for block in device.blocks if block.state == "allocated"]
    private = [segment.size for segment in device.segments if segment.private]
    reserved = sum(segment.size for segment in device.segments)
    peak, reserved_peak = found.lives.allocated_after(found.lives.peak), int(found.reserved.max(initial=reserved))
    is_known = len(device.action) > 0 and not snapshot.of_profile and reserved_peak >= peak > 0
    return SnapshotRow(
        rank=rank,
        device=device.device,
        file=snapshot.path,
        reserved_bytes=reserved,
        allocated_bytes=sum(block.requested for block in allocated),
        peak_bytes=peak,
        rounding_bytes=sum(block.size - block.requested for block in allocated),
        pending_bytes=sum(block.size for block in device.blocks if block.state == "pending"),
        cached_bytes=sum(sum(sizes) for segment, sizes in free.items() if segment not in used),
        split_bytes=sum(sum(sizes) for segment, sizes in free.items() if segment in used),
        largest_free_bytes=max((size for sizes in free.values() for size in sizes), default=0),
        reserved_peak_bytes=reserved_peak,
        fragmentation=1 - peak / reserved_peak if is_known else None,
        private_bytes=sum(private),
        expandable=snapshot.expandable,
        actions=len(device.action),
        steps=steps,
        ooms=len(failed(found)),
    )


def _by_segment(device: DeviceSnapshot) -> list[tuple[int, list[MemoryBlock]]]:
    return list(grouped((block.segment, block) for block in device.blocks).items())
