"""A thread that looks after something every now and then, while the training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

PERIOD_S: Final = 1.0
"""Time between two looks, unless another is asked for. Each is some 50 µs of one core."""

PATIENCE_S: Final = 5.0
"""At the end of the process: how long to wait for a look that a slow file system delays."""


class Background:
    """Calls ``look`` every ``period_s``, and at once when woken. Not there in a forked child."""

    def __init__(self, look: Callable[[], None], period_s: float = PERIOD_S) -> None:
        self._look = look
        self._period_s = period_s
        self._awake = threading.Event()
        self._ending = False
        self.cpu_ns = 0
        """CPU time of the thread until the end of its last look."""
        # A daemon: it never delays the end of a process. Nothing is written in it that could be cut.
        self._thread = threading.Thread(target=self._run, name="perfscope", daemon=True)

    def start(self) -> None:
        """Begin. Raises RuntimeError where no thread can be started."""
        self._thread.start()

    def wake(self) -> None:
        """Look soon: something happened."""
        self._awake.set()

    def stop(self) -> bool:
        """Look no more; True when the last look is over, so that the caller may do what it did."""
        self._ending = True
        self._awake.set()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._ending:
            self._awake.wait(self._period_s)
            self._awake.clear()
            if not self._ending:
                self._look()
                self.cpu_ns = time.thread_time_ns()
