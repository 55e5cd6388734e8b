"""What memory snapshots show: who holds a device's memory, what grows, what lies idle, and why it ran out."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from perfscope.frozen import dataclass
from perfscope.results.fields import Bytes, Count, Share, Us

Phase = Annotated[
    str,
    "What allocated it: ``setup`` (the model is made or moved), ``forward``, ``backward``, ``optimizer``, ``data``, "
    "``other``, or ``before``: before the first recorded action, without a stack. Without C++ stacks an allocation "
    "that no Python call made is the backward's.",
]

PHASES_IN_WORDS: Final = {
    "setup": "the setup",
    "forward": "the forward",
    "backward": "the backward",
    "optimizer": "the optimizer",
    "data": "data loading",
    "other": "other code",
    "before": "what was there before the recording",
}


@dataclass(frozen=True, kw_only=True)
class SnapshotRow:
    """The caching allocator of one device, from one process's snapshot."""

    rank: Annotated[int | None, "Global rank; None where the file's name does not say it."]
    device: Annotated[int, "Number of the device in its process."]
    file: Annotated[str, "The snapshot's file."]
    reserved_bytes: Annotated[Bytes, "What the allocator held when the snapshot was taken."]
    allocated_bytes: Annotated[Bytes, "What was allocated then, as requested."]
    peak_bytes: Annotated[
        Bytes, "The most that was allocated at once during the recorded actions; without any, when it was taken."
    ]
    rounding_bytes: Annotated[Bytes, "Blocks in use − what was requested: lost to rounding."]
    pending_bytes: Annotated[Bytes, "Freed, but another stream may still use it."]
    cached_bytes: Annotated[Bytes, "Segments without a block in use: the allocator can give them back."]
    split_bytes: Annotated[
        Bytes,
        "Free blocks in segments that others use: they serve only requests that fit, and cannot be given back.",
    ]
    largest_free_bytes: Annotated[Bytes, "The largest free block: more than that needs new memory from the driver."]
    reserved_peak_bytes: Annotated[Bytes, "The most that the allocator held during the recorded actions."]
    fragmentation: Annotated[
        Share | None,
        "1 − ``peak_bytes`` / ``reserved_peak_bytes``: held, but of no use when most was needed. None without actions.",
    ]
    private_bytes: Annotated[Bytes, "Segments of private pools (CUDA graphs, ``MemPool``), of no use to others."]
    expandable: Annotated[bool | None, "``expandable_segments`` is on; None where not recorded."] = None
    actions: Annotated[int, "Recorded actions of the allocator; 0 where its history was not recorded."] = 0
    steps: Annotated[int, "Steps among the recorded actions."] = 0
    ooms: Annotated[int, "Allocations that failed because memory ran out."] = 0


@dataclass(frozen=True, kw_only=True)
class CodePlace:
    """A place in the code that asked for memory."""

    rank: Annotated[int | None, "Global rank; None where the file's name does not say it."]
    device: Annotated[int, "Number of the device in its process."]
    phase: Phase
    module: Annotated[str, "Nested ``forward`` calls by file and line, the innermost last; empty outside of modules."]
    function: Annotated[str | None, "The user's innermost function, else the innermost; None without a stack."]
    file: Annotated[str | None, "Its source file."]
    line: Annotated[int | None, "The line there."]
    label: Annotated[
        str, "What users (``_set_memory_metadata``), the profiler or the compiler named it; else empty."
    ] = ""

    @property
    def call(self) -> str:
        """``train_step (train.py:30)``; empty without a stack."""
        return f"{self.function} ({self.file}:{self.line})" if self.function else ""

    @property
    def where(self) -> str:
        """``the forward of gpt.py:88 › linear:125, train_step (train.py:30)``."""
        module = f" of {self.module}" if self.module else ""
        call = f", {self.call}" if self.call else ""
        return f"{PHASES_IN_WORDS[self.phase]}{module}{call}{f' ({self.label})' if self.label else ''}"


@dataclass(frozen=True, kw_only=True)
class HolderRow(CodePlace):
    """Allocations at the peak that come from one place in the code."""

    bytes: Annotated[Bytes, "Allocated at the peak."]
    share: Annotated[Share, "Of all that is allocated then."]
    allocations: Annotated[Count, "Allocations at the peak."]
    largest_bytes: Annotated[Bytes, "The largest of them."]
    kept_bytes: Annotated[Bytes, "What of it was still allocated when the snapshot was taken."]


@dataclass(frozen=True, kw_only=True)
class GrowthRow(CodePlace):
    """A place in the code that holds more at the begin of each step."""

    bytes_per_step: Annotated[Bytes, "Mean growth from one step's begin to the next; the first step is left out."]
    first_bytes: Annotated[Bytes, "What it held as the second step began."]
    last_bytes: Annotated[Bytes, "What it held as the last step began."]
    steps: Annotated[int, "Steps over which it grew."]


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryRow(CodePlace):
    """An allocation that failed."""

    requested_bytes: Annotated[Bytes, "What was asked for."]
    device_free_bytes: Annotated[Bytes, "What the driver had free."]
    allocated_bytes: Annotated[Bytes, "What was allocated then."]
    reserved_bytes: Annotated[Bytes, "What the allocator held then."]
    cause: Annotated[
        Literal["fragmentation", "full", "others", "request"],
        "``fragmentation``: the allocator and the driver had as much free as was asked for, but not in one piece that "
        "could be used. ``others``: a quarter of the device was in use outside of this allocator. ``request``: what "
        "was asked for is more than half of the device. ``full``: tensors filled it.",
    ]


@dataclass(frozen=True, kw_only=True)
class AllocationTimeline:
    """Allocated memory of one device over the recorded actions, by phase; the highest of each stretch of actions."""

    rank: int | None
    device: Annotated[int, "Number of the device in its process."]
    time_us: Annotated[tuple[Us, ...], "Since the first action; the number of the action where times are not recorded."]
    is_timed: Annotated[bool, "``time_us`` are times."]
    allocated_bytes: Annotated[dict[str, tuple[int, ...]], "Phase -> bytes allocated in it."]
    reserved_bytes: tuple[Bytes, ...]


@dataclass(frozen=True, kw_only=True)
class MemorySnapshots:
    """The memory snapshots of a job."""

    devices: tuple[SnapshotRow, ...]
    holders: Annotated[tuple[HolderRow, ...], "At the peak, of each device the largest first; at most 40 of each."]
    growth: Annotated[tuple[GrowthRow, ...], "What grows from step to step, the fastest first."] = ()
    ooms: Annotated[tuple[OutOfMemoryRow, ...], "Of each device the last allocation that failed."] = ()
    timelines: Annotated[tuple[AllocationTimeline, ...], "Of the four devices with the highest peaks."] = ()
