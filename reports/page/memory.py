"""Memory on the page: a row for each rank, and the fullest ranks' curves over the recorded steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from perfscope.reports import tables
from perfscope.reports.page.numbers import rounded
from perfscope.reports.tables import Filled, HtmlTable
from perfscope.results.rows import MemoryRow
from perfscope.results.summary import Summary
from perfscope.results.tables import MemoryTimeline
from perfscope.text import BYTE_UNITS, byte_size, count_per_step, percent, plural, unit_for

SHOWN: Final = 4
"""Curves in one chart; more cannot be told apart."""

_CAPACITY_FROM: Final = 0.3
"""Share of the device's capacity from which the chart reaches up to it; below, the curves would lie flat."""

_NOT_REPORTED: Final = "Not reported by this rank."
_NO_DEVICE: Final = "This is host memory."


def memory_table(rows: Sequence[MemoryRow]) -> HtmlTable | None:
    """Memory of each rank; None where nothing but the devices' capacity is known."""
    if all(row.peak_bytes is None and row.allocated_peak_bytes is None for row in rows):
        return None
    host = all(row.kind == "host" for row in rows)
    columns = [tables.ranks("Rank", [row.rank for row in rows])]
    if any(row.kind == "host" for row in rows):
        columns.append(tables.words("Memory of", [row.kind for row in rows], definition="memory_allocated"))
    if not host:
        columns += _held(rows)
    columns += _where_known(rows)
    return tables.table("memory", "Memory", columns, _table_reading(rows))


def memory_chart(summary: Summary) -> dict[str, Any] | None:
    """The curves in the chart; None where none was recorded."""
    strips = _shown(summary)
    if not strips:
        return None
    time, highest = max(strip.time_us[-1] for strip in strips), max(map(_peak, strips))
    capacity = _capacity(summary, strips)
    if capacity is not None and highest < _CAPACITY_FROM * capacity:
        capacity = None
    unit, size = unit_for(time), unit_for(capacity or highest, BYTE_UNITS)

    def curve(values: Sequence[float | None], by: float) -> list[float | None] | None:
        known_values = [rounded(value / by, 6) if value is not None else None for value in values]
        return known_values if any(value is not None for value in known_values) else None

    return {
        "unit": unit.name,
        "size": size.name,
        "capacity": capacity / size.size if capacity is not None else None,
        "series": [
            {
                "name": _name(strip),
                "time": curve(strip.time_us, unit.size),
                "allocated": curve(strip.allocated_bytes, size.size),
                "reserved": curve(strip.reserved_bytes, size.size),
            }
            for strip in strips
        ],
    }


def memory_reading(summary: Summary) -> str:
    """What the chart shows."""
    strips = _shown(summary)
    if not strips:
        return ""
    recorded = len({strip.rank for strip in summary.memory_timeline})
    some = f"{len(strips)} of {recorded:,} ranks, the fullest among them. " if recorded > len(strips) else ""
    fullest = max(strips, key=_peak)
    allocated, reserved = _known(fullest.allocated_bytes), _known(fullest.reserved_bytes)
    if not allocated:
        return f"{some}On rank {fullest.rank} the process uses {_between(reserved)}."
    reading = f"{some}On rank {fullest.rank} tensors take {_between(allocated)}"
    if fullest.device < 0:
        return f"{reading} of host memory, without what was allocated before the profiler started."
    return f"{reading}; the allocator reserves {byte_size(max(reserved))}." if reserved else f"{reading}."


def _held(rows: Sequence[MemoryRow]) -> list[Filled]:
    """Columns that every device has."""
    used = [
        row.peak_bytes / row.capacity_bytes if row.peak_bytes is not None and row.capacity_bytes else None
        for row in rows
    ]
    reason = _NO_DEVICE if any(row.kind == "host" for row in rows) else _NOT_REPORTED
    return [
        tables.sizes("Reserved peak", [row.peak_bytes for row in rows], definition="memory_peak", reason=reason),
        tables.sizes("Capacity", [row.capacity_bytes for row in rows], reason=reason),
        tables.column("of capacity", used, percent, definition="memory_peak", reason=_NOT_REPORTED),
    ]


def _where_known(rows: Sequence[MemoryRow]) -> list[Filled]:
    """Columns that not every recording has; each only where some rank knows it."""

    def column(
        label: str, values: Sequence[float | None], definition: str, write: Callable[[float], str] | None = None
    ) -> list[Filled]:
        if all(value is None for value in values):
            return []
        if write is None:
            return [tables.sizes(label, values, definition=definition, reason=_NOT_REPORTED)]
        return [tables.column(label, values, write, definition=definition, reason=_NOT_REPORTED)]

    return [
        *column("Headroom", [row.headroom_bytes for row in rows], "headroom"),
        *column("Allocated peak", [row.allocated_peak_bytes for row in rows], "memory_allocated"),
        *column("Fragmentation", [row.fragmentation for row in rows], "fragmentation", percent),
        *column("Allocation retries", [row.allocation_retries for row in rows], "allocation_retries", count_per_step),
    ]


def _table_reading(rows: Sequence[MemoryRow]) -> str:
    shares = [
        (row.peak_bytes / row.capacity_bytes, row.rank)
        for row in rows
        if row.peak_bytes is not None and row.capacity_bytes
    ]
    reading = [f"Rank {max(shares)[1]} is the fullest: {percent(max(shares)[0])} of its capacity."] if shares else []
    retried = [row for row in rows if row.allocation_retries]
    if retried:
        most = max(retried, key=lambda row: row.allocation_retries or 0)
        reading.append(
            f"Rank {most.rank} ran out of memory and emptied the allocator's cache "
            f"{plural(most.allocation_retries or 0, 'time')}; each time it waited for the device."
        )
    if rows and all(row.kind == "host" for row in rows):
        reading.append("Host memory: these ranks have no device.")
    return " ".join(reading)


def _shown(summary: Summary) -> tuple[MemoryTimeline, ...]:
    """The curve of each rank's fullest memory; of many ranks the fullest, the emptiest and an even selection."""
    fullest: dict[int, MemoryTimeline] = {}
    for strip in summary.memory_timeline:
        if _peak(strip) > (_peak(fullest[strip.rank]) if strip.rank in fullest else 0):
            fullest[strip.rank] = strip
    ordered = sorted(fullest.values(), key=lambda strip: (-_peak(strip), strip.rank))
    if len(ordered) > SHOWN:
        ordered = [ordered[number * (len(ordered) - 1) // (SHOWN - 1)] for number in range(SHOWN)]
    return tuple(sorted(ordered, key=lambda strip: strip.rank))


def _known(values: Sequence[int | None]) -> list[int]:
    return [value for value in values if value is not None]


def _peak(strip: MemoryTimeline) -> int:
    return max(_known((*strip.allocated_bytes, *strip.reserved_bytes)), default=0)


def _between(values: Sequence[int]) -> str:
    low, high = byte_size(min(values)), byte_size(max(values))
    return low if low == high else f"{low} to {high}"


def _capacity(summary: Summary, strips: Sequence[MemoryTimeline]) -> int | None:
    """Capacity of the shown ranks' devices, where it is one number."""
    ranks = {strip.rank for strip in strips}
    capacities = {row.capacity_bytes for row in summary.memory if row.rank in ranks and row.kind == "device"}
    return capacities.pop() if len(capacities) == 1 else None


def _name(strip: MemoryTimeline) -> str:
    return f"rank {strip.rank}, host" if strip.device < 0 else f"rank {strip.rank}"
