"""The files of a recording as they grow, on disk or at a URL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast

from perfscope.recording.remote import is_remote

_THREADS: Final = 16
"""Files read at once: shared file systems and object stores answer each in milliseconds."""

_FEW: Final = 32
"""Files that are read one after the other."""

_CHANGES: Final = ("mtime", "LastModified", "last_modified", "updated", "ETag", "etag")
"""What stores call the mark that changes with a file's content."""


class Entry(NamedTuple):
    """A file as the folder lists it."""

    size: int
    version: str
    """Changes when the file is replaced by another of the same size."""


class Piece(NamedTuple):
    """The part of a file to read."""

    name: str
    start: int
    end: int


class Source(Protocol):
    """A recording's folder, which may not be there yet."""

    def entries(self) -> dict[str, Entry] | None:
        """Name -> file; None where there is no such folder. Raises OSError where it cannot be listed."""

    def read(self, piece: Piece) -> bytes:
        """A part of a file; less where the file ends before. Raises OSError."""


class LocalSource:
    """A folder on a file system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def entries(self) -> dict[str, Entry] | None:
        """Name -> file; None where there is no such folder."""
        found = {}
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    try:
                        status = entry.stat()
                    except FileNotFoundError:  # replaced meanwhile
                        continue
                    found[entry.name] = Entry(status.st_size, str(status.st_mtime_ns))
        except FileNotFoundError:
            return None
        return found

    def read(self, piece: Piece) -> bytes:
        """A part of a file."""
        with (self._folder / piece.name).open("rb") as file:
            file.seek(piece.start)
            return file.read(piece.end - piece.start)


class RemoteSource:
    """A folder at a URL, by way of fsspec. One listing says which files have grown."""

    def __init__(self, folder: Path) -> None:
        remote = cast("Any", folder)
        self._files, self._path = remote.fs, remote.path

    def entries(self) -> dict[str, Entry] | None:
        """Name -> file; None where there is no such folder: object stores have none without a file in it."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._path, detail=True)
        except FileNotFoundError:
            return None
        except Exception as error:  # each store has its own; the network may be back at the next look
            raise OSError(f"{type(error).__name__}: {error}") from error
        return {
            entry["name"].rstrip("/").rpartition("/")[2]: Entry(
                int(entry.get("size") or 0), "".join(str(entry[name]) for name in _CHANGES if name in entry)
            )
            for entry in found
        }

    def read(self, piece: Piece) -> bytes:
        """A part of a file."""
        try:
            data: bytes = self._files.cat_file(f"{self._path}/{piece.name}", start=piece.start, end=piece.end)
        except Exception as error:
            raise OSError(f"{piece.name}: {type(error).__name__}: {error}") from error
        return data


def source_of(folder: Path) -> Source:
    """The source for a path, remote (``perfscope.recording.remote.opened``) or not."""
    return RemoteSource(folder) if is_remote(folder) else LocalSource(folder)


def read_all(source: Source, pieces: Iterable[Piece], take: Callable[[Piece, bytes], None]) -> None:
    """Read pieces, many at once where there are many, and hand each over; one that cannot be read now is left for the
    next time.
    """
    pieces = list(pieces)

    def read(piece: Piece) -> bytes | None:
        try:
            return source.read(piece)
        except OSError:
            return None

    if len(pieces) <= _FEW:
        for piece in pieces:
            if (data := read(piece)) is not None:
                take(piece, data)
        return
    with ThreadPoolExecutor(_THREADS) as threads:
        for piece, data in zip(pieces, threads.map(read, pieces), strict=True):
            if data is not None:
                take(piece, data)


class Tail:
    """How far a growing file has been read."""

    def __init__(self, first: int = 0) -> None:
        self.offset = first
        """Bytes before it are done with."""
        self._rest = b""

    def piece(self, name: str, size: int, most: int) -> Piece | None:
        """What is new in the file, at most ``most`` bytes of it; None where nothing is.

        A file that shrank was replaced: it is read from its beginning, and ``offset`` is 0 then.
        """
        if size < self.offset:
            self.offset, self._rest = 0, b""
        return Piece(name, self.offset, min(size, self.offset + most)) if size > self.offset else None

    def take(self, data: bytes) -> bytes:
        """Count ``data`` as read; with what was left over before it."""
        self.offset += len(data)
        whole, self._rest = self._rest + data, b""
        return whole

    def keep(self, rest: bytes) -> None:
        """The end of what was taken is not whole: it comes again, before what is read next."""
        self._rest = rest
