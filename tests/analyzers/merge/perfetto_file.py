"""Reads a file in Perfetto's format as its trace processor does, and refuses what that would drop in silence.

Knows the wire format and the fields' numbers by itself, so that it shares no mistake with what writes them. The rules
are those of ``track_event_tokenizer.cc``, ``track_event_parser.cc`` and ``flow_tracker.cc``: packets are sorted by
time, stable among equals; an end closes what was opened last on its track; an arrow leads from the last slice that bore
its number to the next.
"""

from __future__ import annotations

import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4


@dataclass(eq=False)
class Track:
    uuid: int
    name: str
    parent: int
    place: int
    is_counter: bool
    description: str
    slices: list[Slice] = field(default_factory=list)
    values: list[tuple[int, float]] = field(default_factory=list)


@dataclass(eq=False)
class Slice:
    name: str
    start_ns: int
    end_ns: int
    depth: int
    track: Track
    args: dict[str, object]
    inside: Slice | None

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass
class PerfettoFile:
    realtime_ns: int
    tracks: dict[int, Track]
    arrows: list[tuple[Slice, Slice]]

    @property
    def slices(self) -> list[Slice]:
        return [each for track in self.tracks.values() for each in track.slices]

    def top(self, beginning: str) -> Track:
        """The outermost track of this name, or that begins so."""
        (track,) = [each for each in self.tracks.values() if each.parent == 0 and each.name.startswith(beginning)]
        return track

    def below(self, top: str, name: str) -> list[Track]:
        """Tracks of a name (or a beginning of one) directly below an outermost one; lanes of one name are several."""
        parent = self.top(top).uuid
        return [each for each in self.tracks.values() if each.parent == parent and each.name.startswith(name)]

    def slices_of(self, top: str, name: str) -> list[Slice]:
        """Outermost slices of all lanes, by time."""
        found = [each for track in self.below(top, name) for each in track.slices if each.depth == 0]
        return sorted(found, key=lambda each: (each.start_ns, each.end_ns))


def read(path: Path) -> PerfettoFile:
    strings: dict[int, tuple[dict[int, str], dict[int, str], dict[int, str]]] = {}
    tracks: dict[int, Track] = {}
    events: list[tuple[int, int, dict[int, list[int | bytes]]]] = []
    realtime = -1
    for packet in _packets(path.read_bytes()):
        sequence = _number(packet, 10)
        assert sequence > 0, "events without a sequence are dropped"
        if 12 in packet:
            assert _number(packet, 13) & 1, "strings count only after the state was cleared"
            assert sequence not in strings
            table = fields(_bytes(packet, 12))
            strings[sequence] = (_interned(table, 2), _interned(table, 3), _interned(table, 29))
        if 60 in packet:
            track = _track(fields(_bytes(packet, 60)))
            assert track.uuid not in tracks, "a track is declared once"
            assert track.uuid, "track 0 is everybody's"
            tracks[track.uuid] = track
        if 6 in packet:
            snapshot = fields(_bytes(packet, 6))
            clocks = [fields(each) for each in snapshot[1] if isinstance(each, bytes)]
            at = {_number(clock, 1): _number(clock, 2) for clock in clocks}
            assert at[6] == 0, "times are BOOTTIME's"
            realtime = at[1]
        if 11 in packet:
            assert sequence in strings, "strings come before what refers to them"
            assert _number(packet, 13) & 2, "marks that it refers to strings"
            events.append((_number(packet, 8), sequence, fields(_bytes(packet, 11))))
    assert all(track.parent in tracks for track in tracks.values() if track.parent)
    return PerfettoFile(realtime, tracks, _imported(events, strings, tracks))


def _imported(
    events: list[tuple[int, int, dict[int, list[int | bytes]]]],
    strings: dict[int, tuple[dict[int, str], dict[int, str], dict[int, str]]],
    tracks: dict[int, Track],
) -> list[tuple[Slice, Slice]]:
    open_: dict[int, list[Slice]] = defaultdict(list)
    flows: dict[int, Slice] = {}
    met: dict[int, int] = defaultdict(int)
    arrows = []
    for time, sequence, event in sorted(events, key=lambda each: each[0]):
        track = tracks[_number(event, 11)]
        kind = _number(event, 9)
        if kind == COUNTER:
            assert track.is_counter
            track.values.append((time, struct.unpack("<d", struct.pack("<Q", _number(event, 44)))[0]))
            continue
        assert not track.is_counter
        stack = open_[track.uuid]
        if kind == END:
            current = stack.pop()
            current.end_ns = time
        else:
            names, arg_names, texts = strings[sequence]
            args = dict(_arg(each, arg_names, texts) for each in event.get(4, []) if isinstance(each, bytes))
            inside = stack[-1] if stack else None
            current = Slice(names[_number(event, 10)], time, time, len(stack), track, args, inside)
            track.slices.append(current)
            if kind == BEGIN:
                stack.append(current)
        for flow in event.get(47, []):
            assert isinstance(flow, int)
            met[flow] += 1
            if flow in flows:
                arrows.append((flows[flow], current))
            flows[flow] = current
        for flow in event.get(48, []):
            assert isinstance(flow, int)
            met[flow] += 1
            if flow in flows:
                arrows.append((flows.pop(flow), current))
    assert not any(open_.values()), "a slice is never closed"
    assert set(met.values()) <= {2}, "an arrow has two ends"
    return arrows


def _packets(data: bytes) -> Iterator[dict[int, list[int | bytes]]]:
    for number, values in fields(data).items():
        assert number == 1, "a trace consists of packets"
        for value in values:
            assert isinstance(value, bytes)
            packet = fields(value)
            if 50 in packet:
                yield from _packets(zlib.decompress(_bytes(packet, 50)))
            else:
                yield packet


def _track(found: dict[int, list[int | bytes]]) -> Track:
    return Track(
        uuid=_number(found, 1),
        name=_bytes(found, 2).decode(),
        parent=_number(found, 5) if 5 in found else 0,
        place=_number(found, 12) if 12 in found else 0,
        is_counter=8 in found,
        description=_bytes(found, 14).decode() if 14 in found else "",
    )


def _interned(table: dict[int, list[int | bytes]], number: int) -> dict[int, str]:
    entries = [fields(each) for each in table.get(number, []) if isinstance(each, bytes)]
    assert all(_number(entry, 1) > 0 for entry in entries), "0 is no string's number"
    return {_number(entry, 1): _bytes(entry, 2).decode() for entry in entries}


def _arg(data: bytes, names: dict[int, str], texts: dict[int, str]) -> tuple[str, object]:
    found = fields(data)
    name = names[_number(found, 1)]
    if 17 in found:
        return name, texts[_number(found, 17)]
    if 5 in found:
        return name, struct.unpack("<d", struct.pack("<Q", _number(found, 5)))[0]
    return name, bool(_number(found, 2)) if 2 in found else _number(found, 4)


def _number(found: dict[int, list[int | bytes]], number: int) -> int:
    (value,) = found[number]
    assert isinstance(value, int)
    return value


def _bytes(found: dict[int, list[int | bytes]], number: int) -> bytes:
    (value,) = found[number]
    assert isinstance(value, bytes)
    return value


def fields(data: bytes) -> dict[int, list[int | bytes]]:
    """Field number -> its values, in order: integers (of whatever width) and bytes."""
    found: dict[int, list[int | bytes]] = defaultdict(list)
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            found[tag >> 3].append(value)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
            found[tag >> 3].append(int.from_bytes(data[at : at + size], "little"))
            at += size
        else:
            assert wire == 2, f"wire type {wire}"
            size, at = _varint(data, at)
            assert at + size <= len(data)
            found[tag >> 3].append(data[at : at + size])
            at += size
    return dict(found)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        assert shift < 70
