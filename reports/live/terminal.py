"""A terminal that shows a screen, gives keys and says when its size changes; it is left as it was found."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Final

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
"""The alternate screen, no cursor, no wrapping of long lines."""
_LEAVE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"

_ESCAPES: Final = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down", "\x1b[5~": "page up", "\x1b[6~": "page down",
    "\x1b[H": "home", "\x1bOH": "home", "\x1b[1~": "home",
}  # fmt: skip

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


def usable() -> bool:
    """Are there a terminal to show a screen, and a keyboard?"""
    try:
        return sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    except ValueError:  # closed
        return False


class Terminal:
    """The terminal of standard input and output, between :func:`opened` and its end."""

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout
        self._before: list[Any] = termios.tcgetattr(self._in)
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._shown: list[str] = []
        self.size_changed = False

    def enter(self) -> None:
        """Begin to show a screen."""
        tty.setcbreak(self._in)
        self._write(_ENTER)
        self._shown = []

    def leave(self) -> None:
        """Put the terminal back."""
        with suppress(OSError, termios.error):
            self._write(_LEAVE)
        with suppress(termios.error):
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)

    def close(self) -> None:
        """Forget it."""
        os.close(self._wake)
        os.close(self._woken)

    def wake(self) -> None:
        """Have :meth:`keys` return soon; from any thread."""
        with suppress(OSError):
            os.write(self._woken, b"x")

    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        with suppress(OSError):
            columns, lines = os.get_terminal_size(self._out.fileno())
            if columns > 0 and lines > 0:
                return columns, lines
        fallback = shutil.get_terminal_size()
        return fallback.columns, fallback.lines

    def draw(self, lines: list[str]) -> None:
        """Show these lines, and nothing else."""
        if lines == self._shown and not self.size_changed:
            return
        self.size_changed = False
        self._shown = list(lines)
        self._write("\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J")

    def keys(self, timeout_s: float) -> list[str]:
        """The keys that are pressed within a time; none where the size changes or :meth:`wake` is called before.

        Raises EOFError where the keyboard is gone.
        """
        ready = select.select([self._in, self._wake], [], [], max(timeout_s, 0.0))[0]
        if self._wake in ready:
            with suppress(OSError):
                os.read(self._wake, 4096)
        if self._in not in ready:
            return []
        data = os.read(self._in, 4096)
        if not data:
            raise EOFError
        return list(keys_of(data.decode("utf-8", "ignore")))

    def resized(self, _number: int, _frame: FrameType | None) -> None:
        """The terminal has another size."""
        self.size_changed = True
        self.wake()

    def stopped(self, _number: int, _frame: FrameType | None) -> None:
        """Ctrl-Z: give the terminal back until the shell goes on with us."""
        self.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.enter()
        self.wake()

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def keys_of(text: str) -> Iterator[str]:
    """What a terminal sends, key by key; arrows and the like by name, other escapes left out."""
    while text:
        if not text.startswith("\x1b"):
            yield text[0]
            text = text[1:]
            continue
        known = next((escape for escape in _ESCAPES if text.startswith(escape)), None)
        if known is not None:
            yield _ESCAPES[known]
        text = text[len(known) :] if known is not None else _after_escape(text)


def _after_escape(text: str) -> str:
    """What follows an escape sequence that means nothing here."""
    if text[1:2] not in ("[", "O"):
        return text[2:]
    end = next((at for at, letter in enumerate(text[2:], 2) if letter.isalpha() or letter == "~"), len(text))
    return text[end + 1 :]


@contextmanager
def opened() -> Iterator[Terminal]:
    """The terminal, showing a screen. Signals that end the process raise SystemExit inside, so that it is put back."""
    terminal = Terminal()
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {
        signal.SIGWINCH: terminal.resized,
        signal.SIGTSTP: terminal.stopped,
        signal.SIGINT: signal.default_int_handler,  # also where it was ignored before: Ctrl-C quits
        **dict.fromkeys(_ENDING, _end),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        terminal.enter()
        yield terminal
    finally:
        terminal.leave()
        for number, handler in before.items():
            signal.signal(number, handler)
        terminal.close()


def _end(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
