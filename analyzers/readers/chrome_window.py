"""Streams a Chrome trace's text through a fixed buffer: metadata, then slices of whole events, then metadata."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from perfscope.analyzers.readers import chrome_events, chrome_repair
from perfscope.analyzers.readers.chrome_events import EventBatch
from perfscope.analyzers.readers.chrome_metadata import fields_of
from perfscope.analyzers.readers.chrome_scan import SliceScanner
from perfscope.analyzers.readers.sources import ByteSource

SLICE_BYTES = 1 << 19
"""Small enough for the processor's cache, large enough that the cost of a call does not matter."""

LONGEST = 64 << 20
"""Metadata or an event of more bytes is not read: no real one comes near this."""

_ARRAY_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_OPENING = re.compile(rb"(?:\xef\xbb\xbf)?\s*([\[{])")
_GAP = re.compile(rb"[\s,]*")


class Window:
    """A buffer over unpacked bytes, with one spare byte at either end for the brackets around a slice."""

    def __init__(self, source: ByteSource, size: int = SLICE_BYTES) -> None:
        self._source = source
        self._data = bytearray(size + 2)
        self._start = 1
        self._end = 1
        self.finished = False
        """The source has ended: nothing follows what the window holds."""

    def __len__(self) -> int:
        return self._end - self._start

    def text(self) -> bytes:
        """A copy of what the window holds."""
        return bytes(self._data[self._start : self._end])

    def skip(self, count: int) -> None:
        """Remove the first ``count`` bytes."""
        self._start += count

    def skip_gap(self) -> None:
        """Remove leading white space and commas."""
        match = _GAP.match(self._data, self._start, self._end)
        self._start = match.end() if match else self._start

    def fill(self) -> None:
        """Move the rest to the front and read until the window is full or the source ends."""
        self._move_to(self._data)

    def grow(self, longest: int = LONGEST) -> bool:
        """Double the window and fill it; False where it has ``longest`` bytes already or the source has ended."""
        if self.finished or len(self._data) >= longest:
            return False
        self._move_to(bytearray(2 * len(self._data)))
        return True

    def _move_to(self, data: bytearray) -> None:
        left = len(self)
        data[1 : 1 + left] = self._data[self._start : self._end]
        self._data, self._start, self._end = data, 1, 1 + left
        view = memoryview(data)
        while not self.finished and self._end < len(data) - 1:
            got = self._source.readinto(view[self._end : -1])
            self._end += got
            self.finished = got == 0

    def last_boundary(self) -> int | None:
        """Length up to the end of the last event that another event follows; None where there is none."""
        reach = 4 << 10
        while True:
            begin = max(self._start, self._end - reach)
            if found := deque(chrome_repair.BOUNDARY.finditer(self._data, begin, self._end), maxlen=1):
                return found[0].start() + 1 - self._start
            if begin == self._start:
                return None
            reach *= 8

    def decode(self, length: int | None, *, times_as_text: bool, scanner: SliceScanner | None = None) -> EventBatch:
        """Decode the first ``length`` bytes as events; None: all of them, the last of the file.

        The events' arguments are views of the window: valid until it is filled again. ``scanner`` is tried first.
        """
        last = length is None
        end = self._end if length is None else self._start + length
        before, after = self._data[self._start - 1], self._data[end]
        self._data[self._start - 1] = ord("[")
        if not last:
            self._data[end] = ord("]")
        start, stop = self._start - 1, end + (not last)
        batch: EventBatch | None = scanner.scan(self._data, start, stop, last=last) if scanner is not None else None
        if batch is None:
            view = memoryview(self._data)[start:stop]
            batch = chrome_events.decode(view, last=last, times_as_text=times_as_text)
        self._data[self._start - 1], self._data[end] = before, after
        # Without the added brackets.
        batch.consumed = min(batch.consumed - 1, end - self._start)
        return batch


def metadata_before_events(window: Window, longest: int = LONGEST) -> bytes | None:
    """Go to the first event. Returns the text before the event array, closed as an object; None if there is no array.

    The text is empty for a bare array.
    """
    window.fill()
    opening = _OPENING.match(window.text())
    if opening is None:
        return None
    if opening[1] == b"[":
        window.skip(opening.end())
        return b""
    window.skip(opening.start(1))
    while True:
        text = window.text()
        undecided: re.Match[bytes] | None = None
        for match in _ARRAY_KEY.finditer(text):
            head = text[: match.start()] + b'"traceEvents":[]}'
            # If the text cut here leaves another object open, the key is that object's.
            if fields_of(head)[1] != "cut short":
                window.skip(match.end())
                return head
            undecided = undecided or match
        if not window.grow(longest):
            break
    if undecided is None:
        return None
    window.skip(undecided.end())
    return text[: undecided.start()] + b"}"


def read_events(window: Window, take: Callable[[EventBatch], bool], scanner: SliceScanner | None = None) -> bool:
    """Pass every batch of events to ``take``, in order. Returns whether the array is closed (else the file ends early).

    ``take`` returns False where it needs times as text: it gets the same batch again with them, and all later ones.
    """
    times_as_text = False
    while True:
        window.skip_gap()
        window.fill()
        window.skip_gap()
        length = None if window.finished else window.last_boundary()
        if length is None and not window.finished:
            if not window.grow():
                return False
            continue
        batch = window.decode(length, times_as_text=times_as_text, scanner=scanner)
        if not take(batch):
            times_as_text = True
            batch = window.decode(length, times_as_text=True)
            take(batch)
        window.skip(batch.consumed)
        if batch.closed or length is None:
            return batch.closed
        if batch.consumed == 0 and not window.grow():
            return False


def metadata_after_events(window: Window) -> bytes:
    """The text after the event array, without surrounding white space."""
    window.fill()
    while window.grow():
        pass
    return window.text().strip()
