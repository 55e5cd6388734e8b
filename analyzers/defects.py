"""Defects of PerfScope's own advice: one rule that fails on an unusual job must not cost the user the whole page.

What was measured stands without it. A note says what is missing and asks for a report; with ``PERFSCOPE_STRICT`` set,
as in the tests, the error is raised.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from perfscope.results.notes import Note, note

Answer = TypeVar("Answer")


class Defects:
    """Those of one analysis."""

    def __init__(self) -> None:
        self._found: list[tuple[str, str]] = []

    def attempt(self, what: str, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        """The answer to a question; ``otherwise`` where it ends in an error of a kind that no code expects."""
        try:
            return ask()
        except Exception as error:
            if os.environ.get("PERFSCOPE_STRICT"):
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            self._found.append((what, f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {error}"))
            return otherwise

    def notes(self) -> Iterator[Note]:
        """One for each."""
        for what, error in self._found:
            yield note("analysis", "advice_failed", what=what, error=error)
