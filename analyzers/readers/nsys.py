"""Reads Nsight Systems: SQLite exports, Parquet exports, and reports through the user's own ``nsys``.

A report may contain many processes, each of them a rank. ``ranks`` lists them, ``read`` reads one of them::

    for rank in nsys.ranks(path):
        trace = nsys.read(path, rank.part)

Kernels, copies, memsets and whole CUDA graphs are device work; runtime and driver calls, synchronisations, NVTX ranges
(operators of torch's ``emit_nvtx`` as operators, all others as annotations) and the training threads' calls into the
operating system are the host's. Names are those of a Chrome trace of the same run, so every analysis works on both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perfscope.analyzers.readers import nsys_tables
from perfscope.analyzers.readers.nsys_build import build
from perfscope.analyzers.readers.nsys_export import export_of, is_report
from perfscope.analyzers.readers.nsys_processes import RankSlice, slices
from perfscope.analyzers.readers.nsys_tables import Tables
from perfscope.errors import TraceError
from perfscope.trace.trace import Trace

__all__ = ["RankSlice", "ranks", "read"]


def ranks(path: Path) -> tuple[RankSlice, ...]:
    """The training processes of a report. It counts rows, and reads no events except marks that name a rank.

    Raises TraceError where the file cannot be read, is a report and there is no ``nsys`` to export it, or has nothing
    to analyze.
    """
    with _opened(path) as tables:
        return _slices(tables, path)


def read(path: Path, part: str | None = None) -> Trace:
    """Read one process of a report: the ``part`` that ``ranks`` lists, or None where there is only one.

    Raises TraceError as ``ranks`` does, and where there is no such part.
    """
    with _opened(path) as tables:
        processes = _slices(tables, path)
        chosen = [process for process in processes if part in (None, process.part)]
        if len(chosen) != 1:
            listed = ", ".join(f"{process.part} (process {process.pid})" for process in processes)
            raise TraceError(f"{path}: has {len(processes)} processes; name one of them: {listed}")
        source = f"{path} (process {chosen[0].pid})" if len(processes) > 1 else str(path)
        return build(tables, chosen[0], source)


@contextmanager
def _opened(path: Path) -> Iterator[Tables]:
    with nsys_tables.opened(export_of(path) if is_report(path) else path) as tables:
        yield tables


def _slices(tables: Tables, path: Path) -> tuple[RankSlice, ...]:
    if processes := slices(tables):
        return processes
    raise TraceError(
        f"{path}: has no kernel, copy or NVTX range, so there is nothing to analyze; record with nsys profile "
        "-t cuda,nvtx,osrt"
    )
