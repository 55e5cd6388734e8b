"""Memory of the ranks side by side: peaks, fragmentation, headroom, and the curve over the used steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.lanes import chosen_ranks
from perfscope.analyzers.rank.memory import cut
from perfscope.analyzers.rank.partial import MemoryUse, RankPartial
from perfscope.recording.metadata import DeviceMetadata, RunMetadata
from perfscope.results.rows import MemoryRow
from perfscope.results.tables import MemoryTimeline
from perfscope.trace.trace import NONE, Int64

MAX_RANKS: Final = 32
"""Ranks whose curves are in the summary."""

DEVICE: Final = "device"
HOST: Final = "host"


def memory_rows(result: AlignedJob, runs: Mapping[int, RunMetadata]) -> tuple[MemoryRow, ...]:
    """A row for each rank with any known value: from the run's metadata, else from the trace."""
    rows = []
    for rank, partial in sorted(result.partials.items()):
        row = _row(rank, partial, runs[rank].device if rank in runs else DeviceMetadata())
        if (row.peak_bytes, row.allocated_peak_bytes, row.capacity_bytes) != (None, None, None):
            rows.append(row)
    return tuple(rows)


def memory_timelines(result: AlignedJob) -> tuple[MemoryTimeline, ...]:
    """Each memory over the used steps; of many ranks, the fullest and an even choice, ``MAX_RANKS`` at most."""
    recorded = {rank: partial.memory for rank, partial in result.partials.items() if partial.memory}
    if not recorded:
        return ()
    fullest = sorted(recorded, key=lambda rank: (-max(use.peak for use in recorded[rank]), rank))
    clocks = result.clocks
    aligned = {rank: bool(clocks.aligned[np.searchsorted(clocks.ranks, rank)]) for rank in recorded}
    starts = {rank: _window(result, rank)[0] for rank in recorded}
    zero = min((starts[rank] + clocks.offset_of(rank) for rank in recorded if aligned[rank]), default=0)
    timelines = []
    for rank in chosen_ranks(sorted(recorded), fullest[: MAX_RANKS // 4], MAX_RANKS):
        # A clock that is not aligned does not show when the others begin.
        shift = clocks.offset_of(rank) - zero if aligned[rank] else -starts[rank]
        timelines += [_timeline(rank, use, *_window(result, rank), shift) for use in recorded[rank]]
    return tuple(timeline for timeline in timelines if timeline.time_us)


def _row(rank: int, partial: RankPartial, device: DeviceMetadata) -> MemoryRow:
    use = max(partial.memory, key=lambda use: use.peak, default=None)
    on_host = use is not None and use.device == NONE
    listed = {entry.index: entry.memory_bytes for entry in partial.devices}
    capacity, peak, allocated = device.capacity_bytes, device.peak_bytes, device.allocated_peak_bytes
    fragmentation = _fragmentation(allocated, peak)
    if use is not None and not on_host:
        capacity = listed.get(use.device) if capacity is None else capacity
        peak = use.peak if peak is None else peak
    elif capacity is None:
        capacity = next(iter(listed.values()), None)
    if use is not None:
        allocated = use.peak_allocated if allocated is None else allocated
        at_peak = _fragmentation(use.allocated_at_peak, use.peak_reserved)
        fragmentation = at_peak if at_peak is not None else fragmentation
    return MemoryRow(
        rank=rank,
        peak_bytes=peak,
        capacity_bytes=capacity,
        allocated_peak_bytes=allocated,
        fragmentation=fragmentation,
        headroom_bytes=capacity - peak if capacity is not None and peak is not None else None,
        allocation_retries=device.allocation_retries,
        kind=HOST if on_host else DEVICE,
    )


def _fragmentation(allocated: int | None, reserved: int | None) -> float | None:
    """Share of the reserved memory that held no tensor when most was reserved."""
    return 1 - allocated / reserved if allocated is not None and reserved else None


def _window(result: AlignedJob, rank: int) -> tuple[int, int]:
    """The host's start of the first used step and end of the last: it allocates, ahead of the device."""
    steps = result.partials[rank].steps
    used = steps.indices_of(result.steps)
    return int(steps.host_start_ns[used[0]]), int(steps.host_end_ns[used[-1]])


def _timeline(rank: int, use: MemoryUse, start_ns: int, end_ns: int, shift_ns: int) -> MemoryTimeline:
    time_ns, (allocated, reserved) = cut(use.time_ns, (use.allocated, use.reserved), start_ns, end_ns)
    return MemoryTimeline(
        rank=rank,
        device=use.device,
        time_us=tuple(((time_ns + shift_ns) / 1e3).tolist()),
        allocated_bytes=_bytes(allocated),
        reserved_bytes=_bytes(reserved),
    )


def _bytes(values: Int64) -> tuple[int | None, ...]:
    return tuple(None if value == NONE else value for value in values.tolist())
