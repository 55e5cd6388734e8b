"""How long the training thread waited for a core, by the kernel's own count: one read of a small file per step."""

from __future__ import annotations

import os
from typing import Final

_FILE: Final = "/proc/thread-self/schedstat"
"""Of the thread that opens it: ns on a core, ns ready to run and not on one, time slices (Linux, proc(5))."""
_LONGEST: Final = 64


class CoreWaits:
    """The waits of the thread that calls :meth:`begin`; always 0 where the kernel does not count them."""

    def __init__(self) -> None:
        self._file = -1
        self._before = 0

    def begin(self) -> None:
        """Count from now on."""
        self.end()
        try:
            self._file = os.open(_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        self.since()

    def since(self) -> int:
        """The wait since the last call, ns."""
        if self._file < 0:
            return 0
        try:
            now = int(os.pread(self._file, _LONGEST, 0).split()[1])
        except (OSError, ValueError, IndexError):
            self.end()
            return 0
        waited, self._before = now - self._before, now
        return waited

    def end(self) -> None:
        """Count no more."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
