"""What the collector could not do: said once on stderr, kept for the run's metadata, never raised into the training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MOST: Final = 50
"""Problems kept; a job that has more has one cause."""


class Problems:
    """The problems of one process, in the order in which they were met, each once."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}
        self._broken: set[str] = set()

    def as_tuple(self) -> tuple[str, ...]:
        """Every problem so far."""
        return tuple(self._said)

    def add(self, problem: str) -> None:
        """Keep a problem, and say it on stderr the first time."""
        if problem in self._said or len(self._said) >= MOST:
            return
        self._said[problem] = None
        with suppress(OSError, ValueError, AttributeError):  # stderr may be closed or gone
            sys.stderr.write(f"perfscope: {problem}\n")
            sys.stderr.flush()

    def broke(self, what: str) -> bool:
        """Has this part failed before?"""
        return what in self._broken

    def guard(self, what: str, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Call a part of the collector. If it fails, say so, never call that part again, and return None.

        Nothing that the collector does may reach the training, so everything but the interpreter's own exits is caught.
        """
        if what in self._broken:
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self._broken.add(what)
            self.add(f"{what} failed and was switched off ({type(error).__name__}: {error})")
            return None
