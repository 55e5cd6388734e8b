"""Says on standard error when recording starts and stops: one rank of the job, a line each, never within another."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from typing import Final

from perfscope.collectors.config import CollectorConfig
from perfscope.text import plural

_STDERR: Final = 2


class Announcer:
    """Of one rank; only the first of the recorded ranks speaks, and none with ``--quiet``."""

    def __init__(self, config: CollectorConfig, rank: int) -> None:
        self._speaks = config.announce and rank == config.first_rank

    def begins(self, first: int, warmup: int, active: int) -> None:
        """A capture begins with the warm-up; ``first`` is the first step that is recorded."""
        lead = f"{plural(warmup, 'warm-up step')}, then " if warmup else ""
        self._say(f"profiler on: {lead}{_span(first, active)} recorded")

    def ends(self, first: int, active: int) -> None:
        """A capture has ended."""
        self._say(f"profiler off: {_span(first, active)} recorded")

    def _say(self, text: str) -> None:
        if not self._speaks:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a stream of the script's own
                stream.flush()
        with suppress(OSError):  # closed, or nobody reads it
            os.write(_STDERR, f"{'' if at_line_begin() else os.linesep}perfscope: {text}{os.linesep}".encode())


def _span(first: int, count: int) -> str:
    return f"steps {first}-{first + count - 1} are" if count > 1 else f"step {first} is"


def at_line_begin() -> bool:
    """Is what was last written to standard error a whole line? Only a file shows that: a terminal or a pipe may be in
    the middle of a progress bar.
    """
    try:
        state = os.fstat(_STDERR)
        if not stat.S_ISREG(state.st_mode):
            return False
        if state.st_size == 0:
            return True
        written = os.open(f"/proc/self/fd/{_STDERR}", os.O_RDONLY)
        try:
            return os.pread(written, 1, state.st_size - 1) == b"\n"
        finally:
            os.close(written)
    except OSError:
        return False
