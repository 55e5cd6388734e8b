"""Whatever writes traces or ranges in this process, made when it is first needed.

Importing it takes longer than all else that a rank does at its start, and a job that only times steps may not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from perfscope.collectors.capture.run_file import RankContext
from perfscope.collectors.capture.schedule import CaptureSchedule
from perfscope.collectors.config import FOR_ANOTHER

if TYPE_CHECKING:
    from perfscope.collectors.capture.capturer import Capturer
    from perfscope.collectors.capture.marker import Marker


class LazyCapturer:
    """A :class:`~perfscope.collectors.capture.capturer.Capturer` or, where another profiler records, a ``Marker``."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._made: Capturer | Marker | None = None
        self.schedule = CaptureSchedule(context.config)

    @property
    def busy(self) -> bool:
        """Does anything of it disturb the training at the moment?"""
        return self._made is not None and self._made.busy

    @property
    def yields(self) -> bool:
        """Does the script's own profiler run, which a capture would have to wait for?"""
        return self._made is not None and self._made.yields

    def made(self) -> Capturer | Marker:
        """It, made if it was not."""
        if self._made is None:
            self._made = self._make()
        return self._made

    def at_edge(self, completed: int) -> bool:
        """Does the boundary after ``completed`` steps start a capture, or is it where recorded steps begin or end?"""
        return self.schedule.wants(completed) if self._made is None else self._made.at_edge(completed)

    def boundary(self, completed: int, optimizers: Callable[[], Iterable[Any]]) -> None:
        """``completed`` training steps have ended; the next begins when this returns."""
        if self._made is not None or self.schedule.wants(completed) or self._context.config.mode in FOR_ANOTHER:
            self.made().boundary(completed, optimizers)

    def restart(self) -> None:
        """What was taken for steps may not have been."""
        if self._made is not None:
            self._made.restart()

    def forget(self) -> None:
        """In a forked child: write nothing more."""
        if self._made is not None:
            self._made.forget()

    def close(self) -> None:
        """The process ends, perhaps in the middle of a step: write what is complete, put everything back."""
        if self._made is not None:
            self._made.close()

    def join(self) -> None:
        """Wait until everything is written."""
        if self._made is not None:
            self._made.join()

    def _make(self) -> Capturer | Marker:
        if self._context.config.mode in FOR_ANOTHER:
            from perfscope.collectors.capture.marker import Marker

            return Marker(self._context)
        from perfscope.collectors.capture.capturer import Capturer

        return Capturer(self._context, self.schedule)
