"""The compiled scanner of slices of events (``_scan.c``), where it was built; without it Python decodes them all.

It makes columns of a slice without making objects of its events. A slice with anything unusual in it is not scanned:
``chrome_events`` decodes it, so that doubtful input is judged in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field
from functools import reduce
from operator import or_
from typing import Any, Final

import msgspec
import numpy as np

from perfscope.analyzers.readers import chrome_times
from perfscope.analyzers.readers.chrome_columns import ABSENT, DESCRIBED, ON_DEVICE, PLACED, ChromeColumns
from perfscope.analyzers.readers.chrome_events import ALLOCATOR, NUMBERS, Args, EventBatch, Instant
from perfscope.analyzers.readers.chrome_metadata import integer_id
from perfscope.analyzers.readers.chrome_repair import UNREADABLE
from perfscope.frozen import dataclass
from perfscope.trace.trace import NONE, Category, Int32, Int64

try:
    from perfscope.analyzers.readers import _scan
except ImportError:  # installed where there was no compiler
    _scan = None  # type: ignore[assignment]

IS_BUILT: Final = _scan is not None

_EVENT: Final = msgspec.json.Decoder(reduce(or_, NUMBERS))
_ARGS: Final = msgspec.json.Decoder(Args)
_ROWS_AT_ONCE: Final = 1 << 14
"""Put into the trace's columns together; of a slice there are a thousand or two."""
_DTYPES: Final = (np.int8, np.int32, np.int64, np.int64, np.int32, *(np.int64,) * 4, *(np.int32,) * 3)


@dataclass
class ScannedBatch(EventBatch):
    """A slice that was scanned. ``events`` are only those that are no ranges."""

    count: int = 0
    """Of all its events."""
    columns: tuple[bytearray, ...] = ()
    """Category, name, start, duration, track, device, stream, correlation, external id, shapes, types, concrete inputs;
    times in ns from the file's base, names, tracks and texts as numbers of the scanner's own. The bytes of arrays of
    ``_DTYPES``."""
    texts: tuple[list[bytes], ...] = ()
    """The JSON of names, tracks (``pid,tid``), shapes, types and inputs that no earlier slice had, in their order."""
    described: list[tuple[int, Args]] = field(default_factory=list)
    """(row in the slice, arguments) of collectives and of kernels of CUDA graphs."""
    steps: list[tuple[int, int]] = field(default_factory=list)
    """(row in the slice, number of the step)"""
    instants: list[Any] = field(default_factory=list)
    """The allocator's events, and their times."""
    instants_ns: Any = None


class SliceScanner:
    """Scans the slices of one trace, in their order."""

    def __init__(self, category_of: Callable[[str], int]) -> None:
        def code(text: bytes) -> int:
            return category_of(msgspec.json.decode(text))

        self._scanner = _scan.Scanner(code, _mask(PLACED), _mask(DESCRIBED), Category.PYTHON, ABSENT)

    def scan(self, data: bytearray, start: int, stop: int, *, last: bool) -> ScannedBatch | None:
        """The events in ``data[start:stop]``, as ``chrome_events.decode``; None where Python must decode them."""
        found = self._scanner.scan(data, start, stop, last)
        if found is None:
            return None
        consumed, closed, count, columns, texts, others, described, steps = found
        try:
            events = [_EVENT.decode(text) for text in others]
            arguments = [(row, _ARGS.decode(text)) for row, text in described]
        except UNREADABLE:
            self._scanner.undo()
            return None
        instants = [event for event in events if type(event) is Instant and event.name == ALLOCATOR]
        instants_ns = chrome_times.from_numbers([event.ts for event in instants])
        if instants_ns is None:
            self._scanner.undo()
            return None
        return ScannedBatch(
            events, consumed, closed, count=count, columns=columns, texts=texts, described=arguments, steps=steps,
            instants=instants, instants_ns=instants_ns,
        )  # fmt: skip


class ScannedColumns:
    """Adds scanned slices to a trace's columns, with its numbers of texts and threads instead of the scanner's."""

    def __init__(self, columns: ChromeColumns) -> None:
        self._columns = columns
        self._names = _Numbers()
        self._threads = _Numbers()
        self._places: dict[str, _Numbers] = {"device": _Numbers(), "stream": _Numbers()}
        """What stands for them where the arguments lack them: the process and the thread."""
        self._described = (_Numbers(), _Numbers(), _Numbers())
        self._waiting: list[tuple[bytearray, ...]] = []
        """Columns of slices, to be put into the trace together: numpy takes as long for an array as small as one."""
        self._waiting_rows = 0

    @property
    def rows(self) -> int:
        """Events of the trace so far."""
        return self._columns.rows + self._waiting_rows

    def add(self, batch: ScannedBatch) -> None:
        """Append a slice. Texts get their numbers in the order in which ``ChromeColumns.add`` gives them."""
        names, tracks, *texts = batch.texts
        self._add_tracks(tracks)
        strings = self._columns.strings
        self._names.extend(strings.ids[msgspec.json.decode(text)] for text in names)
        for numbers, new in zip(self._described, texts, strict=True):
            numbers.extend(strings.ids_of_json[text] for text in new)
        category = batch.columns[0]
        self._columns.describe(self.rows, category, batch.described, batch.steps)
        self._waiting.append(batch.columns)
        self._waiting_rows += len(category)
        if self._waiting_rows >= _ROWS_AT_ONCE:
            self.settle()

    def settle(self) -> None:
        """Put the slices so far into the trace's columns, before others are appended to these."""
        if not self._waiting:
            return
        joined = [b"".join(parts) for parts in zip(*self._waiting, strict=True)]
        self._waiting, self._waiting_rows = [], 0
        columns: list[Any] = [np.frombuffer(column, dtype) for column, dtype in zip(joined, _DTYPES, strict=True)]
        category, name, start, duration, track, device, stream, correlation, external, *described = columns
        on_device = ON_DEVICE[category]
        device = self._placed("device", device, track, on_device)
        stream = self._placed("stream", stream, track, on_device)
        self._columns.append((
            category, self._names.of(name), start, duration, self._threads.of(track),
            np.clip(device, NONE, np.iinfo(np.int32).max).astype(np.int32), stream, correlation, external,
            *(numbers.of(column) for numbers, column in zip(self._described, described, strict=True)),
        ))  # fmt: skip

    def _add_tracks(self, tracks: list[bytes]) -> None:
        pairs = [msgspec.json.decode(b"[" + track + b"]") for track in tracks]
        self._threads.extend(self._columns.track(process, thread) for process, thread in pairs)
        self._places["device"].extend(integer_id(process) for process, _ in pairs)
        self._places["stream"].extend(integer_id(thread) for _, thread in pairs)

    def _placed(self, place: str, given: Int64, track: Int32, on_device: Any) -> Int64:
        missing = on_device & (given == NONE)
        return np.where(missing, self._places[place].wide[track], given) if missing.any() else given


class _Numbers:
    """The scanner's numbers of texts to the trace's; NONE stays NONE."""

    def __init__(self) -> None:
        self._ids: list[int] = []

    def extend(self, ids: Iterable[int]) -> None:
        """The next numbers of the scanner mean these."""
        self._ids.extend(ids)

    @property
    def wide(self) -> Int64:
        """All of them; the last one is for NONE, which as an index is the last."""
        return np.array([*self._ids, NONE], dtype=np.int64)

    def of(self, numbers: Int32) -> Int32:
        """The trace's numbers."""
        return self.wide.astype(np.int32)[numbers]


def _mask(flags: Any) -> int:
    return sum(1 << int(at) for at in np.flatnonzero(flags))
