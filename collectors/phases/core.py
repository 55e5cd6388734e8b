"""How long the training thread waited for a core, by the kernel's own count: a read of a small file now and then.

A read takes as long as all else that is done for a step. A thread that does not wait for cores goes on so, and steps in
which it begins to take longer: so after a read without waiting the next :data:`SKIPPED` steps are not asked about,
unless one takes longer than that before; and where there was waiting, every step is.
"""

from __future__ import annotations

import os
from typing import Final

SKIPPED: Final = 7
"""Steps after a read without waiting that pass without one."""

_FILE: Final = "/proc/thread-self/schedstat"
"""Of the thread that opens it: ns on a core, ns ready to run and not on one, time slices (Linux, proc(5))."""
_LONGEST: Final = 64
_NONE: Final = 0.01
"""Share of a step up to which waiting counts as none."""
_LONGER: Final = 1.125
_NEVER: Final = 1 << 62


class CoreWaits:
    """The waits of the thread that calls :meth:`begin`; always 0 where the kernel does not count them."""

    def __init__(self) -> None:
        self._file = -1
        self._before = 0
        self.skip = _NEVER
        """Steps to come whose wait is 0 unless they take as long as ``long_ns``: ``of_step`` need not be called."""
        self.long_ns = _NEVER

    def begin(self) -> None:
        """Count from now on."""
        self.end()
        try:
            self._file = os.open(_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        self.skip = self.long_ns = 0
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

    def of_step(self, duration_ns: int) -> int:
        """The wait in the step that has just ended, ns; of a usual one after others that were skipped, their mean."""
        usual = duration_ns < self.long_ns
        if usual and self.skip:
            self.skip -= 1
            return 0
        waited = self.since()
        if self._file < 0:
            return 0
        if usual:
            waited //= SKIPPED + 1
        quiet = waited <= _NONE * duration_ns
        self.long_ns = int(_LONGER * duration_ns) if quiet else 0
        self.skip = SKIPPED * quiet
        return waited

    def end(self) -> None:
        """Count no more."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self.skip = self.long_ns = _NEVER
