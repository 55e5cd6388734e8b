"""Counts the floating-point operations of one step as the framework executes it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from perfscope.collectors.discovery import JobObjects, is_compiled


class _NoModules(nullcontext[None]):
    """Stands in for the counter's module tracker, whose global hooks a training job does not need to bear."""

    parents = frozenset({"Global"})


class FlopCount:
    """A count under way. Forward and backward, matrix products, convolutions and attention; recomputation included."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode

    @classmethod
    def begin(cls, objects: JobObjects) -> FlopCount:
        """Begin to count on this thread. Raises RuntimeError where the count would be wrong."""
        from torch.utils.flop_counter import FlopCounterMode

        if any(map(is_compiled, objects.modules)):
            raise RuntimeError("the model is compiled, and operations inside compiled code cannot be counted")
        mode: Any = FlopCounterMode(display=False)
        if hasattr(mode, "mod_tracker"):
            mode.mod_tracker = _NoModules()
        mode.__enter__()
        return cls(mode)

    def end(self) -> float | None:
        """Stop counting; operations since :meth:`begin`, None when there were none to count."""
        self._mode.__exit__(None, None, None)
        return float(self._mode.get_total_flops()) or None
