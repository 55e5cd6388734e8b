"""Memory snapshots among a folder's files: what ``torch.cuda.memory._dump_snapshot`` wrote, under whatever name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from perfscope.recording import remote

SUFFIXES: Final = (".pickle", ".pkl")

_HEAD_BYTES: Final = 128
_SNAPSHOT: Final = re.compile(
    rb"\x80[\x02-\x05].{0,48}?(?:segments|device_traces|allocator_settings|external_annotations)", re.DOTALL
)
"""A pickled dictionary whose first key is one of a snapshot's."""


def find(files: Iterable[Path]) -> list[Path]:
    """Those of ``files`` that are memory snapshots, by content."""
    return [path for path in files if path.name.endswith(SUFFIXES) and is_snapshot(path)]


def is_snapshot(path: Path) -> bool:
    """Does a file begin as a memory snapshot does?"""
    try:
        return _SNAPSHOT.match(remote.read_head(path, _HEAD_BYTES)) is not None
    except OSError:
        return False
