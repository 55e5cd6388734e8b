"""Enters a named range into the profiler's trace and into NVTX at once."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perfscope.recording.vocabulary import NVTX_RANK_PREFIX, NVTX_STEP_PREFIX


@dataclass(frozen=True)
class Nvtx:
    """The calls of whichever NVTX binding there is: push, pop, start and end of a range, and a mark."""

    push: Callable[[str], Any]
    pop: Callable[[], Any]
    start: Callable[[str], Any]
    end: Callable[[Any], Any]
    mark: Callable[[str], Any]


class Annotator:
    """Writes ranges; ``nvtx`` False leaves NVTX out."""

    def __init__(self, *, nvtx: bool) -> None:
        from torch.autograd.profiler import record_function

        self._record_function: Any = record_function
        self._nvtx = _find_nvtx() if nvtx else None
        self._step: Any = None

    @property
    def writes_nvtx(self) -> bool:
        """Is there anything to write NVTX with?"""
        return self._nvtx is not None

    def begin(self, name: str) -> Any:
        """Open a range on this thread; hand what is returned to :meth:`end`."""
        record = self._record_function(name)
        record.__enter__()
        if self._nvtx is not None:
            self._nvtx.push(name)
        return record

    def end(self, record: Any) -> None:
        """Close a range that :meth:`begin` opened, innermost first."""
        if self._nvtx is not None:
            self._nvtx.pop()
        record.__exit__(None, None, None)

    def begin_aside(self, name: str) -> Any:
        """:meth:`begin` for code that may run in the middle of anything, as a garbage collection does.

        Past torch's dispatcher: there a mode that is active (fake tensors, tracing, FLOP counting) would take the range
        for one of the model's operators.
        """
        record = _Aside(name)
        if self._nvtx is not None:
            self._nvtx.push(name)
        return record

    def open(self, name: str) -> tuple[Any, Any]:
        """Open a range that need not be the innermost one when it ends; hand what is returned to :meth:`close`."""
        record = self._record_function(name)
        record.__enter__()
        return record, None if self._nvtx is None else self._nvtx.start(name)

    def close(self, opened: tuple[Any, Any]) -> None:
        """Close a range that :meth:`open` opened."""
        record, mark = opened
        if self._nvtx is not None:
            self._nvtx.end(mark)
        record.__exit__(None, None, None)

    def rank(self, rank: int, world_size: int) -> None:
        """Mark in NVTX which rank this process is: a report around the launcher holds many processes."""
        if self._nvtx is not None:
            self._nvtx.mark(f"{NVTX_RANK_PREFIX}{rank} of {world_size}")

    def step(self, number: int | None) -> None:
        """End the NVTX range of the step under way and begin that of step ``number``, unless None.

        Start and end rather than push and pop: a step lies across the script's own ranges, which a pop would close.
        """
        if self._nvtx is None:
            return
        if self._step is not None:
            self._nvtx.end(self._step)
        self._step = None if number is None else self._nvtx.start(f"{NVTX_STEP_PREFIX}{number}")


class _Aside:
    """A range of the profiler's alone, open from the beginning; ends as ``record_function`` does."""

    def __init__(self, name: str) -> None:
        import torch.autograd

        calls: Any = torch.autograd
        self._exit = calls._record_function_with_args_exit
        self._record = calls._record_function_with_args_enter(name)

    def __exit__(self, *error: object) -> None:
        self._exit(self._record)


def _find_nvtx() -> Nvtx | None:
    """Torch's own calls where it has them: what the package's releases above 0.2.10 write, older nsys does not see."""
    import torch

    if torch.cuda.is_available():
        cuda: Any = torch.cuda.nvtx
        return Nvtx(cuda.range_push, cuda.range_pop, cuda.range_start, cuda.range_end, cuda.mark)
    try:
        nvtx: Any = importlib.import_module("nvtx")
    except ImportError:
        return None
    return Nvtx(nvtx.push_range, nvtx.pop_range, nvtx.start_range, nvtx.end_range, nvtx.mark)
