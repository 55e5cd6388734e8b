"""Lets a signal ask for a capture."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class SignalHandler:
    """Has a signal ask for captures, where the script does nothing with it itself."""

    def __init__(self, name: str, asked: Callable[[], None]) -> None:
        self._number: int | None = None if name == "none" else getattr(signal, f"SIG{name}")
        self._asked = asked
        self._installed = False

    def install(self) -> None:
        """Begin to listen, in the main thread of a process that leaves the signal to its default."""
        if self._number is None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(self._number) == signal.SIG_DFL:
            signal.signal(self._number, self._handle)
            self._installed = True

    def remove(self) -> None:
        """Put the default back, unless the script has installed a handler of its own since."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        # Bound methods are made anew at every access: they are equal, not the same.
        if self._number is not None and signal.getsignal(self._number) == self._handle:
            signal.signal(self._number, signal.SIG_DFL)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._asked()
