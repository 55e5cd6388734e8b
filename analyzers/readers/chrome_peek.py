"""Is this file a Chrome trace, and whose: told from its head and, where that is cheap, its tail."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from perfscope.analyzers.readers import sources
from perfscope.analyzers.readers.chrome_metadata import FileMetadata, fields_of, interpret
from perfscope.analyzers.readers.chrome_window import Window, metadata_before_events

_HEAD_BYTES = 256 << 10
_LONGEST_HEAD = 8 << 20
"""Metadata before the events is larger than this only in jobs of thousands of process groups."""
_TAIL_BYTES = 4 << 20
_CHEAP_TO_UNPACK = 64 << 20
"""A packed file up to this size unpacks in about a second; a larger one is not unpacked to see its tail."""

_EVENT = re.compile(rb'\s*\{[^{}]{0,4096}"ph"\s*:\s*"')
_PROFILER = re.compile(rb'"(?:deviceProperties|distributedInfo|traceEvents)"\s*:')
_OWNER = b'"distributedInfo"'


@dataclass(frozen=True)
class Peek:
    """What a file says at a glance. ``rank`` and ``world_size`` are None where it does not say or hides it."""

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
