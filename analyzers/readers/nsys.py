"""Reads Nsight Systems: SQLite exports, Parquet exports, and reports through the user's own ``nsys``.

One report may hold many processes, each of them a rank. ``ranks`` tells which, ``read`` reads one of them::

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
from perfscope.trace import Trace

__all__ = ["RankSlice", "ranks", "read"]


def ranks(path: Path) -> tuple[RankSlice, ...]:
    """The processes of a report that trained. Counts rows, and reads no event but marks that name a rank.

    Raises TraceError where the file cannot be read, is a report and no ``nsys`` is there to export it, or where nothing
    in it can be accounted for.
    """
    with _opened(path) as tables:
        return _slices(tables, path)


def read(path: Path, part: str | None = None) -> Trace:
    """Read one process of a report: ``part`` of one that ``ranks`` lists, or None where there is only one.

    Raises TraceError as ``ranks`` does, and where there is no such part.
    """
    with _opened(path) as tables:
        found = _slices(tables, path)
        chosen = [process for process in found if part in (None, process.part)]
        if len(chosen) != 1:
            listed = ", ".join(f"{process.part} (process {process.pid})" for process in found)
            raise TraceError(f"{path}: holds {len(found)} processes, of which one must be named: {listed}")
        source = f"{path} (process {chosen[0].pid})" if len(found) > 1 else str(path)
        return build(tables, chosen[0], source)


@contextmanager
def _opened(path: Path) -> Iterator[Tables]:
    with nsys_tables.opened(export_of(path) if is_report(path) else path) as tables:
        yield tables


def _slices(tables: Tables, path: Path) -> tuple[RankSlice, ...]:
    if found := slices(tables):
        return found
    raise TraceError(
        f"{path}: holds no kernel, copy or NVTX range of any process, so nothing can be accounted for; record with "
        "nsys profile -t cuda,nvtx,osrt"
    )
