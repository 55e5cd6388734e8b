"""The cache: files named after the content that they were made from, in a folder of bounded size.

An entry is one file, whose name contains a content key. It is written under a temporary name and renamed when complete.
Two processes that write the same entry write the same bytes, so no lock is needed; the temporary file of a killed
process is never read. An entry that cannot be read is removed and made again. Where the cache cannot be written, the
next analysis takes longer, and nothing else changes.

``PERFSCOPE_CACHE`` is ``off`` or another folder, ``PERFSCOPE_CACHE_SIZE`` the bound, such as ``20GB``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Final, TypeVar

from perfscope._version import __version__
from perfscope.execution.machine import size_of
from perfscope.frozen import dataclass

FOLDER_VARIABLE: Final = "PERFSCOPE_CACHE"
SIZE_VARIABLE: Final = "PERFSCOPE_CACHE_SIZE"
OFF: Final = "off"
DEFAULT_BYTES: Final = 5 * 1000**3

_SUBFOLDER: Final = "perfscope-1"
"""Inside whatever folder the user names, so that nothing but entries is ever removed; the number is the layout's."""
_KEY_BYTES: Final = 20
_KEY: Final = re.compile(r"[0-9a-f]{40}")
_CHUNK_BYTES: Final = 1 << 20
_SETTLED_NS: Final = 3_000_000_000
"""A file that was written to less than this ago may change again within one tick of its file system's clock (2 s on the
coarsest), without a change of its times."""
_ABANDONED_S: Final = 3600.0
"""A temporary file older than this belongs to a process that was killed."""
_UNTRIMMED_SHARE: Final = 0.02
"""A process checks the cache's size again after writing this share of the bound."""

T = TypeVar("T")


@dataclass(frozen=True)
class FileState:
    """A file's identity in the file system: while it is the same, some time apart, so is the content."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int
    """When content or times last changed; unlike ``modified_ns`` no program can set it back."""

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The state of a file now. Raises OSError."""
        stat = path.stat()
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """Whether the last change is long enough ago for the file's times to show the next one."""
        if sys.platform == "win32":  # there st_ctime is when the file was created
            return False
        return time.time_ns() - max(self.modified_ns, self.changed_ns) > _SETTLED_NS


@dataclass(frozen=True)
class Content:
    """A file's content, as it was when it was hashed."""

    path: Path
    key: str
    """40 hexadecimal digits: the SHA-1 of every byte."""
    state: FileState
    settled: bool

    def is_current(self) -> bool:
        """Whether the file still holds that content: checked after reading it, before a result is stored."""
        try:
            if FileState.of(self.path) != self.state:
                return False
            return self.settled or _hash(self.path) == self.key
        except OSError:
            return False


class Cache:
    """One folder of entries. No method raises because of the folder or its files."""

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_BYTES) -> None:
        self.folder = folder / _SUBFOLDER
        self.limit_bytes = limit_bytes
        self._written_bytes = 0

    @classmethod
    def from_environment(cls) -> Cache | None:
        """The user's cache, None where it is turned off. Raises PerfscopeError for a size that cannot be read."""
        setting = os.environ.get(FOLDER_VARIABLE, "")
        if setting == OFF:
            return None
        limit = _limit()
        try:
            return cls(Path(setting).expanduser() if setting else _default_folder(), limit)
        except RuntimeError:  # this user's home is not known
            return None

    def content(self, path: Path) -> Content | None:
        """Hash a file, or recall its hash if it has not changed; None for a file that cannot be read or is changing."""
        if (known := self.known_content(path)) is not None:
            return known
        try:
            state = FileState.of(path)
            settled = state.settled
            key = _hash(path)
            if FileState.of(path) != state:
                return None
        except OSError:
            return None
        content = Content(path, key, state, settled)
        if settled:
            self.remember(_identity(path, state), key)
        return content

    def known_content(self, path: Path) -> Content | None:
        """The content of a file that was hashed before and has not changed since, without reading it."""
        try:
            state = FileState.of(path)
        except OSError:
            return None
        key = self.recall(_identity(path, state)) if state.settled else None
        return Content(path, key, state, settled=True) if key else None

    def remember(self, identity: str, key: str) -> None:
        """Store the content key for ``identity``, which must change whenever the content does."""
        self.save(_note(identity), lambda path: path.write_text(key, encoding="ascii"))

    def recall(self, identity: str) -> str | None:
        """The content key stored for ``identity``; None when there is none."""
        key = self.load(_note(identity), lambda path: path.read_text(encoding="ascii"))
        return key if key is not None and _KEY.fullmatch(key) else None

    def load(self, name: str, read: Callable[[Path], T]) -> T | None:
        """Read an entry; None when it is not there. One that ``read`` fails on is removed."""
        path = self.folder / name
        try:
            result = read(path)
        except FileNotFoundError:
            return None
        except Exception:  # a damaged file may raise anything
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # last used now
            os.utime(path)
        return result

    def save(self, name: str, write: Callable[[Path], object]) -> None:
        """Make an entry: ``write`` gets the path to write it to. A failure has no effect."""
        import tempfile

        temporary = None
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=f"{name[:24]}-", suffix=".tmp", dir=self.folder)
            os.close(handle)
            write(Path(temporary))
            size = os.path.getsize(temporary)  # noqa: PTH202 - one call on a plain string
            if size > self.limit_bytes:
                raise OSError("larger than the bound of the cache")
            os.replace(temporary, self.folder / name)  # noqa: PTH105
        except Exception:  # full, read-only, over quota …: the result is known already
            if temporary is not None:
                with contextlib.suppress(OSError):
                    Path(temporary).unlink()
            return
        self._written_bytes += size
        if self._written_bytes > self.limit_bytes * _UNTRIMMED_SHARE:
            self.trim()

    def trim(self) -> None:
        """Remove the least recently used entries until the rest is within the bound."""
        self._written_bytes = 0
        entries = []
        total = 0
        now = time.time()
        for entry in self._entries():
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(".tmp"):
                    if now - status.st_mtime > _ABANDONED_S:
                        Path(entry.path).unlink()
                    continue
                entries.append((status.st_mtime_ns, status.st_size, entry.path))
                total += status.st_size
        for _, size, path in sorted(entries):
            if total <= self.limit_bytes:
                return
            with contextlib.suppress(OSError):
                Path(path).unlink()
                total -= size

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.folder) as scan:
                return [entry for entry in scan if entry.is_file(follow_symlinks=False)]
        except OSError:
            return []


@functools.cache
def fingerprint(*parts: ModuleType) -> str:
    """16 hexadecimal digits that change with the sources of modules and packages: the code that made an entry.

    With the version number alone a developer would get the results of older code.
    """
    import hashlib  # loads OpenSSL: 3 MB, which an analysis without the cache does without

    digest = hashlib.blake2b(__version__.encode(), digest_size=8)
    for part in parts:
        for folder in getattr(part, "__path__", ()):
            for source in sorted(Path(folder).rglob("*.py")):
                digest.update(source.relative_to(folder).as_posix().encode() + b"\0" + source.read_bytes())
        if not hasattr(part, "__path__") and part.__file__:
            with contextlib.suppress(OSError):  # compiled only
                digest.update(part.__name__.encode() + b"\0" + Path(part.__file__).read_bytes())
    return digest.hexdigest()


def _hash(path: Path) -> str:
    import hashlib

    # Detects changes, not forgery; processors compute SHA-1 in hardware, at twice the speed of BLAKE2.
    digest = hashlib.sha1(usedforsecurity=False)
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _identity(path: Path, state: FileState) -> str:
    return f"{path.absolute()}\0{state}"


def _note(identity: str) -> str:
    import hashlib

    return f"{hashlib.blake2b(identity.encode(errors='surrogateescape'), digest_size=_KEY_BYTES).hexdigest()}.key"


def _default_folder() -> Path:
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "perfscope"


def _limit() -> int:
    limit = size_of(SIZE_VARIABLE)
    return DEFAULT_BYTES if limit is None else limit
