"""Writes scalars for TensorBoard, without TensorBoard.

An event file is a series of records, each of them its length, the length's checksum, an ``Event`` message and that
message's checksum. Sources: ``tensorflow/core/lib/io/record_writer.cc``, ``tensorflow/core/util/event.proto`` and
``tensorflow/core/framework/summary.proto``; the checksum is CRC-32C (RFC 3720, appendix B.4), masked as TFRecord does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from perfscope.recording.whole import replacing
from perfscope.results.scalars import Curves, Point
from perfscope.trace.protobuf import double, integer, message, single, text

_VERSION: Final = "brain.Event:2"
_POLYNOMIAL: Final = 0x82F63B78
"""Castagnoli's, its bits reversed."""
_MASK: Final = 0xA282EAD8


def write(curves: Iterable[Curves], folder: Path) -> list[Path]:
    """Write each of ``curves`` into a file of its own below ``folder``; return the files.

    Each run is a folder, as TensorBoard wants it. What was written of the same run and source before is replaced, so
    that no step is there twice. Raises OSError where a file cannot be written.
    """
    files = []
    for each in curves:
        place = folder / each.run
        place.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads a run's files in the order of their names, and takes a number in front for a time.
        began = int(each.points[0].time_s) if each.points else 0
        path = place / f"events.out.tfevents.{began:010}.perfscope.{each.source}"
        for former in place.glob(f"events.out.tfevents.*.perfscope.{each.source}"):
            former.unlink()
        with replacing(path) as file:
            file.writelines(_records(each.points))
        files.append(path)
    return files


def _records(points: Iterable[Point]) -> Iterator[bytes]:
    points = list(points)
    began = points[0].time_s if points else 0.0
    yield _record(double(1, began) + text(3, _VERSION))
    for point in points:
        values = b"".join(message(1, text(1, tag) + single(2, value)) for tag, value in point.values.items())
        yield _record(double(1, point.time_s) + integer(2, point.step) + message(5, values))


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(crc32c(length))) + data + struct.pack("<I", _masked(crc32c(data)))


def _masked(checksum: int) -> int:
    return ((checksum >> 15 | checksum << 17) + _MASK) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """The checksum of RFC 3720; of ``b"123456789"`` it is 0xE3069283."""
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = _TABLE[(checksum ^ byte) & 0xFF] ^ checksum >> 8
    return checksum ^ 0xFFFFFFFF


def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_TABLE: Final = _table()
