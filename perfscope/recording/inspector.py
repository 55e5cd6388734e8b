"""Logs of NCCL Inspector among a folder's files, and of RCCL's: a line of JSON for each operation of one process."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from perfscope.recording import remote

FOLDER: Final = "nccl-inspector"
"""Where ``perfscope run --with inspector`` has them written, in the recording."""

_PLAIN: Final = (".log", ".jsonl")
_PACKED: Final = re.compile(r"-pid\d+\.(?:log|jsonl)\.gz$")
"""The plugin's own names; what is packed is not looked into before it is read."""
_HEAD_BYTES: Final = 4096
_RECORD: Final = re.compile(rb'\{\s*"header"\s*:\s*\{[^{}]*"n_ranks"\s*:')


def find(files: Iterable[Path]) -> tuple[Path, ...]:
    """Those of ``files`` that are logs of the plugin."""
    return tuple(path for path in files if _PACKED.search(path.name) or (path.name.endswith(_PLAIN) and _is_log(path)))


def beside(folder: Path) -> tuple[Path, ...]:
    """The logs in a recording's folder for them."""
    place = folder / FOLDER
    return find(sorted(entry for entry in place.iterdir() if entry.is_file())) if place.is_dir() else ()


def _is_log(path: Path) -> bool:
    try:
        return _RECORD.match(remote.read_head(path, _HEAD_BYTES).lstrip()) is not None
    except OSError:
        return False
