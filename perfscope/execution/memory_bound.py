"""Ends the reading of a trace whose analysis the memory cannot hold, before the system ends the process or others."""

from __future__ import annotations

from typing import Final

from perfscope.errors import TooLittleMemory
from perfscope.execution.machine import MEMORY_VARIABLE, available_memory, memory_limit

_EVERY: Final = 1 << 19
"""Events between two looks at the memory."""
_PEAK_BYTES: Final = 170
"""For each event at the peak of its rank's analysis; 166 was measured, of 5 million events."""
_HELD_BYTES: Final = 60
"""Of them, those that hold what was read so far."""
_GB: Final = 1e9


class MemoryBound:
    """Looks, while a trace is read, whether its analysis will fit."""

    def __init__(self, source: str, every: int = _EVERY) -> None:
        self._source = source
        self._every = self._next = every

    def check(self, events: int) -> None:
        """``events`` were read so far. Raises TooLittleMemory where they are more than memory holds when analyzed."""
        if events < self._next:
            return
        self._next = events + self._every
        limit, needed = memory_limit(), events * _PEAK_BYTES
        if limit is not None and needed > limit:
            raise TooLittleMemory(
                f"{self._said(events)}, and {MEMORY_VARIABLE} allows {limit / _GB:.1f} GB; allow more, or record fewer "
                "steps (perfscope run --active 3)"
            )
        free = available_memory()
        if events * (_PEAK_BYTES - _HELD_BYTES) > free:
            raise TooLittleMemory(
                f"{self._said(events)}, and {free / _GB:.1f} GB are free; read fewer ranks at once (--workers 1), "
                "analyze it on a larger machine, or record fewer steps (perfscope run --active 3)"
            )

    def _said(self, events: int) -> str:
        return f"{self._source}: its first {events:,} events alone need {events * _PEAK_BYTES / _GB:.1f} GB of memory"
