"""Ranges around the interpreter's garbage collections, while a capture runs and no longer.

A full collection walks every container object of the process with the interpreter's lock held: with millions of them
(a data set as Python lists) it takes tenths of a second, on one rank at a time, and every other rank waits for it.
"""

from __future__ import annotations

import gc
import os
import sysconfig
from collections.abc import Mapping
from typing import Any, Final

from perfscope.collectors.annotate import Annotator
from perfscope.collectors.problems import Problems
from perfscope.recording.vocabulary import GARBAGE_COLLECTION

YOUNGEST: Final = 0 if sysconfig.get_config_var("Py_GIL_DISABLED") else 1
"""Youngest generation whose collections are ranged. Collections of generation 0 come every few hundred new objects and
take about as long as a range. Free-threaded interpreters have no young generation: each collection is a full one, even
where it is called generation 0."""


class GcRanges:
    """The ranges of one process's garbage collections; installed for each capture."""

    def __init__(self, annotator: Annotator, problems: Problems) -> None:
        self._annotator = annotator
        self._problems = problems
        self._pid = 0
        self._open: Any = None
        self._callback = self._called
        """One object for :meth:`remove` to find: each look at a method makes a new one."""

    def install(self) -> None:
        """Begin to write ranges."""
        self._pid = os.getpid()
        gc.callbacks.append(self._callback)

    def remove(self) -> None:
        """Stop writing ranges; harmless where none are written."""
        if self._callback in gc.callbacks:
            gc.callbacks.remove(self._callback)
        self._end()

    def _called(self, phase: str, info: Mapping[str, int]) -> None:
        """The interpreter begins or has ended a collection, on whichever thread's turn it was; never two at a time."""
        if phase == "stop":
            self._end()
        elif info["generation"] >= YOUNGEST and os.getpid() == self._pid:
            self._open = self._problems.guard(
                "the range of garbage collection", self._annotator.begin_aside, GARBAGE_COLLECTION
            )

    def _end(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            self._problems.guard("the range of garbage collection", self._annotator.end, opened)
