"""How a process ends, and what is to be done then."""

from __future__ import annotations

import atexit
import dis
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

from perfscope.recording.metadata import CallMetadata, ErrorMetadata
from perfscope.redact import redact_value

_MOST_CALLS: Final = 64
"""Innermost calls of a traceback that are described."""

_MOST_CAUSES: Final = 8
"""Exceptions before an exception that are described."""

_LONGEST_MESSAGE: Final = 1000
"""Characters."""


def at_end(call: Callable[[], None]) -> None:
    """Call when the process ends by itself, be it one that ``multiprocessing`` forked."""
    atexit.register(call)
    if "multiprocessing.util" in sys.modules:
        # Forked children end without running what atexit holds.
        from multiprocessing.util import Finalize

        Finalize(None, call, exitpriority=100)


def at_end_of_thread(call: Callable[[], None]) -> object:
    """Call when the thread that asks ends, or when what is returned is freed. It has to do little, such as wake another
    thread: Python has begun to take its thread apart.
    """
    local = threading.local()
    local.held = _CallsWhenFreed(call)
    return local


class _CallsWhenFreed:
    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._pid = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # a forked child frees what its parent's other threads held
            self._call()


def uncaught() -> BaseException | None:
    """The exception that ends the process or ended its main thread; None where there is none."""
    return sys.exc_info()[1] or getattr(sys, "last_value", None)


def outcome() -> str:
    """How the process is ending, asked at its end: ``finished`` or ``exception``."""
    error = uncaught()
    if isinstance(error, SystemExit):
        return "finished" if error.code in (None, 0) else "exception"
    return "finished" if error is None else "exception"


def describe_error(error: BaseException | None) -> ErrorMetadata | None:
    """What an exception says and where it was raised, without secrets; None of an interrupt or an exit."""
    if not isinstance(error, Exception):
        return None
    calls = [
        CallMetadata(file=frame.f_code.co_filename, line=line, function=frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return ErrorMetadata(
        type=type(error).__name__,
        message=_message(error),
        causes=tuple(f"{type(cause).__name__}: {_message(cause)}" for cause in _causes(error)),
        calls=tuple(calls[: -_MOST_CALLS - 1 : -1]),
    )


def _message(error: BaseException) -> str:
    return redact_value(str(error))[:_LONGEST_MESSAGE]


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Those that it was raised from or while handling, the latest first."""
    cause = error.__cause__ or error.__context__
    for _ in range(_MOST_CAUSES):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def program_frame() -> FrameType | None:
    """The frame of the whole program, asked while it runs; None on other threads and where lines are typed in."""
    if threading.current_thread() is not threading.main_thread() or hasattr(sys, "ps1"):
        return None
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def exit_code(program: FrameType | None) -> int | None:
    """The code with which the process ends, asked at its end; None where it is not known.

    ``program``: its frame. Python does not keep the code that was given to ``sys.exit``. But a frame keeps the
    instruction that it was left at, and one that was not left by its return was left by an exception.
    """
    error = uncaught()
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if error is not None:
        return 1 if isinstance(error, Exception) else None  # interrupts end it by their signal
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return 0  # there an exception would be known
    return 0 if program is not None and _returned(program) else None


def _returned(frame: FrameType) -> bool:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
