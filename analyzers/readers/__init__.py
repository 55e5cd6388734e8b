"""Readers: a file in, a :class:`~perfscope.trace.trace.Trace` out, one module per format.

``detect`` finds the format of a file, ``parts`` the ranks in it, and ``read`` reads one of them. What cannot be read is
counted in the trace's ``parse_report``.

``chrome.read`` reads Chrome traces (torch.profiler, kineto, TensorFlow, JAX, Horovod); ``chrome.peek`` finds only the
rank. In the order of the work: ``sources`` unpacks the file, ``chrome_window`` cuts the text into slices of whole
events, the compiled ``chrome_scan`` (``_scan.c``) makes arrays of ordinary ones, ``chrome_events`` decodes the others
(``chrome_repair`` repairs invalid JSON), ``chrome_times`` makes exact nanoseconds, ``chrome_columns`` makes arrays,
``chrome_build`` makes the trace with what ``chrome_metadata`` and ``chrome_dialects`` find.

``nsys.read`` reads Nsight Systems' exports and reports; ``nsys.ranks`` finds only the ranks. ``nsys_export`` turns a
report into an export, ``nsys_tables`` reads its tables whatever the release, ``nsys_processes`` finds the ranks,
``nsys_names`` translates names, ``nsys_columns`` collects arrays, ``nsys_build`` makes the trace.

``execution`` completes a trace by PyTorch's execution trace of the same rank.

Files that are no traces: ``flight`` (flight-recorder dumps), ``stacks`` and ``snapshot`` (memory snapshots). They rest
on ``plain_pickle``, which reads pickles without classes, and ``plain_values``.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Literal

from perfscope.analyzers.readers import chrome, nsys, sources
from perfscope.analyzers.readers.nsys_export import REPORT_SUFFIXES
from perfscope.analyzers.readers.nsys_tables import PARQUET_SUFFIX, STRINGS_TABLE
from perfscope.errors import TraceError
from perfscope.recording import paths
from perfscope.trace.trace import Trace

__all__ = ["Kind", "detect", "parts", "read"]

Kind = Literal["chrome", "nsys-sqlite", "nsys-parquet", "nsys-rep", "unknown"]

_SQLITE_MAGIC = b"SQLite format 3\0"
_HEAD_BYTES = 64


def detect(path: Path) -> Kind:
    """The kind of a file, packed or not.

    Raises TraceError where it cannot be opened or unpacked at all, and where ``perfscope merge`` wrote it.
    """
    if path.is_dir():
        return "nsys-parquet" if (path / f"{STRINGS_TABLE}{PARQUET_SUFFIX}").is_file() else "unknown"
    head = sources.read_head(path, _HEAD_BYTES)
    if paths.MERGED_MARK in head:
        raise TraceError(
            f"{path}: was written by perfscope merge for Perfetto (https://ui.perfetto.dev) and lacks data that the "
            "analysis needs; analyze the folder of the traces that it was made from"
        )
    if head.startswith(_SQLITE_MAGIC):
        return "nsys-sqlite" if _is_nsys_export(path) else "unknown"
    if path.name.endswith(REPORT_SUFFIXES):
        return "nsys-rep"
    return "chrome" if chrome.peek(path).is_chrome else "unknown"


def parts(path: Path) -> tuple[str | None, ...]:
    """The ``part`` argument of ``read`` for each rank in a file: (None,) for a file of one rank.

    Raises TraceError where the file is from Nsight Systems and cannot be opened.
    """
    if not detect(path).startswith("nsys"):
        return (None,)
    return tuple(rank.part for rank in nsys.ranks(path))


def read(path: Path, part: str | None = None) -> Trace:
    """Read one rank of a file of any kind. Raises TraceError, naming the file, where it cannot be read."""
    return nsys.read(path, part) if detect(path).startswith("nsys") else chrome.read(path)


def _is_nsys_export(path: Path) -> bool:
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            found: int = database.execute(query, (STRINGS_TABLE,)).fetchone()[0]
    except (sqlite3.Error, UnicodeDecodeError):  # the latter: damage in the text of SQLite's own message
        return path.suffix == ".sqlite"  # damaged: reading it raises the error
    return found > 0
