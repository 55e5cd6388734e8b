"""Files that are replaced whole or not at all: a killed process or a full disk leaves the former one as it was."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from perfscope.recording.paths import PARTIAL_SUFFIX


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write to, which takes the place of ``path`` at the end; none where the block raises.

    Several processes may replace one path: the last to end wins, whole. A pipe or a device is written to directly.
    Raises OSError.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    target = path.resolve() if path.is_symlink() else path
    temporary = target.with_name(f".{target.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file by ``text`` in UTF-8; half a surrogate pair, as names in a trace may have, becomes ``?``.

    Raises OSError.
    """
    write_parts(path, (text,))


def write_parts(path: Path, parts: Iterable[str]) -> None:
    """``write_text`` of a text in parts; what making a part raises leaves the former file."""
    with replacing(path) as file:
        for part in parts:
            file.write(part.encode("utf-8", "replace"))
