"""Memory snapshots on the page: who holds the memory at the peak, what grows, what lies idle, why memory ran out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from perfscope.reports import tables
from perfscope.reports.figures.allocations import shown_timeline
from perfscope.reports.tables import Filled, HtmlTable
from perfscope.results.memory.snapshots import CodePlace, HolderRow, MemorySnapshots, SnapshotRow
from perfscope.results.summary import Summary
from perfscope.text import byte_size, percent, plural

SHOWN: Final = 20
"""Rows of a table on the page; the machine-readable result has more."""
_NO_STACK: Final = "Allocated before the recording, or by a thread that runs no Python."
_NO_HISTORY: Final = "The allocator's history was not recorded."


def values(summary: Summary) -> dict[str, Any]:
    """What the template shows; ``snapshots`` is None where there are none."""
    found = summary.snapshots
    if found is None:
        return {"snapshots": None}
    made = (_failures(found), _growth(found), _holders(found), _devices(found))
    shown = {"reading": _reading(found), "peak": _peak(summary), "tables": [each for each in made if each is not None]}
    return {"snapshots": shown}


def fullest(found: MemorySnapshots) -> SnapshotRow:
    """The device with the highest peak."""
    return max(found.devices, key=lambda row: row.peak_bytes)


def _reading(found: MemorySnapshots) -> str:
    row = fullest(found)
    many = f"Of {plural(len(found.devices), 'device')} " if len(found.devices) > 1 else ""
    who = f"{_named(row)} allocates most, " if many else f"{_named(row)} allocates "
    text = f"{many}{who if many else who[0].upper() + who[1:]}{byte_size(row.peak_bytes)} at its peak"
    if not row.actions:
        return f"{text}, when the snapshot was taken: the history of the allocator was not recorded."
    return f"{text}, within {plural(row.actions, 'recorded action')} of the allocator."


def _peak(summary: Summary) -> str:
    curve = shown_timeline(summary)
    if curve is None or summary.snapshots is None:
        return ""
    rows = summary.snapshots.devices
    row = next(each for each in rows if (each.rank, each.device) == (curve.rank, curve.device))
    steps = f" {plural(row.steps, 'step')} among them." if row.steps else ""
    return f"{_named(row).capitalize()}.{steps}"


def _named(row: SnapshotRow) -> str:
    return f"rank {row.rank}" if row.rank is not None else f"device {row.device} ({row.file})"


def _places(rows: Sequence[CodePlace]) -> list[Filled]:
    """Phase, module and call of each row."""
    labels = [row.label for row in rows]
    return [
        tables.words("Phase", [row.phase for row in rows], definition="snapshot_phase"),
        tables.words(
            "Module", [row.module for row in rows], definition="snapshot_module", reason="Outside of modules."
        ),
        tables.words("Call", [row.call for row in rows], reason=_NO_STACK),
        *([tables.words("Label", labels, reason="It has none.")] if any(labels) else []),
    ]


def _holders(found: MemorySnapshots) -> HtmlTable | None:
    row = fullest(found)
    every = [each for each in found.holders if (each.rank, each.device) == (row.rank, row.device)]
    rows: list[HolderRow] = every[:SHOWN]
    if not rows:
        return None
    columns = [
        *_places(rows),
        tables.sizes("At the peak", [each.bytes for each in rows], definition="snapshot_peak"),
        tables.column("of all", [each.share for each in rows], percent, definition="snapshot_peak"),
        tables.column("Allocations", [int(each.allocations) for each in rows], "{:,}".format),
        tables.sizes("Largest", [each.largest_bytes for each in rows]),
        tables.sizes("Kept", [each.kept_bytes for each in rows], definition="snapshot_kept"),
    ]
    shown = sum(each.share for each in rows)
    return tables.table(
        "memory-holders", f"Holders at the peak of {_named(row)}", columns,
        f"These {plural(len(rows), 'place')} hold {percent(shown)} of what is allocated then.",
    )  # fmt: skip


def _growth(found: MemorySnapshots) -> HtmlTable | None:
    rows = found.growth[:SHOWN]
    if not rows:
        return None
    columns = [
        tables.ranks("Rank", [row.rank for row in rows]),
        *_places(rows),
        tables.sizes("Per step", [row.bytes_per_step for row in rows], definition="snapshot_growth"),
        tables.sizes("At first", [row.first_bytes for row in rows]),
        tables.sizes("At last", [row.last_bytes for row in rows]),
        tables.column("Steps", [row.steps for row in rows], "{:,}".format),
    ]
    return tables.table("memory-growth", "What grows from step to step", columns, "At the begin of each step.")


def _failures(found: MemorySnapshots) -> HtmlTable | None:
    rows = found.ooms[:SHOWN]
    if not rows:
        return None
    columns = [
        tables.ranks("Rank", [row.rank for row in rows]),
        tables.words("Cause", [row.cause for row in rows], definition="snapshot_cause"),
        tables.sizes("Asked for", [row.requested_bytes for row in rows]),
        tables.sizes("Allocated", [row.allocated_bytes for row in rows]),
        tables.sizes("Held by the allocator", [row.reserved_bytes for row in rows]),
        tables.sizes("Free on the device", [row.device_free_bytes for row in rows]),
        *_places(rows),
    ]
    return tables.table("memory-failures", "Allocations that failed", columns, "The last one of each device.")


def _devices(found: MemorySnapshots) -> HtmlTable:
    rows = found.devices
    many = len({row.device for row in rows}) > 1
    unused = [row.fragmentation for row in rows]
    columns = [
        tables.ranks("Rank", [row.rank for row in rows]),
        *([tables.column("Device", [row.device for row in rows], str)] if many else []),
        tables.sizes("Peak", [row.peak_bytes for row in rows], definition="snapshot_peak"),
        tables.sizes("Most held", [row.reserved_peak_bytes for row in rows], definition="snapshot_reserved"),
        tables.column("of no use then", unused, percent, definition="snapshot_unused", reason=_NO_HISTORY),
        tables.sizes("Held at the end", [row.reserved_bytes for row in rows]),
        tables.sizes("Allocated", [row.allocated_bytes for row in rows]),
        tables.sizes("Free between others", [row.split_bytes for row in rows], definition="snapshot_split"),
        tables.sizes("Free segments", [row.cached_bytes for row in rows], definition="snapshot_cached"),
        tables.sizes("Largest free", [row.largest_free_bytes for row in rows], definition="snapshot_largest"),
        tables.sizes("Rounding", [row.rounding_bytes for row in rows], definition="snapshot_rounding"),
        *(
            [tables.sizes("Private pools", [row.private_bytes for row in rows], definition="snapshot_private")]
            if any(row.private_bytes for row in rows)
            else []
        ),
        tables.words("File", [row.file for row in rows]),
    ]
    return tables.collapsed(tables.table("memory-devices", "Allocators", columns, "When each snapshot was taken."))
