"""Enters a named range into the profiler's trace and into NVTX at once."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from perfscope.vocabulary import NVTX_STEP_PREFIX

Marker = tuple[Callable[[str], Any], Callable[[], Any], Callable[[str], Any], Callable[[Any], Any]]
"""Push, pop, start and end of NVTX ranges."""


class Annotator:
    """Writes ranges; ``nvtx`` False leaves NVTX out."""

    def __init__(self, *, nvtx: bool) -> None:
        from torch.autograd.profiler import record_function

        self._record_function: Any = record_function
        self._nvtx = _find_nvtx() if nvtx else None
        self._step: Any = None

    def begin(self, name: str) -> Any:
        """Open a range on this thread; hand what is returned to :meth:`end`."""
        record = self._record_function(name)
        record.__enter__()
        if self._nvtx is not None:
            self._nvtx[0](name)
        return record

    def end(self, record: Any) -> None:
        """Close a range that :meth:`begin` opened, innermost first."""
        if self._nvtx is not None:
            self._nvtx[1]()
        record.__exit__(None, None, None)

    def step(self, number: int | None) -> None:
        """End the NVTX range of the step under way and begin that of step ``number``, unless None.

        Start and end rather than push and pop: a step lies across the script's own ranges, which a pop would close.
        """
        if self._nvtx is None:
            return
        if self._step is not None:
            self._nvtx[3](self._step)
        self._step = None if number is None else self._nvtx[2](f"{NVTX_STEP_PREFIX}{number}")


def _find_nvtx() -> Marker | None:
    import torch

    try:
        nvtx: Any = importlib.import_module("nvtx")
    except ImportError:
        if not torch.cuda.is_available():
            return None
        cuda: Any = torch.cuda.nvtx
        return cuda.range_push, cuda.range_pop, cuda.range_start, cuda.range_end
    return nvtx.push_range, nvtx.pop_range, nvtx.start_range, nvtx.end_range
