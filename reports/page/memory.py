"""Memory on the page: a row for each rank, and the fullest ranks' curves over the recorded steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from perfscope.reports import tables
from perfscope.reports.figures.memory import peak, shown_curves
from perfscope.reports.tables import Filled, HtmlTable
from perfscope.results.rows import MemoryRow
from perfscope.results.summary import Summary
from perfscope.text import byte_size, count_per_step, percent, plural

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


def memory_reading(summary: Summary) -> str:
    """What the chart shows."""
    strips = shown_curves(summary)
    if not strips:
        return ""
    recorded = len({strip.rank for strip in summary.memory_timeline})
    some = f"{len(strips)} of {recorded:,} ranks, the fullest among them. " if recorded > len(strips) else ""
    fullest = max(strips, key=peak)
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


def _known(values: Sequence[int | None]) -> list[int]:
    return [value for value in values if value is not None]


def _between(values: Sequence[int]) -> str:
    low, high = byte_size(min(values)), byte_size(max(values))
    return low if low == high else f"{low} to {high}"
