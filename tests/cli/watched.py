"""``perfscope watch`` in a terminal of its own: what it shows there, and keys for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pexpect
import pyte

from tests.waiting import PATIENCE_S


class WatchTerminal:
    """A terminal of ``columns`` and ``lines`` in which ``perfscope watch FOLDER`` runs."""

    def __init__(self, folder: Path, *options: str, columns: int = 100, lines: int = 30, term: str = "xterm") -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.received = b""
        self.child = pexpect.spawn(
            sys.executable,
            ["-m", "perfscope", "watch", str(folder), *options],
            dimensions=(lines, columns),
            env={**os.environ, "TERM": term},
        )

    @property
    def text(self) -> str:
        """The screen, line by line."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def look(self, seconds: float = 0.1) -> bool:
        """Take in what is shown; False when the command has ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                data = self.child.read_nonblocking(65536, 0.05)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                return False
            self.received += data
            self._stream.feed(data)
        return True

    def until(self, shown: str | Callable[[str], bool], timeout_s: float = PATIENCE_S) -> str:
        """The screen once it shows a text, or what a function accepts. Raises TimeoutError with the last one."""
        deadline = time.monotonic() + timeout_s
        while True:
            text = self.text
            if shown in text if isinstance(shown, str) else shown(text):
                return text
            if time.monotonic() > deadline or not self.look():
                raise TimeoutError(f"{shown!r} is not shown:\n{self.text}\n{self.received[-2000:]!r}")

    def press(self, keys: str) -> None:
        """Press keys."""
        self.child.send(keys)

    def resize(self, columns: int, lines: int) -> None:
        """Give the terminal another size."""
        self.screen.resize(lines, columns)
        self.child.setwinsize(lines, columns)

    def ended(self, timeout_s: float = PATIENCE_S) -> int | None:
        """The exit status once the command has ended; minus the signal that ended it, None while it runs."""
        deadline = time.monotonic() + timeout_s
        while self.child.isalive() and time.monotonic() < deadline:
            self.look()
        self.look()
        if self.child.isalive():
            return None
        return self.child.exitstatus if self.child.exitstatus is not None else -(self.child.signalstatus or 0)


@contextmanager
def watching(folder: Path, *options: str, **how: object) -> Iterator[WatchTerminal]:
    """A terminal in which the folder is watched; ended in any case."""
    terminal = WatchTerminal(folder, *options, **how)  # type: ignore[arg-type]
    try:
        yield terminal
    finally:
        terminal.child.close(force=True)
