"""What the collector could not do: printed once on stderr, stored in the metadata, never raised into the training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final, ParamSpec, TypeVar

from perfscope.redact import redact_value

P = ParamSpec("P")
R = TypeVar("R")

MOST: Final = 50
"""Problems stored; a job that has more has one cause."""


class Problems:
    """The problems of one process, in the order in which they were met, each once."""

    def __init__(self) -> None:
        self._problems: dict[str, None] = {}
        self._broken: set[str] = set()

    def as_tuple(self) -> tuple[str, ...]:
        """Every problem so far."""
        return tuple(self._problems)

    def add(self, problem: str) -> None:
        """Store a problem, secrets in it left out, and print it on stderr the first time."""
        problem = redact_value(problem)
        if problem in self._problems or len(self._problems) >= MOST:
            return
        self._problems[problem] = None
        with suppress(OSError, ValueError, AttributeError):  # stderr may be closed or gone
            sys.stderr.write(f"perfscope: {problem}\n")
            sys.stderr.flush()

    def broke(self, what: str) -> bool:
        """Has this part failed before?"""
        return what in self._broken

    def guard(self, what: str, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Call a part of the collector. If it fails, store the problem, never call that part again, and return None.

        Nothing that the collector does may reach the training, so everything but the interpreter's own exits is caught.
        """
        if what in self._broken:
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self.failed(what, error)
            return None

    def failed(self, what: str, error: Exception) -> None:
        """This part has failed and is not called again."""
        self._broken.add(what)
        self.add(f"{what} failed and was switched off ({type(error).__name__}: {error})")
