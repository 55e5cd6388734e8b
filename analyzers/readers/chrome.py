"""Reads Chrome traces: what torch.profiler (kineto) writes, and what else speaks its format.

Plain, gzip, zip or Zstandard; an object with ``traceEvents`` or a bare array; metadata before or after the events;
times in µs against a base or the epoch; complete events or begin and end; TensorFlow's and JAX's ``trace.json.gz`` and
Horovod's timeline (``chrome_dialects``). The file streams through a fixed buffer: memory grows with the events kept,
not with the file. What cannot be read is counted in the trace's ``losses``. A file into which several ranks were merged
is refused.
"""

from __future__ import annotations

from pathlib import Path

from perfscope.analyzers.readers import sources
from perfscope.analyzers.readers.chrome_build import Builder
from perfscope.analyzers.readers.chrome_events import BOUNDARY
from perfscope.analyzers.readers.chrome_metadata import TIME_BASE, fields_of, interpret
from perfscope.analyzers.readers.chrome_peek import Peek, peek
from perfscope.analyzers.readers.chrome_window import (
    SLICE_BYTES,
    Window,
    metadata_after_events,
    metadata_before_events,
    read_events,
)
from perfscope.errors import TraceError
from perfscope.trace import Trace

__all__ = ["Peek", "peek", "read"]


def read(path: Path, *, slice_bytes: int = SLICE_BYTES) -> Trace:
    """Read one rank's trace. ``slice_bytes`` is the size of the buffer that the text streams through.

    Raises TraceError where the file cannot be opened, is no Chrome trace, or holds no event that can be read.
    """
    builder = Builder(str(path))
    with sources.opened(path) as source:
        window = Window(source, slice_bytes)
        head = metadata_before_events(window)
        if head is None:
            remedy = "the job was killed while it wrote, or this is another kind of file; record it again"
            raise TraceError(f"{path}: holds no event array, so it is no Chrome trace ({remedy})")
        closed = read_events(window, builder.take)
        tail = metadata_after_events(window) if closed else b""
        damage = source.damage
    before, before_state = fields_of(head or b"{}")
    after, after_state = fields_of(b"{" + tail.lstrip(b", \t\r\n") if head else b"{}")
    truncated = not closed or after_state == "cut short"
    if damage:
        builder.note(damage)
    if tail and not head:
        builder.note("text after the event array was ignored")
    elif after_state == "invalid" and BOUNDARY.search(tail):
        builder.note("what looks like events after the end of the event array was not read: the array may be damaged")
    fields = {**before, **after}
    metadata = interpret(fields)
    if TIME_BASE in fields and metadata.base_ns is None:
        builder.note("the time base cannot be read: this rank's clock cannot be set against others'")
    return builder.build(
        metadata,
        truncated=truncated,
        mended_metadata="invalid" in (before_state, after_state),
    )
