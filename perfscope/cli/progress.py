"""How far the reading of traces is: one line on a terminal's standard error, gone when the work is done."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import click

_CELLS: Final = 20
_CLEAR: Final = "\r\x1b[K"
READ: Final = "all traces are read; comparing ranks and replaying steps"


@contextmanager
def reading() -> Iterator[Callable[[int, int], None] | None]:
    """What to call with (files done, files in all); None where no terminal shows it."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    begin = time.monotonic()

    def show(done: int, total: int) -> None:
        line = READ if done >= total else progress_line(done, total, time.monotonic() - begin)
        click.echo(f"{_CLEAR}{line}", err=True, nl=False)

    try:
        yield show
    finally:
        click.echo(_CLEAR, err=True, nl=False)


def progress_line(done: int, total: int, elapsed_s: float) -> str:
    """``reading traces ██████░░░░ 3 of 5, about 12 s left``; the time from the second file on."""
    filled = _CELLS * done // total
    left_s = elapsed_s * (total - done) / done if done else 0.0
    left = (
        f", about {f'{left_s / 60:.0f} min' if left_s >= 90 else f'{left_s:.0f} s'} left"
        if done and left_s >= 1
        else ""
    )
    return f"reading traces {'█' * filled}{'░' * (_CELLS - filled)} {done:,} of {total:,}{left}"
