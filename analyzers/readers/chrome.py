"""Reads Chrome traces: the format of torch.profiler (kineto) and of other tools.

Plain, gzip, zip or Zstandard; an object with ``traceEvents`` or a bare array; metadata before or after the events;
times in µs against a base or the epoch; complete events or begin and end; TensorFlow's and JAX's ``trace.json.gz`` and
Horovod's timeline (``chrome_dialects``). The file streams through a fixed buffer: memory grows with the events that
are read, not with the file. What cannot be read is counted in the trace's ``parse_report``. A file into which several
ranks were merged is refused.
"""

from __future__ import annotations

import re
from pathlib import Path

from perfscope.analyzers.readers import chrome_repair, chrome_scan, sources
from perfscope.analyzers.readers.chrome_build import Builder
from perfscope.analyzers.readers.chrome_columns import category_of
from perfscope.analyzers.readers.chrome_metadata import TIME_BASE, FileMetadata, fields_of, interpret
from perfscope.analyzers.readers.chrome_window import (
    SLICE_BYTES,
    Window,
    metadata_after_events,
    metadata_before_events,
    read_events,
)
from perfscope.errors import TraceError
from perfscope.frozen import dataclass
from perfscope.trace.trace import Trace

_HEAD_BYTES = 256 << 10
_LONGEST_HEAD = 8 << 20
"""Metadata before the events is larger than this only in jobs of thousands of process groups."""
_TAIL_BYTES = 4 << 20
_CHEAP_TO_UNPACK = 64 << 20
"""A packed file up to this size unpacks in about a second; a larger one is not unpacked to see its tail."""

_EVENT = re.compile(rb'\s*\{[^{}]{0,4096}"ph"\s*:\s*"')
_PROFILER = re.compile(rb'"(?:deviceProperties|distributedInfo|traceEvents)"\s*:')
_OWNER = b'"distributedInfo"'


def read(path: Path, *, slice_bytes: int = SLICE_BYTES, compiled: bool = chrome_scan.IS_BUILT) -> Trace:
    """Read one rank's trace. ``slice_bytes`` is the size of the buffer that the text streams through.

    ``compiled`` False decodes in Python alone, with the same result.

    Raises TraceError where the file cannot be opened, is no Chrome trace, or holds no event that can be read.
    """
    builder = Builder(str(path))
    scanner = chrome_scan.SliceScanner(category_of) if compiled else None
    with sources.opened(path) as source:
        window = Window(source, slice_bytes)
        head = metadata_before_events(window)
        if head is None:
            raise TraceError(
                f"{path}: no event array, so this is no Chrome trace (the job was killed while it wrote, or this is "
                "another kind of file); record it again"
            )
        closed = read_events(window, builder.take, scanner)
        tail = metadata_after_events(window) if closed else b""
        damage = source.damage
    before, before_state = fields_of(head or b"{}")
    after, after_state = fields_of(b"{" + tail.lstrip(b", \t\r\n") if head else b"{}")
    truncated = not closed or after_state == "cut short"
    if damage:
        builder.note(damage)
    if tail and not head:
        builder.note("text after the event array was ignored")
    elif after_state == "invalid" and chrome_repair.BOUNDARY.search(tail):
        builder.note("text like events after the end of the event array was not read: the array may be damaged")
    fields = {**before, **after}
    metadata = interpret(fields)
    if TIME_BASE in fields and metadata.base_ns is None:
        builder.note("the time base cannot be read: this rank's clock cannot be aligned with other ranks'")
    return builder.build(
        metadata,
        truncated=truncated,
        repaired_metadata="invalid" in (before_state, after_state),
    )


@dataclass(frozen=True)
class Peek:
    """What a file's head and tail show. ``rank`` and ``world_size`` are None where they do not show it."""

    is_chrome: bool
    rank: int | None = None
    world_size: int | None = None


def peek(path: Path) -> Peek:
    """Look at a file without reading its events. Raises TraceError where it cannot be opened or unpacked at all."""
    with sources.opened(path) as source:
        window = Window(source, _HEAD_BYTES)
        head = metadata_before_events(window, _LONGEST_HEAD)
        start = window.text()
        whole = window.finished
    if head is None:
        return Peek(is_chrome=start[:1] == b"{" and _PROFILER.search(start) is not None)
    if not head:
        return Peek(is_chrome=_EVENT.match(start) is not None)
    owner = interpret(fields_of(head)[0])
    if owner.rank is None:
        tail = start if whole else sources.read_tail(path, _TAIL_BYTES, packed_limit=_CHEAP_TO_UNPACK)
        owner = _owner_in(tail) or owner if tail else owner
    return Peek(True, owner.rank, owner.world_size)


def _owner_in(tail: bytes) -> FileMetadata | None:
    at = tail.rfind(_OWNER)
    if at < 0:
        return None
    return interpret(fields_of(tail[at:])[0])
