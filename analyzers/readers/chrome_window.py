"""A Chrome trace's text through a buffer of fixed size: metadata, then stretches of whole events, then metadata."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from perfscope.analyzers.readers import chrome_events
from perfscope.analyzers.readers.chrome_events import Stretch
from perfscope.analyzers.readers.chrome_metadata import fields_of
from perfscope.analyzers.readers.sources import ByteSource

SLICE_BYTES = 1 << 19
"""Small enough to stay in the processor's cache, large enough that the cost of a call does not count."""

LONGEST = 64 << 20
"""Metadata or an event beyond this many bytes is not read: nothing real comes near it."""

_ARRAY_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_OPENING = re.compile(rb"(?:\xef\xbb\xbf)?\s*([\[{])")
_GAP = re.compile(rb"[\s,]*")


class Window:
    """A buffer over unpacked bytes, with one spare byte at either end for the brackets around a stretch."""

    def __init__(self, source: ByteSource, size: int = SLICE_BYTES) -> None:
        self._source = source
        self._data = bytearray(size + 2)
        self._start = 1
        self._end = 1
        self.finished = False
        """Everything was read: nothing follows what the window holds."""

    def __len__(self) -> int:
        return self._end - self._start

    def text(self) -> bytes:
        """A copy of what the window holds."""
        return bytes(self._data[self._start : self._end])

    def skip(self, count: int) -> None:
        """Be done with the first ``count`` bytes."""
        self._start += count

    def skip_gap(self) -> None:
        """Be done with leading white space and commas."""
        match = _GAP.match(self._data, self._start, self._end)
        self._start = match.end() if match else self._start

    def fill(self) -> None:
        """Move what is left to the front and read until the window is full or the source ends."""
        self._move_to(self._data)

    def grow(self, longest: int = LONGEST) -> bool:
        """Double the window and fill it; False where it has ``longest`` bytes already or nothing is left to read."""
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
        """Length up to the end of the last event that another one follows; None where there is none."""
        reach = 4 << 10
        while True:
            begin = max(self._start, self._end - reach)
            if found := deque(chrome_events.BOUNDARY.finditer(self._data, begin, self._end), maxlen=1):
                return found[0].start() + 1 - self._start
            if begin == self._start:
                return None
            reach *= 8

    def decode(self, length: int | None, *, times_as_text: bool) -> Stretch:
        """Decode the first ``length`` bytes as events; None: all of them, the last of the file.

        The stretch's arguments are views of the window: good until it is filled again.
        """
        last = length is None
        end = self._end if length is None else self._start + length
        before, after = self._data[self._start - 1], self._data[end]
        self._data[self._start - 1] = ord("[")
        if not last:
            self._data[end] = ord("]")
        view = memoryview(self._data)[self._start - 1 : end + (not last)]
        stretch = chrome_events.decode(view, last=last, times_as_text=times_as_text)
        self._data[self._start - 1], self._data[end] = before, after
        # Without the bracket before it, nor the one put after it.
        stretch.consumed = min(stretch.consumed - 1, end - self._start)
        return stretch


def metadata_before_events(window: Window, longest: int = LONGEST) -> bytes | None:
    """Go to the first event. Returns the text before the event array, closed as an object; None if there is no array.

    Empty for a bare array.
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
            # Cut short here, another object is open: the key is that object's.
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


def read_events(window: Window, take: Callable[[Stretch], bool]) -> bool:
    """Give every stretch of events to ``take``, in order; is the array closed, or does the file end before it does?

    ``take`` returns False where it needs times as text; it gets the same stretch again with them, and all that follow.
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
        stretch = window.decode(length, times_as_text=times_as_text)
        if not take(stretch):
            times_as_text = True
            stretch = window.decode(length, times_as_text=True)
            take(stretch)
        window.skip(stretch.consumed)
        if stretch.closed or length is None:
            return stretch.closed
        if stretch.consumed == 0 and not window.grow():
            return False


def metadata_after_events(window: Window) -> bytes:
    """The text after the event array, all but its surrounding white space."""
    window.fill()
    while window.grow():
        pass
    return window.text().strip()
