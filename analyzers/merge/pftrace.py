"""Writes Perfetto's trace format: tracks, slices that nest, arrows between slices, counters.

A trace is a series of packets. Those of one ``Sequence`` share a table of strings, so that a name costs two or three
bytes each time it is used; packets are written compressed, some 100 KB at a time, as the tracing service itself does.
Source of the fields' numbers: ``protos/perfetto/trace`` of github.com/google/perfetto; of the rules (which slices
nest, how arrows bind): ``docs/reference/synthetic-track-event.md`` there.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from perfscope.frozen import dataclass
from perfscope.recording import paths
from perfscope.trace.protobuf import double, fixed64, integer, message, text
from perfscope.trace.trace import Bool, Float64, Int64

Value = str | int | float | bool
Args = Mapping[str, Value]

_PACKET: Final = 1
_CLOCKS, _TIMESTAMP, _SEQUENCE, _EVENT, _INTERNED, _FLAGS = 6, 8, 10, 11, 12, 13
_COMPRESSED, _TRACK, _FIRST = 50, 60, 87
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_STATE_CLEARED, _NEEDS_STATE = 1, 2
_REALTIME, _BOOTTIME = 1, 6
_EXPLICIT_ORDER: Final = 3
_CHUNK_BYTES: Final = 1 << 19
_COMPRESSION: Final = 6
"""Level of zlib. isal would be faster, but its output is a fifth larger, and reading the ranks takes far longer."""

TIME_BYTES: Final = 7
"""Bytes of each timestamp: numpy can write fields of a fixed width; 49 bits are six days of ns."""
_UUID_BYTES: Final = 5
_NAME_BYTES: Final = 4

ROUNDING_NS: Final = 1_000
"""Profilers that write whole µs let neighbours overlap by up to 1 µs; such an overlap is cut off."""


@dataclass(frozen=True)
class CounterUnit:
    """The unit of a counter: one of Perfetto's own, or a name where Perfetto has none."""

    number: int = 0
    name: str = ""


COUNT: Final = CounterUnit(2)
BYTES: Final = CounterUnit(3)
PER_CENT: Final = CounterUnit(0, "%")


@dataclass(frozen=True, eq=False)
class Slices:
    """Slices of one track in any order, ns since the trace's zero: parallel arrays and lists.

    ``args`` are shown where the slice is selected. An arrow goes from the slice that begins with a flow's number to the
    slice that begins (``begin_flows``) or ends (``end_flows``) with the same number later. ``around`` is the index of
    the slice directly around each, -1 where that is left to their times.
    """

    start_ns: Int64
    end_ns: Int64
    names: Sequence[str]
    args: Sequence[Args] | None = None
    begin_flows: Sequence[Sequence[int]] | None = None
    end_flows: Sequence[Sequence[int]] | None = None
    around: Int64 | None = None

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, eq=False)
class Stacked:
    """Lane and depth of each range: parallel arrays in the order of the ranges.

    ``depth`` is the number of enclosing ranges on its lane. ``instant`` marks ranges without a duration.
    """

    lane: Int64
    depth: Int64
    start_ns: Int64
    end_ns: Int64
    instant: Bool
    lanes: int


class PacketSequence:
    """Packets that share a table of strings. ``number``, at least 1, is unique in the file."""

    def __init__(self, number: int) -> None:
        self._id = integer(_SEQUENCE, number)
        self._tail = self._id + integer(_FLAGS, _NEEDS_STATE)
        self._names: dict[str, int] = {}
        self._arg_names: dict[str, int] = {}
        self._texts: dict[str, int] = {}
        self._tracks: list[bytes] = []
        self._events: list[bytes] = []

    def track(self, uuid: int, name: str, *, parent: int = 0, place: int = 0, description: str = "") -> None:
        """Declare a track for slices below ``parent`` (0: outermost), at position ``place`` among its siblings."""
        self._declare(uuid, name, parent, place, description, b"")

    def counter_track(self, uuid: int, name: str, *, parent: int, place: int, unit: CounterUnit) -> None:
        """Declare a track for a counter."""
        content = integer(3, unit.number) + (text(6, unit.name) if unit.name else b"")
        self._declare(uuid, name, parent, place, "", message(8, content))

    def slice_track(
        self, uuid: int, name: str, slices: Slices, *, parent: int, place: int, description: str = ""
    ) -> None:
        """Declare a track and write its slices.

        Slices that overlap without nesting go to further tracks, with the ids after ``uuid`` and the same name, which
        viewers show as one track.
        """
        placed = stacked(slices.start_ns, slices.end_ns, slices.around)
        for lane in range(placed.lanes):
            self.track(uuid + lane, name, parent=parent, place=place, description=description)
        begins = self._begins(uuid, slices, placed)
        ends = self._ends(uuid, slices, placed)
        self._in_order(placed, begins, ends)

    def counter(self, uuid: int, time_ns: Int64, values: Float64) -> None:
        """Write a counter's values, each valid until the next."""
        for at, value in zip(time_ns.tolist(), values.tolist(), strict=True):
            body = integer(9, _COUNTER) + integer(11, uuid) + double(44, value)
            self._events.append(message(_PACKET, integer(_TIMESTAMP, at) + message(_EVENT, body) + self._tail))

    def chunks(self) -> Iterator[bytes]:
        """Everything written, compressed; strings come before the packets that refer to them."""
        strings = message(_INTERNED, _table(2, self._names) + _table(3, self._arg_names) + _table(29, self._texts))
        head = message(_PACKET, integer(_FLAGS, _STATE_CLEARED) + strings + integer(_FIRST, 1) + self._id)
        pending: list[bytes] = []
        size = 0
        for packet in itertools.chain([head], self._tracks, self._events):
            pending.append(packet)
            size += len(packet)
            if size >= _CHUNK_BYTES:
                yield _compressed(pending)
                pending, size = [], 0
        if pending:
            yield _compressed(pending)

    def _declare(self, uuid: int, name: str, parent: int, place: int, description: str, more: bytes) -> None:
        content = integer(1, uuid) + text(2, name) + integer(11, _EXPLICIT_ORDER) + integer(12, place) + more
        content += integer(5, parent) if parent else b""
        content += text(14, description) if description else b""
        self._tracks.append(message(_PACKET, message(_TRACK, content) + self._id))

    def _begins(self, uuid: int, slices: Slices, placed: Stacked) -> list[bytes]:
        names = np.array([self._names.setdefault(name, len(self._names) + 1) for name in slices.names], dtype=np.int64)
        kind = np.where(placed.instant, _INSTANT, _BEGIN)
        event = [
            _fixed(9, kind, 1),
            _fixed(10, names, _NAME_BYTES),
            _fixed(11, uuid + placed.lane, _UUID_BYTES),
        ]
        more = [self._annotations(args) for args in slices.args] if slices.args is not None else None
        if slices.begin_flows is not None:
            flows = [b"".join(fixed64(47, flow) for flow in each) for each in slices.begin_flows]
            more = flows if more is None else [args + each for args, each in zip(more, flows, strict=True)]
        return self._packets(slices.start_ns, event, more)

    def _ends(self, uuid: int, slices: Slices, placed: Stacked) -> list[bytes]:
        event = [
            _fixed(9, np.full(len(slices), _END, dtype=np.int64), 1),
            _fixed(11, uuid + placed.lane, _UUID_BYTES),
        ]
        more = None
        if slices.end_flows is not None:
            more = [b"".join(fixed64(48, flow) for flow in each) for each in slices.end_flows]
        return self._packets(placed.end_ns, event, more)

    def _packets(self, time_ns: Int64, event: list[NDArray[np.uint8]], more: list[bytes] | None) -> list[bytes]:
        """A packet for each row of the fields in ``event``, followed by its entry of ``more``."""
        stamps = _fixed(_TIMESTAMP, time_ns, TIME_BYTES)
        bodies = np.concatenate(event, axis=1)
        if more is None:
            return _lines(self._laid_out(stamps, bodies))
        return [
            message(_PACKET, stamp + message(_EVENT, body + rest) + self._tail)
            for stamp, body, rest in zip(_lines(stamps), _lines(bodies), more, strict=True)
        ]

    def _laid_out(self, stamps: NDArray[np.uint8], bodies: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """(packets, bytes): many packets of one length at once."""

        def alike(content: bytes) -> NDArray[np.uint8]:
            return np.tile(np.frombuffer(content, dtype=np.uint8), (len(stamps), 1))

        event = alike(message(_EVENT, b"\0" * bodies.shape[1])[: -bodies.shape[1]])
        content = np.concatenate((stamps, event, bodies, alike(self._tail)), axis=1)
        head = alike(message(_PACKET, b"\0" * content.shape[1])[: -content.shape[1]])
        return np.concatenate((head, content), axis=1)

    def _in_order(self, placed: Stacked, begins: list[bytes], ends: list[bytes]) -> None:
        """At the same time, ends come before starts, and outer slices start before inner ones."""
        lasting = np.flatnonzero(~placed.instant)
        time = np.concatenate((placed.start_ns, placed.end_ns[lasting]))
        turn = np.concatenate((np.where(placed.instant, 2, 1), np.zeros(len(lasting), dtype=np.int64)))
        depth = np.concatenate((placed.depth, -placed.depth[lasting]))
        packets = begins + [ends[index] for index in lasting.tolist()]
        self._events += [packets[index] for index in np.lexsort((depth, turn, time)).tolist()]

    def _annotations(self, args: Args) -> bytes:
        return b"".join(message(4, self._annotation(name, value)) for name, value in args.items())

    def _annotation(self, name: str, value: Value) -> bytes:
        key = integer(1, self._arg_names.setdefault(name, len(self._arg_names) + 1))
        if isinstance(value, bool):
            return key + integer(2, value)
        if isinstance(value, int):
            return key + integer(4, value)
        if isinstance(value, float):
            return key + double(5, value)
        return key + integer(17, self._texts.setdefault(value, len(self._texts) + 1))


def header(title: str, uuid: int, zero_ns: int) -> bytes:
    """The first packets of a file, uncompressed: the outermost track, whose name marks a merged file, and
    the zero of its times (ns since the epoch).
    """
    clocks = b"".join(
        message(1, integer(1, clock) + integer(2, moment)) for clock, moment in ((_BOOTTIME, 0), (_REALTIME, zero_ns))
    )
    track = integer(1, uuid) + text(2, f"{paths.MERGED_MARK.decode()}: {title}") + integer(11, _EXPLICIT_ORDER)
    contents = (message(_TRACK, track), message(_CLOCKS, clocks + integer(2, _BOOTTIME)))
    return b"".join(message(_PACKET, content + integer(_SEQUENCE, 1)) for content in contents)


def _table(field: int, strings: Mapping[str, int]) -> bytes:
    return b"".join(message(field, integer(1, number) + text(2, string)) for string, number in strings.items())


def _compressed(packets: list[bytes]) -> bytes:
    return message(_PACKET, message(_COMPRESSED, zlib.compress(b"".join(packets), _COMPRESSION)))


def _fixed(field: int, values: Int64, width: int) -> NDArray[np.uint8]:
    """(values, 1 + width) bytes: the field's tag and each value as a varint, padded to ``width`` bytes."""
    out = np.empty((len(values), 1 + width), dtype=np.uint8)
    out[:, 0] = field << 3
    for place in range(width):
        out[:, 1 + place] = (values >> (7 * place)) & 0x7F | (0x80 if place + 1 < width else 0)
    return out


def _lines(matrix: NDArray[np.uint8]) -> list[bytes]:
    """Each row of a matrix as bytes."""
    width = matrix.shape[1]
    raw = matrix.tobytes()
    return [raw[at : at + width] for at in range(0, len(raw), width)]


def stacked(start_ns: Int64, end_ns: Int64, around: Int64 | None = None) -> Stacked:
    """Put each range on the first lane in which it nests: inside the ranges that are open there, or after them.

    ``around``, where given, is the index of the enclosing range, whose lane is used; -1 where it is not known.

    Example: [0, 10), [2, 4), [3, 12) go to lanes 0, 0, 1; the second lies at depth 1.
    """
    size = len(start_ns)
    lane, depth = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
    end = end_ns.copy()
    stacks: list[list[int]] = [[]]
    starts, ends = start_ns.tolist(), end_ns.tolist()
    for index in np.lexsort((-end_ns, start_ns)).tolist():
        begin = starts[index]
        known = int(lane[around[index]]) if around is not None and around[index] >= 0 else None
        for number, stack in enumerate(stacks):
            if (known is None or known == number) and _fits(stack, index, begin, ends):
                break
        else:
            number, stack = len(stacks), []
            stacks.append(stack)
        lane[index], depth[index] = number, len(stack)
        stack.append(index)
    end[:] = ends
    return Stacked(lane, depth, start_ns, end, end <= start_ns, len(stacks))


def _fits(stack: list[int], index: int, begin: int, ends: list[int]) -> bool:
    """Close the ranges that end by ``begin``; does the range nest in the rest? Overlaps by rounding are cut."""
    while stack:
        top = ends[stack[-1]]
        over = ends[index] - top
        if top <= begin or (over > 0 and top - begin <= ROUNDING_NS):
            ends[stack[-1]] = min(top, begin)
            stack.pop()
        elif over <= 0:
            return True
        elif over <= ROUNDING_NS:
            ends[index] = top
            return True
        else:
            return False
    return True
