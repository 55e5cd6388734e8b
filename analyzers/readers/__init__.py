"""Readers: a file in, a :class:`~perfscope.trace.trace.Trace` out, one module per format.

``detect`` finds the format of a file, ``parts`` the ranks in it, and ``read`` reads one of them. What cannot be read is
counted in the trace's ``parse_report``.

``chrome.read`` reads Chrome traces (torch.profiler, kineto, TensorFlow, JAX, Horovod, Ascend); ``chrome.peek`` finds
only the rank. In the order of the work: ``sources`` unpacks the file, ``chrome_window`` cuts the text into slices of
whole events, the compiled ``chrome_scan`` (``_scan.c``) makes arrays of ordinary ones, ``chrome_events`` decodes the
others (``chrome_repair`` repairs invalid JSON), ``chrome_times`` makes exact nanoseconds, ``chrome_columns`` arrays,
``chrome_build`` makes the trace with what ``chrome_metadata`` and ``chrome_dialects`` find.

``nsys.read`` reads Nsight Systems' exports and reports; ``nsys.ranks`` finds only the ranks. ``nsys_export`` turns a
report into an export, ``nsys_tables`` reads its tables whatever the release, ``nsys_processes`` finds the ranks,
``nsys_names`` translates names, ``nsys_columns`` collects arrays, ``nsys_build`` makes the trace.

``execution`` completes a trace by PyTorch's execution trace of the same rank.

Files that are no traces: ``flight`` (flight-recorder dumps), ``stacks`` and ``snapshot`` (memory snapshots). They rest
on ``plain_pickle``, which reads pickles without classes, and ``plain_values``.
"""

from pathlib import Path
from typing import Literal

from perfscope.analyzers.readers import chrome, sources
from perfscope.errors import TraceError
from perfscope.recording import paths
from perfscope.recording.job import NSYS_REPORT_SUFFIXES
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
        from perfscope.analyzers.readers.nsys_tables import is_parquet

        return "nsys-parquet" if is_parquet(path) else "unknown"
    head = sources.read_head(path, _HEAD_BYTES)
    if paths.MERGED_MARK in head:
        raise TraceError(
            f"{path}: was written by perfscope merge for Perfetto (https://ui.perfetto.dev) and lacks data that the "
            "analysis needs; analyze the folder of the traces that it was made from"
        )
    if head.startswith(_SQLITE_MAGIC):
        from perfscope.analyzers.readers.nsys_tables import is_sqlite

        return "nsys-sqlite" if is_sqlite(path) else "unknown"
    if path.name.endswith(NSYS_REPORT_SUFFIXES):
        return "nsys-rep"
    return "chrome" if chrome.peek(path).is_chrome else "unknown"


def parts(path: Path) -> tuple[str | None, ...]:
    """The ``part`` argument of ``read`` for each rank in a file: (None,) for a file of one rank.

    Raises TraceError where the file is from Nsight Systems and cannot be opened.
    """
    if not detect(path).startswith("nsys"):
        return (None,)
    from perfscope.analyzers.readers import nsys

    return tuple(rank.part for rank in nsys.ranks(path))


def read(path: Path, part: str | None = None) -> Trace:
    """Read one rank of a file of any kind. Raises TraceError, naming the file, where it cannot be read."""
    if not detect(path).startswith("nsys"):
        return chrome.read(path)
    from perfscope.analyzers.readers import nsys

    return nsys.read(path, part)
