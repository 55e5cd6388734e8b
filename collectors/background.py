"""The collector's own thread: what may wait for a slow file system happens there, not in a training step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

PERIOD_S: Final = 1.0
"""Time between two looks. Each is some 50 µs of one core."""

PATIENCE_S: Final = 5.0
"""At the end of the process: how long to wait for a look that a file system holds up."""


class Background:
    """Calls ``look`` every :data:`PERIOD_S`, and at once when woken. Not there in a forked child."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._awake = threading.Event()
        self._ending = False
        # A daemon: a process that ends without telling us is not held up. Nothing is written in it that could be cut.
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
            self._awake.wait(PERIOD_S)
            self._awake.clear()
            if not self._ending:
                self._look()
