"""Memory snapshots of torch (``torch.cuda.memory._dump_snapshot``): what the caching allocator holds and did.

Format: torch's ``torch/csrc/cuda/Module.cpp`` (``memorySnapshot``) and ``torch/cuda/memory.py`` (``_snapshot``). A
snapshot is ``segments`` (memory from the driver, each cut into ``blocks``) and, where ``_record_memory_history`` was
on, ``device_traces``: for each device the allocator's last actions in their order, with the stacks that led to them.
Sizes of actions are the requested ones; a block has its rounded size as well.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from perfscope.analyzers.readers import plain_pickle, sources
from perfscope.analyzers.readers.flight import Frame
from perfscope.analyzers.readers.plain_values import column, mapping, mappings, text, whole
from perfscope.errors import TraceError
from perfscope.frozen import dataclass
from perfscope.grouping import grouped
from perfscope.redact import redact_value
from perfscope.trace.trace import Int64

BOUNDS: Final = plain_pickle.Bounds(size=512 << 20, containers=8_000_000, notes=40_000_000)
"""A snapshot of a million actions has some 100 MiB."""
MAX_FRAMES: Final = 256
"""Of one stack, which with C++ frames has more than a hundred."""
MAX_DEVICES: Final = 1024

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, OOM, OTHER = range(7)
_ACTIONS: Final = {
    "alloc": ALLOC, "free_requested": FREE_REQUESTED, "free_completed": FREE_COMPLETED,
    "segment_alloc": SEGMENT_ALLOC, "segment_map": SEGMENT_ALLOC,
    "segment_free": SEGMENT_FREE, "segment_unmap": SEGMENT_FREE, "oom": OOM,
}  # fmt: skip
"""With expandable segments memory is mapped and unmapped."""
_LARGEST: Final = 1 << 50
"""Bytes; no device has so much, and sums of it fit a column."""
_PENDING: Final = ("active_pending_free", "active_awaiting_free")
_OF_PROFILER: Final = re.compile(r"^(.+)\((\d{1,9})\): (.+)$")
"""A call in snapshots that torch makes of a profile (``_memory_viz.profile_plot``): all of it in the name."""
_SOURCE_LINE: Final = re.compile(r'File "([^"]+)", line (\d{1,9}), in ([^\n]+)')
"""In ``fx_original_trace``: the model's code that generated code stands for."""


class MemoryBlock(NamedTuple):
    """A piece of a segment; sizes in bytes."""

    segment: int
    """Index of its segment."""
    address: int
    size: int
    requested: int
    """What was asked for; of a free block 0."""
    state: str
    """``allocated``, ``pending`` (freed, but another stream still uses it) or ``free``."""
    stack: int
    """Index in ``stacks``; 0: none was recorded."""


class Segment(NamedTuple):
    """Memory that the allocator got from the driver."""

    size: int
    stream: int
    private: bool
    """It belongs to a pool of its own (CUDA graphs, ``MemPool``)."""
    expandable: bool


class Annotation(NamedTuple):
    """Begin of a range that was recorded beside the actions (``record_function``)."""

    name: str
    device: int
    time_us: int


@dataclass(frozen=True, eq=False)
class DeviceSnapshot:
    """One device's allocator: ``segments`` and ``blocks`` when the snapshot was taken; actions, a row each, before.

    ``action`` is ``ALLOC`` … ``OTHER``. Of an ``OOM``, ``address`` is what the driver had free, in bytes. ``time_us``
    is since 1970, 0 where it is not recorded (before torch 2.2); ``stack`` and ``label`` index those of the snapshot.
    """

    device: int
    segments: tuple[Segment, ...]
    blocks: tuple[MemoryBlock, ...]
    action: Int64
    address: Int64
    size: Int64
    time_us: Int64
    stack: Int64
    label: Int64


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What one process dumped: those of its devices that have memory or actions."""

    path: str
    devices: tuple[DeviceSnapshot, ...]
    stacks: tuple[tuple[Frame, ...], ...]
    """Calls, the innermost first. The first one is empty: no stack was recorded."""
    labels: tuple[str, ...]
    """What users (``_set_memory_metadata``), the profiler or the compiler named; the first one is empty."""
    annotations: tuple[Annotation, ...]
    expandable: bool | None
    """Is ``expandable_segments`` on? None where the settings are not recorded (before torch 2.2)."""
    of_profile: bool
    """It was made of a profile, and holds no allocator's segments: those it has are spans of addresses."""


def read(path: Path) -> Snapshot:
    """Read one snapshot. Raises TraceError, naming the file, where it is not one or cannot be used."""
    data = sources.read_whole(path, BOUNDS.size, "record fewer actions: _record_memory_history(max_entries=100000)")
    try:
        return parse(data, str(path))
    except ValueError as error:
        raise TraceError(f"{path}: cannot be read as a memory snapshot ({error}); dump it again") from error


def parse(data: bytes, path: str = "") -> Snapshot:
    """The snapshot in ``data``. Raises ValueError where it is none."""
    document = plain_pickle.loads(data, BOUNDS)
    if not isinstance(document, dict) or not {"segments", "device_traces"} & document.keys():
        raise ValueError("it has neither segments nor device_traces")
    return _Builder(document, path).snapshot()


class _Builder:
    """Columns from one document. What is not of the type that torch writes counts as absent."""

    def __init__(self, document: dict[str, Any], path: str) -> None:
        self.path = path
        self.document = document
        self.stacks: dict[tuple[Frame, ...], int] = {(): 0}
        self.labels: dict[str, int] = {"": 0}
        # The same lists and calls over and over; the document keeps them, so that their ids stay theirs.
        self._seen: dict[int, int] = {}
        self._frames: dict[int, Frame] = {}

    def snapshot(self) -> Snapshot:
        segments = mappings(self.document.get("segments"))
        traces = self.document.get("device_traces")
        traces = traces[:MAX_DEVICES] if isinstance(traces, list) else []
        of_device = grouped((whole(segment.get("device")), segment) for segment in segments)
        acting = {number: entries for number, trace in enumerate(traces) if (entries := mappings(trace))}
        devices = tuple(
            self._device(number, of_device.get(number, []), acting.get(number, []))
            for number in sorted({*of_device, *acting})[:MAX_DEVICES]
        )
        expandable = mapping(self.document.get("allocator_settings")).get("expandable_segments")
        return Snapshot(
            path=self.path,
            devices=devices,
            stacks=tuple(self.stacks),
            labels=tuple(map(redact_value, self.labels)),
            annotations=tuple(
                Annotation(text(each.get("name")), whole(each.get("device"), -1), whole(each.get("time_us")))
                for each in mappings(self.document.get("external_annotations"))
                if each.get("stage", "START") == "START"
            ),
            of_profile=not any("active_size" in segment for segment in segments),
            expandable=bool(expandable) if isinstance(expandable, (bool, int)) else None,
        )

    def _device(self, number: int, segments: list[Any], entries: list[Any]) -> DeviceSnapshot:
        action = column(_ACTIONS.get(text(entry.get("action")), OTHER) for entry in entries)
        return DeviceSnapshot(
            device=number,
            segments=tuple(map(_segment, segments)),
            blocks=tuple(block for index, segment in enumerate(segments) for block in self._blocks(index, segment)),
            action=action,
            address=column(
                whole(entry.get("device_free" if kind == OOM else "addr"))
                for kind, entry in zip(action, entries, strict=True)
            ),
            size=column(_size(entry.get("size")) for entry in entries),
            time_us=column(whole(entry.get("time_us")) for entry in entries),
            stack=column(self._stack(entry.get("frames")) for entry in entries),
            label=column(self._label(entry) for entry in entries),
        )

    def _blocks(self, index: int, segment: dict[str, Any]) -> list[MemoryBlock]:
        made, address = [], whole(segment.get("address"))
        for block in mappings(segment.get("blocks")):
            size = _size(block.get("size"))
            state = text(block.get("state"))
            allocated = state == "active_allocated"
            # Before torch 2.1 a block had a history of what was in it.
            last = next(iter(mappings(block.get("history"))), mapping(None))
            asked = whole(block.get("requested_size", last.get("real_size")), size)
            made.append(
                MemoryBlock(
                    segment=index,
                    address=whole(block.get("address"), address),
                    size=size,
                    requested=min(max(asked, 0), size) if allocated else 0,
                    state="allocated" if allocated else "pending" if state in _PENDING else "free",
                    stack=self._stack(block.get("frames", last.get("frames"))),
                )
            )
            address += size
        return made

    def _label(self, entry: dict[str, Any]) -> int:
        name = text(entry.get("user_metadata")) or text(entry.get("category")).replace("unknown", "")
        compiled = text(entry.get("compile_context"))
        if not name and compiled not in ("", "N/A", "None"):
            name = f"compiled {compiled}"
        return self.labels.setdefault(name, len(self.labels))

    def _stack(self, value: Any) -> int:
        if not isinstance(value, list):
            return 0
        known = self._seen.get(id(value))
        if known is None:
            calls = tuple(self._frame(call) for call in value[:MAX_FRAMES] if isinstance(call, dict))
            known = self._seen[id(value)] = self.stacks.setdefault(calls, len(self.stacks))
        return known

    def _frame(self, call: dict[str, Any]) -> Frame:
        made = self._frames.get(id(call))
        if made is None:
            name = text(call.get("name"))
            made = Frame(text(call.get("filename")), whole(call.get("line")), name)
            if made.file == "none":
                parts = _OF_PROFILER.match(name)
                made = Frame(parts[1], int(parts[2]), parts[3]) if parts else Frame("<profiler>", 0, name)
            original = call.get("fx_original_trace")
            found = _SOURCE_LINE.findall(original[-4000:]) if isinstance(original, str) else []
            if found:
                made = Frame(found[-1][0], int(found[-1][1]), found[-1][2])
            self._frames[id(call)] = made
        return made


def _segment(segment: dict[str, Any]) -> Segment:
    pool = segment.get("segment_pool_id")
    return Segment(
        size=_size(segment.get("total_size")),
        stream=whole(segment.get("stream")),
        private=isinstance(pool, (tuple, list)) and any(pool),
        expandable=segment.get("is_expandable") is True,
    )


def _size(value: Any) -> int:
    return min(max(whole(value), 0), _LARGEST)
