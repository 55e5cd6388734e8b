"""Whatever writes traces or ranges in this process, made when it is first needed.

Importing it takes longer than all else that a rank does at its start, and a job that is only watched may never need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from perfscope.collectors.backward import AfterBackward
from perfscope.collectors.config import FOR_ANOTHER, CollectorConfig
from perfscope.collectors.identity import Identity
from perfscope.collectors.problems import Problems
from perfscope.collectors.record import RunRecord
from perfscope.collectors.schedule import Schedule

if TYPE_CHECKING:
    from perfscope.collectors.marker import Marker
    from perfscope.collectors.recorder import Recorder


class Recording:
    """A :class:`~perfscope.collectors.recorder.Recorder` or, where another profiler records, a ``Marker``."""

    def __init__(
        self,
        config: CollectorConfig,
        identity: Identity,
        record: RunRecord,
        after_backward: AfterBackward,
        problems: Problems,
    ) -> None:
        self._config = config
        self._identity = identity
        self._record = record
        self._after_backward = after_backward
        self._problems = problems
        self._made: Recorder | Marker | None = None
        self.schedule = Schedule(config)

    @property
    def busy(self) -> bool:
        """Does anything of it disturb the training at the moment?"""
        return self._made is not None and self._made.busy

    def made(self) -> Recorder | Marker:
        """It, made if it was not."""
        if self._made is None:
            self._made = self._make()
            ranges = self._made.ranges
            self._after_backward.ranging = lambda: ranges.active
            ranges.backward_ended = self._after_backward.run
        return self._made

    def at_edge(self, completed: int) -> bool:
        """Does the boundary after ``completed`` steps start a capture, or is it where its kept steps begin or end?"""
        return self.schedule.wants(completed) if self._made is None else self._made.at_edge(completed)

    def boundary(self, completed: int, optimizers: Callable[[], Iterable[Any]]) -> None:
        """``completed`` training steps have ended; the next begins when this returns."""
        if self._made is not None or self.schedule.wants(completed) or self._config.mode in FOR_ANOTHER:
            self.made().boundary(completed, optimizers)

    def begin_optimizer(self) -> Any:
        """Open the optimizer's range, where ranges are written; hand what is returned to :meth:`end_optimizer`."""
        return None if self._made is None else self._made.ranges.begin_optimizer()

    def end_optimizer(self, record: Any) -> None:
        """Close the optimizer's range."""
        if record is not None and self._made is not None:
            self._made.ranges.end_optimizer(record)

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

    def _make(self) -> Recorder | Marker:
        if self._config.mode in FOR_ANOTHER:
            from perfscope.collectors.marker import Marker

            return Marker(self._config, self._identity, self._record, self._problems)
        from perfscope.collectors.recorder import Recorder

        return Recorder(self._config, self._identity, self._record, self.schedule, self._problems)
