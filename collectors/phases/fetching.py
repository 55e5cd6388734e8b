"""A data loader's worker counts the batches that it fetches, and the time that they take.

The count lies in memory that has no name in any file system: the training process finds it among the worker's open
files, whichever way that was started, and nothing is left behind however it ends. Only Linux has such memory; nothing
is counted where there is none. Imported by every worker, so it imports little.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

NAME: Final = "perfscope-fetches-{pid}"
"""Of the memory. Workers inherit what the training process holds of others."""
COUNT: Final = struct.Struct("=QQ")
"""Batches fetched, wall time that they took (ns)."""

Call = Callable[..., Any]


def time_fetches(_folder: str) -> None:
    """Have this process, a loader's worker, count what its fetchers fetch. ``_folder`` is the bootstrap's."""
    from torch.utils.data import _DatasetKind

    file = os.memfd_create(NAME.format(pid=os.getpid()))
    os.ftruncate(file, mmap.PAGESIZE)
    kind: Any = _DatasetKind
    kind.create_fetcher = staticmethod(counting(kind.create_fetcher, mmap.mmap(file, mmap.PAGESIZE)))


def counting(create: Call, count: mmap.mmap) -> Call:
    """``create``, which makes fetchers, with fetchers that count into ``count``. One whose attributes cannot be set
    counts nothing.
    """

    @functools.wraps(create)
    def create_fetcher(*args: Any, **kwargs: Any) -> Any:
        fetcher = create(*args, **kwargs)
        with suppress(Exception):
            fetcher.fetch = _counted(fetcher.fetch, count)
        return fetcher

    return create_fetcher


def _counted(fetch: Call, count: mmap.mmap) -> Call:
    clock = time.perf_counter_ns

    @functools.wraps(fetch)
    def counted(*args: Any, **kwargs: Any) -> Any:
        began = clock()
        batch = fetch(*args, **kwargs)
        took = clock() - began
        batches, fetch_ns = COUNT.unpack_from(count)
        COUNT.pack_into(count, 0, batches + 1, fetch_ns + took)
        return batch

    return counted
