"""Fragmentation: fires where the allocator holds far more than tensors ever filled, and the device is nearly full.

Free blocks between others serve only requests that fit. With ``expandable_segments`` a segment grows instead, so that
free pages serve any request (torch ``docs/source/notes/cuda.rst``, "Optimizing memory usage").
"""

from __future__ import annotations

from typing import Final

from perfscope.analyzers.rules.context import RuleContext
from perfscope.analyzers.rules.memory.out_of_memory import EXPANDABLE, SET_EXPANDABLE
from perfscope.results.findings import Action, Confidence, Evidence, Finding, Obtained, Severity
from perfscope.results.memory.snapshots import SnapshotRow
from perfscope.text import byte_size

RULE: Final = "memory-fragmentation"
SHARE: Final = 0.2
"""Least share of what the allocator held that tensors did not fill at their peak."""
FULL: Final = 0.8
"""Least share of the device that the allocator held, where the device's memory is known."""
LEAST_BYTES: Final = 1 << 30
"""Below, it matters to nobody."""


def evaluate(job: RuleContext) -> Finding | None:
    """The finding, or None: tensors fill what is held, segments are expandable, or the device has room."""
    rows = job.summary.snapshots.devices if job.summary.snapshots is not None else ()
    wasted = {row: _wasted(row) for row in rows if _matters(job, row)}
    if not wasted:
        return None
    row = max(wasted, key=lambda each: wasted[each])
    who = f"rank {row.rank}'s" if row.rank is not None else f"device {row.device}'s"
    ranks = () if row.rank is None else (row.rank,)
    return Finding(
        rule=RULE,
        title=f"{byte_size(wasted[row])} of the {byte_size(row.reserved_peak_bytes)} that {who} allocator holds were "
        "of no use when most was needed",
        severity=Severity.INFO,
        evidence=(
            Evidence("the most that the allocator held", row.reserved_peak_bytes, "bytes", ranks),
            Evidence("the most that was allocated", row.peak_bytes, "bytes", ranks),
            Evidence("free blocks between others, when the snapshot was taken", row.split_bytes, "bytes", ranks),
            Evidence("the largest free block then", row.largest_free_bytes, "bytes", ranks),
        ),
        action=Action(setting=EXPANDABLE, old=None, new="expandable_segments:True", how=SET_EXPANDABLE),
        confidence=Confidence.MEDIUM,
        obtained=Obtained.MEASURED,
    )


def _wasted(row: SnapshotRow) -> int:
    return row.reserved_peak_bytes - row.peak_bytes - row.private_bytes


def _matters(job: RuleContext, row: SnapshotRow) -> bool:
    capacity = next((each.capacity_bytes for each in job.summary.memory if each.rank == row.rank), None)
    return (
        row.fragmentation is not None
        and row.expandable is not True
        and _wasted(row) >= max(SHARE * row.reserved_peak_bytes, LEAST_BYTES)
        and (capacity is None or row.reserved_peak_bytes >= FULL * capacity)
    )
