"""The bytes of a trace file, unpacked while they are read; the packing is recognized by content.

Plain, gzip (also several members), zip, or Zstandard (also several frames).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from isal import igzip, isal_zlib

from perfscope.errors import TraceError

if TYPE_CHECKING:
    import zipfile

GZIP_MAGIC = b"\x1f\x8b"
ZIP_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_SKIPPABLE_MAGIC = b"\x2a\x4d\x18"
"""The last three bytes of four: parallel and seekable writers begin with such a frame."""

_PACKED_BYTES = 1 << 16
_DAMAGED: type[Exception] = isal_zlib.error  # type: ignore[assignment]  # its stub declares an instance
_GZIP_WINDOW = 31
"""zlib's spelling of "gzip header and checksum expected"."""


class ByteSource(Protocol):
    """A stream of unpacked bytes. Damage ends the stream early; it does not raise."""

    damage: str
    """What is wrong with the packing, as a phrase; empty if nothing is."""

    def readinto(self, view: memoryview) -> int:
        """Fill the front of ``view``. Returns the number of bytes written, 0 at the end."""
        ...


@contextmanager
def opened(path: Path) -> Iterator[ByteSource]:
    """Open a file of any of the known packings. Raises TraceError where it cannot be opened or unpacked at all."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            file.seek(0)
            if magic in ZIP_MAGICS:
                with _zip_member(path, file) as member:
                    yield _Zip(member)
            elif magic[:2] == GZIP_MAGIC:
                yield _Gzip(file)
            elif magic == ZSTD_MAGIC or magic[1:] == ZSTD_SKIPPABLE_MAGIC:
                yield _Zstd(file, _zstd_library(path))
            else:
                yield _Plain(file)
    except OSError as error:
        raise TraceError(
            f"{path}: cannot be read ({error.strerror or error}); check the path and its permissions"
        ) from error


def read_head(path: Path, count: int) -> bytes:
    """The first ``count`` unpacked bytes, fewer where the file is shorter. Raises TraceError as ``opened`` does."""
    with opened(path) as source:
        return _read_up_to(source, count)


def read_whole(path: Path, most: int, remedy: str) -> bytes:
    """The unpacked content, read in pieces: its size is not known before.

    Raises TraceError as ``opened`` does, and where it has more than ``most`` bytes, with the ``remedy``.
    """
    data, piece = bytearray(), memoryview(bytearray(1 << 20))
    with opened(path) as source:
        while got := source.readinto(piece):
            data += piece[:got]
            if len(data) > most:
                raise TraceError(f"{path}: larger than {most >> 20} MiB; {remedy}")
    return bytes(data)


def read_tail(path: Path, count: int, *, packed_limit: int) -> bytes | None:
    """The last ``count`` unpacked bytes; None where that means unpacking a file of more than ``packed_limit`` bytes."""
    with opened(path) as source:
        if isinstance(source, _Plain):
            source.skip_to_last(count)
            return _read_up_to(source, count)
        if path.stat().st_size > packed_limit:
            return None
        return _last_of(source, count)


def _read_up_to(source: ByteSource, count: int) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    filled = 0
    while filled < count and (got := source.readinto(view[filled:])):
        filled += got
    return bytes(view[:filled])


def _last_of(source: ByteSource, count: int) -> bytes:
    """Read to the end in two alternating buffers of ``count`` bytes, so that the last ``count`` are always there."""
    before, current = b"", b""
    while chunk := _read_up_to(source, count):
        before, current = current, chunk
    return (before + current)[-count:]


class _Plain:
    def __init__(self, file: BinaryIO) -> None:
        self.damage = ""
        self._file = file

    def skip_to_last(self, count: int) -> None:
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - count))

    def readinto(self, view: memoryview) -> int:
        return self._file.readinto(view)  # type: ignore[attr-defined, no-any-return]


class _Zip:
    def __init__(self, member: BinaryIO) -> None:
        self.damage = ""
        self._member = member
        self._damaged = _zip_errors()

    def readinto(self, view: memoryview) -> int:
        # Small reads: a failing checksum costs the last read.
        try:
            return self._member.readinto(view[:_PACKED_BYTES])  # type: ignore[attr-defined, no-any-return]
        except self._damaged:
            self.damage = "the zip archive is damaged"
            return 0


def _zip_errors() -> tuple[type[Exception], ...]:
    """What reading a damaged member raises."""
    import zipfile  # with what it imports takes longer than to open a trace, and few traces are packed so

    errors: tuple[type[Exception], ...] = (zipfile.BadZipFile, EOFError, _DAMAGED)
    with suppress(ImportError):  # some builds of Python are without it
        errors = (*errors, importlib.import_module("lzma").LZMAError)
    return errors


@contextmanager
def _zip_member(path: Path, file: BinaryIO) -> Iterator[BinaryIO]:
    """The one file in a zip archive."""
    import zipfile

    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError) as error:
        raise TraceError(f"{path}: the zip archive is cut short or damaged; copy it again") from error
    with archive:
        members = [entry for entry in archive.infolist() if not _is_clutter(entry)]
        if len(members) != 1:
            raise TraceError(f"{path}: the zip archive has {len(members)} files instead of one trace; unpack it first")
        try:
            member = archive.open(members[0])
        except (RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
            raise TraceError(
                f"{path}: the zip archive is damaged, encrypted or packed in another way; unpack it first"
            ) from error
        with member:
            yield member  # type: ignore[misc]


def _is_clutter(entry: zipfile.ZipInfo) -> bool:
    return entry.is_dir() or entry.filename.startswith("__MACOSX/")


class _Gzip:
    """Unpacks with a file object: pieces that must be copied cost twice as much. Damage is left to ``_DamagedGzip``."""

    def __init__(self, file: BinaryIO) -> None:
        self.damage = ""
        self._file = file
        self._whole = igzip.IGzipFile(fileobj=file, mode="rb")  # type: ignore[no-untyped-call]
        self._damaged: _DamagedGzip | None = None
        self._produced = 0

    def readinto(self, view: memoryview) -> int:
        if self._damaged is None:
            try:
                got = self._whole.readinto(view)
            except (EOFError, igzip.BadGzipFile, _DAMAGED):
                self._damaged = self._again(view)
            else:
                self._produced += got
                return got
        got = self._damaged.readinto(view)
        self.damage = self._damaged.damage
        return got

    def _again(self, scratch: memoryview) -> _DamagedGzip:
        """Unpacked from the start, as far as it was read before; ``scratch`` is overwritten."""
        self._file.seek(0)
        again = _DamagedGzip(self._file)
        left = self._produced
        while left and (got := again.readinto(scratch[:left])):
            left -= got
        return again


class _DamagedGzip:
    """Unpacks without a file object, because that discards what it has already unpacked when it meets damage."""

    def __init__(self, file: BinaryIO) -> None:
        self.damage = ""
        self._file = file
        self._member_start = 0
        self._produced = 0
        """Bytes unpacked from the current member."""
        self._decoder = isal_zlib.decompressobj(wbits=_GZIP_WINDOW)
        self._packed = b""
        self._salvaged = b""
        self._done = False

    def readinto(self, view: memoryview) -> int:
        while not self._done:
            if output := self._unpack(len(view)):
                view[: len(output)] = output
                return len(output)
        output, self._salvaged = self._salvaged[: len(view)], self._salvaged[len(view) :]
        view[: len(output)] = output
        return len(output)

    def _unpack(self, limit: int) -> bytes:
        if self._decoder.eof and not self._next_member():
            self._done = True
            return b""
        packed = self._packed or self._file.read(_PACKED_BYTES)
        try:
            # Also without input: the decoder may have output left that exceeded an earlier limit.
            output: bytes = self._decoder.decompress(packed, limit)
        except _DAMAGED:
            self.damage = "the gzip stream is damaged"
            self._salvaged = self._salvage()
            self._done = True
            return b""
        self._packed = self._decoder.unconsumed_tail
        self._produced += len(output)
        if not (packed or output or self._decoder.eof):
            self.damage = "the gzip stream ends before its end mark"
            self._done = True
        return output

    def _next_member(self) -> bool:
        """Continue with the next member; False at the end of the file."""
        rest: bytes = self._decoder.unused_data
        while not rest.strip(b"\0"):  # zero padding between members is allowed
            rest = self._file.read(_PACKED_BYTES)
            if not rest:
                return False
        rest = rest.lstrip(b"\0")
        if len(rest) < len(GZIP_MAGIC):
            rest += self._file.read(_PACKED_BYTES)
        if not rest.startswith(GZIP_MAGIC):
            self.damage = "bytes that are not gzip follow the gzip stream"
            return False
        self._member_start = self._file.tell() - len(rest)
        self._produced = 0
        self._packed = rest
        self._decoder = isal_zlib.decompressobj(wbits=_GZIP_WINDOW)
        return True

    def _salvage(self) -> bytes:
        """The rest of the current member up to its damage, after the bytes already returned.

        The decoder discards a whole call's output when the call fails, so unpack again, byte by byte near the end.
        """
        coarse_end = self._file.tell() - 2 * _PACKED_BYTES
        self._file.seek(self._member_start)
        decoder = isal_zlib.decompressobj(wbits=_GZIP_WINDOW)
        skip = self._produced
        outputs = []
        while not decoder.eof:
            piece = self._file.read(_PACKED_BYTES if self._file.tell() < coarse_end else 1)
            if not piece:
                break
            try:
                output: bytes = decoder.decompress(piece)
            except _DAMAGED:
                break
            outputs.append(output[skip:])
            skip = max(0, skip - len(output))
        return b"".join(outputs)


_ZSTD_MODULES = ("compression.zstd", "backports.zstd")
"""The standard library's (Python 3.14 on), and its backport."""


def _zstd_library(path: Path) -> Any:
    for name in _ZSTD_MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise TraceError(
        f"{path}: is packed with Zstandard, which this Python cannot unpack: pip install 'perfscope-profiler[zstd]', "
        "or unpack it first (zstd -d)"
    )


class _Zstd:
    """Unpacks frame after frame, one block at a time, so that everything before damage is returned."""

    _BLOCK_BYTES = 128 << 10
    """The largest unpacked size of a Zstandard block."""

    def __init__(self, file: BinaryIO, library: Any) -> None:
        self.damage = ""
        self._file = file
        self._library = library
        self._decoder = library.ZstdDecompressor()
        self._done = False

    def readinto(self, view: memoryview) -> int:
        while not self._done:
            if output := self._unpack(min(len(view), self._BLOCK_BYTES)):
                view[: len(output)] = output
                return len(output)
        return 0

    def _unpack(self, limit: int) -> bytes:
        packed = b""
        if self._decoder.eof:
            packed = self._decoder.unused_data or self._file.read(_PACKED_BYTES)
            self._done = not packed
            self._decoder = self._library.ZstdDecompressor()
        elif self._decoder.needs_input:
            packed = self._file.read(_PACKED_BYTES)
            if not packed:
                self._stop("the zstd stream ends before its end mark")
        if self._done:
            return b""
        try:
            output: bytes = self._decoder.decompress(packed, limit)
        except self._library.ZstdError:
            self._stop("the zstd stream is damaged")
            return b""
        return output

    def _stop(self, damage: str) -> None:
        self.damage = damage
        self._done = True
