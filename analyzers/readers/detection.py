"""What kind of recording a file is: by what it holds, and by its name only where that does not tell."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Literal

from perfscope import paths
from perfscope.analyzers.readers import sources
from perfscope.analyzers.readers.chrome_peek import peek
from perfscope.analyzers.readers.nsys_export import REPORT_SUFFIXES
from perfscope.analyzers.readers.nsys_tables import PARQUET_SUFFIX, STRINGS_TABLE
from perfscope.errors import TraceError

Kind = Literal["chrome", "nsys-sqlite", "nsys-parquet", "nsys-rep", "unknown"]

_SQLITE_MAGIC = b"SQLite format 3\0"
_HEAD_BYTES = 64


def detect(path: Path) -> Kind:
    """The kind of a file, packed or not.

    Raises TraceError where it cannot be opened or unpacked at all, and where it is one of ``perfscope merge``'s.
    """
    if path.is_dir():
        return "nsys-parquet" if (path / f"{STRINGS_TABLE}{PARQUET_SUFFIX}").is_file() else "unknown"
    head = sources.read_head(path, _HEAD_BYTES)
    if paths.MERGED_MARK in head:
        raise TraceError(
            f"{path}: was written by perfscope merge, to be looked at in Perfetto (https://ui.perfetto.dev), and does "
            "not hold all that an analysis needs: analyze the folder of the traces that it was made of"
        )
    if head.startswith(_SQLITE_MAGIC):
        return "nsys-sqlite" if _is_nsys_export(path) else "unknown"
    if path.name.endswith(REPORT_SUFFIXES):
        return "nsys-rep"
    return "chrome" if peek(path).is_chrome else "unknown"


def _is_nsys_export(path: Path) -> bool:
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            found: int = database.execute(query, (STRINGS_TABLE,)).fetchone()[0]
    except sqlite3.Error:
        return path.suffix == ".sqlite"  # damaged: reading it will say so
    return found > 0
