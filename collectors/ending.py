"""How a process ends, and what is to be done then."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable


def at_end(call: Callable[[], None]) -> None:
    """Call when the process ends by itself, be it one that ``multiprocessing`` forked."""
    atexit.register(call)
    if "multiprocessing.util" in sys.modules:
        # Forked children end without running what atexit holds.
        from multiprocessing.util import Finalize

        Finalize(None, call, exitpriority=100)


def uncaught() -> BaseException | None:
    """The exception that ends the process or ended its main thread; None where there is none."""
    return sys.exc_info()[1] or getattr(sys, "last_value", None)


def outcome() -> str:
    """How the process is ending, asked at its end: ``finished`` or ``exception``."""
    error = uncaught()
    if isinstance(error, SystemExit):
        return "finished" if error.code in (None, 0) else "exception"
    return "finished" if error is None else "exception"
