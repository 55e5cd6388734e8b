"""Runtime calls that return only when the device is done: synchronizations, and copies that wait for their end."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from perfscope.analyzers.rank.launches import DeviceWork
from perfscope.trace.trace import NONE, Category, Int64, Trace

_BLOCKS: Final = re.compile(
    r"^(cuda|hip)(Stream|Device|Event|Thread)Synchronize|^cu(Ctx|Stream|Event)Synchronize"
    r"|^(cuda|hip)Memcpy(2D|3D|(To|From)Symbol|DtoH|HtoD|WithStream)?(_spt|_ptsz|_ptds)?$"
    r"|^cuMemcpy(2D|3D|DtoH|HtoD)?(_v2)?(_ptds)?$|^(cuda|hip)Free$|^cuMemFree(_v2)?$"
)
"""Calls that block by definition. CUDA Runtime API, "API synchronization behavior"; HIP's ``hipMemcpyWithStream`` is
``hipMemcpyAsync`` and ``hipStreamSynchronize``; freeing memory waits for the whole device."""

_ASYNCHRONOUS: Final = re.compile(r"^(cuda|hip|cu)Memcpy\w*Async")
_TO_OR_FROM_HOST: Final = re.compile(r"^(?!.*Pinned).*(HtoD|DtoH|Host)", re.IGNORECASE)
"""Copies between the device and memory of the host that is not pinned, by kineto's names. CUPTI's and ROCm's agree."""


def blocking_calls(trace: Trace, work: DeviceWork, threads: Int64) -> Int64:
    """Rows of the blocking calls on the given threads, ascending.

    An asynchronous copy from or to pageable memory blocks as well, unless it is so small that the driver sets it aside:
    it blocked where it began before its call returned.
    """
    named = trace.rows(Category.RUNTIME, named=_BLOCKS.match, threads=threads)
    pageable = trace.names_where(_TO_OR_FROM_HOST.match)[work.row] & (trace.category[work.row] == Category.MEMCPY)
    copies = np.flatnonzero(pageable & (work.launch != NONE))
    calls = work.launch[copies]
    waited = (work.start_ns[copies] < trace.end_ns[calls]) & trace.names_where(_ASYNCHRONOUS.match)[calls]
    waited &= np.isin(trace.thread[calls], threads)
    return np.union1d(named, calls[waited])
