"""Memory on the page: a row for each rank, and the course of the fullest over the recorded steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from perfscope.reports import tables
from perfscope.reports.format import BYTE_UNITS, byte_size, share, unit_for
from perfscope.reports.tables import Cell, Filled, Table, absent, written
from perfscope.summary import MemoryRow, Summary
from perfscope.summary_tables import MemoryStrip

SHOWN: Final = 4
"""Courses in one picture; more cannot be told apart."""

_CAPACITY_FROM: Final = 0.3
"""Share of the device's capacity from which the picture reaches up to it; below, the courses would lie flat."""

_NOT_REPORTED: Final = "Not reported by this rank."
_NO_DEVICE: Final = "The memory is the host's."


def memory_table(rows: Sequence[MemoryRow]) -> Table | None:
    """Memory of each rank; None where nothing but the devices' capacity is known."""
    if all(row.peak_bytes is None and row.allocated_peak_bytes is None for row in rows):
        return None
    host = all(row.kind == "host" for row in rows)
    columns = [tables.ranks("Rank", [row.rank for row in rows])]
    if any(row.kind == "host" for row in rows):
        columns.append(tables.words("Of", [row.kind for row in rows], definition="memory_allocated"))
    if not host:
        columns += _held(rows)
    columns += _where_known(rows)
    return tables.table("memory", "Memory", columns, _table_reading(rows))


def memory_chart(summary: Summary) -> dict[str, Any] | None:
    """The courses that the picture shows; None where none was recorded."""
    strips = _shown(summary)
    if not strips:
        return None
    time, highest = max(strip.time_us[-1] for strip in strips), max(map(_peak, strips))
    capacity = _capacity(summary, strips)
    if capacity is not None and highest < _CAPACITY_FROM * capacity:
        capacity = None
    unit, size = unit_for(time), unit_for(capacity or highest, BYTE_UNITS)

    def scaled(values: Sequence[float | None], by: float) -> list[float | None] | None:
        rounded = [float(f"{value / by:.6g}") if value is not None else None for value in values]
        return rounded if any(value is not None for value in rounded) else None

    return {
        "unit": unit.name,
        "size": size.name,
        "capacity": capacity / size.size if capacity is not None else None,
        "series": [
            {
                "name": _name(strip),
                "time": scaled(strip.time_us, unit.size),
                "allocated": scaled(strip.allocated_bytes, size.size),
                "reserved": scaled(strip.reserved_bytes, size.size),
            }
            for strip in strips
        ],
    }


def memory_reading(summary: Summary) -> str:
    """What the picture shows here."""
    strips = _shown(summary)
    if not strips:
        return ""
    recorded = len({strip.rank for strip in summary.memory_timeline})
    some = f"{len(strips)} of {recorded:,} ranks, the fullest among them; " if recorded > len(strips) else ""
    fullest = max(strips, key=_peak)
    allocated, reserved = _known(fullest.allocated_bytes), _known(fullest.reserved_bytes)
    if not allocated:
        return f"Here {some}on rank {fullest.rank} the process holds {_between(reserved)}."
    reading = f"Here {some}on rank {fullest.rank} tensors take {_between(allocated)}"
    if fullest.device < 0:
        return f"{reading} of the host's memory, not counting what was allocated before the profiler started."
    return f"{reading}, of {byte_size(max(reserved))} that the allocator holds." if reserved else f"{reading}."


def _held(rows: Sequence[MemoryRow]) -> list[Filled]:
    """Columns that every device has."""
    used = [
        row.peak_bytes / row.capacity_bytes if row.peak_bytes is not None and row.capacity_bytes else None
        for row in rows
    ]
    reason = _NO_DEVICE if any(row.kind == "host" for row in rows) else _NOT_REPORTED
    return [
        tables.sizes("Peak", [row.peak_bytes for row in rows], definition="memory_peak", reason=reason),
        tables.sizes("Capacity", [row.capacity_bytes for row in rows], reason=reason),
        tables.numbers("Used", [_share(part) for part in used], definition="memory_peak"),
    ]


def _where_known(rows: Sequence[MemoryRow]) -> list[Filled]:
    """Columns that not every recording has; each only where some rank knows it."""

    def some(value: Callable[[MemoryRow], float | None]) -> bool:
        return any(value(row) is not None for row in rows)

    columns = []
    if some(lambda row: row.headroom_bytes):
        values = [row.headroom_bytes for row in rows]
        columns.append(tables.sizes("Headroom", values, definition="headroom", reason=_NOT_REPORTED))
    if some(lambda row: row.allocated_peak_bytes):
        values = [row.allocated_peak_bytes for row in rows]
        columns.append(tables.sizes("Tensors", values, definition="memory_allocated", reason=_NOT_REPORTED))
    if some(lambda row: row.fragmentation):
        cells = [_share(row.fragmentation) for row in rows]
        columns.append(tables.numbers("Unused", cells, definition="fragmentation"))
    if some(lambda row: row.allocation_retries):
        cells = [
            absent(_NOT_REPORTED)
            if row.allocation_retries is None
            else Cell(text=f"{row.allocation_retries:,}", order=row.allocation_retries)
            for row in rows
        ]
        columns.append(tables.numbers("Retries", cells, definition="allocation_retries"))
    return columns


def _table_reading(rows: Sequence[MemoryRow]) -> str:
    shares = [
        (row.peak_bytes / row.capacity_bytes, row.rank)
        for row in rows
        if row.peak_bytes is not None and row.capacity_bytes
    ]
    reading = [f"The fullest is rank {max(shares)[1]} with {share(max(shares)[0])}."] if shares else []
    retried = [row for row in rows if row.allocation_retries]
    if retried:
        most = max(retried, key=lambda row: row.allocation_retries or 0)
        reading.append(
            f"Rank {most.rank} ran out of memory and had to empty its cache {most.allocation_retries:,} "
            f"time{'' if most.allocation_retries == 1 else 's'}; each costs a wait for the device."
        )
    if rows and all(row.kind == "host" for row in rows):
        reading.append("The host's memory, as these ranks have no device.")
    return " ".join(reading)


def _share(value: float | None) -> Cell:
    return written(share(value), value, _NOT_REPORTED)


def _shown(summary: Summary) -> tuple[MemoryStrip, ...]:
    """The course of the fullest memory of each rank; of many ranks the fullest, the emptiest and an even choice."""
    fullest: dict[int, MemoryStrip] = {}
    for strip in summary.memory_timeline:
        if _peak(strip) > (_peak(fullest[strip.rank]) if strip.rank in fullest else 0):
            fullest[strip.rank] = strip
    ordered = sorted(fullest.values(), key=lambda strip: (-_peak(strip), strip.rank))
    if len(ordered) > SHOWN:
        ordered = [ordered[number * (len(ordered) - 1) // (SHOWN - 1)] for number in range(SHOWN)]
    return tuple(sorted(ordered, key=lambda strip: strip.rank))


def _known(values: Sequence[int | None]) -> list[int]:
    return [value for value in values if value is not None]


def _peak(strip: MemoryStrip) -> int:
    return max(_known((*strip.allocated_bytes, *strip.reserved_bytes)), default=0)


def _between(values: Sequence[int]) -> str:
    low, high = byte_size(min(values)), byte_size(max(values))
    return low if low == high else f"between {low} and {high}"


def _capacity(summary: Summary, strips: Sequence[MemoryStrip]) -> int | None:
    """Capacity of the shown ranks' devices, where it is one number."""
    ranks = {strip.rank for strip in strips}
    capacities = {row.capacity_bytes for row in summary.memory if row.rank in ranks and row.kind == "device"}
    return capacities.pop() if len(capacities) == 1 else None


def _name(strip: MemoryStrip) -> str:
    return f"rank {strip.rank}, host" if strip.device < 0 else f"rank {strip.rank}"
