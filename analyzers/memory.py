"""Memory of the ranks side by side: peaks, fragmentation, headroom, and its course over the used steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.rank import RankPartial
from perfscope.analyzers.rank_memory import MemoryUse, cut
from perfscope.metadata import DeviceRecord, RunMetadata
from perfscope.summary import MemoryRow
from perfscope.summary_tables import MemoryStrip
from perfscope.trace import NONE, Int64

MAX_RANKS: Final = 32
"""Ranks whose course the summary keeps."""

DEVICE: Final = "device"
HOST: Final = "host"


def memory_rows(result: Comparison, runs: Mapping[int, RunMetadata]) -> tuple[MemoryRow, ...]:
    """A row for each rank of which anything is known: what its run recorded first, then what its trace tells."""
    rows = []
    for rank, partial in sorted(result.partials.items()):
        row = _row(rank, partial, runs[rank].device if rank in runs else DeviceRecord())
        if (row.peak_bytes, row.allocated_peak_bytes, row.capacity_bytes) != (None, None, None):
            rows.append(row)
    return tuple(rows)


def memory_strips(result: Comparison) -> tuple[MemoryStrip, ...]:
    """The course of each memory over the used steps; of ``MAX_RANKS`` ranks, the fullest and an even choice."""
    told = {rank: partial.memory for rank, partial in result.partials.items() if partial.memory}
    if not told:
        return ()
    peaks = {rank: max(use.peak for use in uses) for rank, uses in told.items()}
    clocks = result.clocks
    aligned = {rank: bool(clocks.aligned[np.searchsorted(clocks.ranks, rank)]) for rank in told}
    starts = {rank: _window(result, rank)[0] for rank in told}
    zero = min((starts[rank] + clocks.offset_of(rank) for rank in told if aligned[rank]), default=0)
    strips = []
    for rank in _chosen(peaks):
        # A clock of its own says nothing about the others' beginning.
        shift = clocks.offset_of(rank) - zero if aligned[rank] else -starts[rank]
        strips += [_strip(rank, use, *_window(result, rank), shift) for use in told[rank]]
    return tuple(strip for strip in strips if strip.time_us)


def _row(rank: int, partial: RankPartial, device: DeviceRecord) -> MemoryRow:
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
        told = _fragmentation(use.allocated_at_peak, use.peak_reserved)
        fragmentation = told if told is not None else fragmentation
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
    """Share of what the allocator held that it had no tensor in, even when it was fullest."""
    return 1 - allocated / reserved if allocated is not None and reserved else None


def _window(result: Comparison, rank: int) -> tuple[int, int]:
    """The host's start of the first used step and end of the last: it allocates, ahead of the device."""
    steps = result.partials[rank].steps
    used = steps.indices_of(result.steps)
    return int(steps.host_start_ns[used[0]]), int(steps.host_end_ns[used[-1]])


def _chosen(peaks: Mapping[int, int]) -> list[int]:
    """All ranks, or the fullest quarter of ``MAX_RANKS`` and an even choice of the others."""
    ranks = sorted(peaks)
    if len(ranks) <= MAX_RANKS:
        return ranks
    fullest = sorted(ranks, key=lambda rank: -peaks[rank])[: MAX_RANKS // 4]
    others = [rank for rank in ranks if rank not in fullest]
    even = np.linspace(0, len(others) - 1, MAX_RANKS - len(fullest)).round().astype(int)
    return sorted([*fullest, *(others[at] for at in even)])


def _strip(rank: int, use: MemoryUse, start_ns: int, end_ns: int, shift_ns: int) -> MemoryStrip:
    time_ns, (allocated, reserved) = cut(use.time_ns, (use.allocated, use.reserved), start_ns, end_ns)
    return MemoryStrip(
        rank=rank,
        device=use.device,
        time_us=tuple(((time_ns + shift_ns) / 1e3).tolist()),
        allocated_bytes=_bytes(allocated),
        reserved_bytes=_bytes(reserved),
    )


def _bytes(values: Int64) -> tuple[int | None, ...]:
    return tuple(None if value == NONE else value for value in values.tolist())
