"""How long the training thread waited for a core, by the kernel's own count: a read of a small file now and then.

A read takes as long as all else that is done for a step. A thread that does not wait for cores goes on so, and steps in
which it begins to take longer: so after reads without waiting the next steps are not asked about, up to
:data:`SKIPPED` of them, unless one takes longer than that before; and where there was waiting, every step is, of short
ones one for each :data:`READ_EVERY_NS`.

Steps that are long enough are then asked in which stage it was, too. A thread is put off while it works, and seldom
while it waits for other ranks, so its waits for a core are not spread evenly over a step.
"""

from __future__ import annotations

import os
from typing import Final

SKIPPED: Final = 7
"""Steps that pass without a read after several without waiting: 1 after the first of these, 3 after the next."""

READ_EVERY_NS: Final = 1_000_000
"""Time of steps for each read, of 1 to 2 µs, where threads wait: stages of shorter ones are not asked about."""

_FILE: Final = "/proc/thread-self/schedstat"
"""Of the thread that opens it: ns on a core, ns ready to run and not on one, time slices (Linux, proc(5))."""
_LONGEST: Final = 64
_NONE: Final = 0.01
"""Share of a step up to which waiting counts as none."""
_LONGER: Final = 1.125
_NEVER: Final = 1 << 62
_USUAL_READS: Final = 12
"""Reads that the stages of a step take, until that is known."""


class CoreWaits:
    """The waits of the thread that calls :meth:`begin`; always 0 where the kernel does not count them."""

    def __init__(self) -> None:
        self._file = -1
        self._before = 0
        self._waited = self._reads = 0
        """Since the last step that was asked about: the wait, and how often it was asked for."""
        self._skipped = 0
        """Steps that pass between two reads for now."""
        self._in_stages_reads = _USUAL_READS
        self.skip = _NEVER
        """Steps to come whose wait is 0 unless they take as long as ``long_ns``: ``of_step`` need not be called."""
        self.long_ns = _NEVER
        self.in_stages = False
        """Is the step under way to be asked about in each stage, by :meth:`since`?"""

    def begin(self) -> None:
        """Count from now on."""
        self.end()
        try:
            self._file = os.open(_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        self.skip = self.long_ns = 0
        self.since()
        self._waited = self._reads = 0

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
        self._waited += waited
        self._reads += 1
        return waited

    def of_step(self, duration_ns: int) -> int:
        """The wait, ns, in the step that has just ended, since it was last asked for; of a usual step after others that
        were skipped, their mean.
        """
        usual = duration_ns < self.long_ns
        if usual and self.skip:
            self.skip -= 1
            return 0
        rest = self.since()
        if self._file < 0:
            return 0
        if self.in_stages:
            self._in_stages_reads = self._reads
        if usual:
            rest = self._waited = self._waited // (self._skipped + 1)
        quiet = self._waited <= _NONE * duration_ns
        seldom = 2 * self._skipped + 1 if quiet else READ_EVERY_NS // max(duration_ns, 1)
        self.skip = self._skipped = min(seldom, SKIPPED)
        self.long_ns = int(_LONGER * duration_ns) if seldom else 0
        self.in_stages = not quiet and duration_ns >= self._in_stages_reads * READ_EVERY_NS
        self._waited = self._reads = 0
        return rest

    @property
    def counts(self) -> bool:
        """Is anything counted?"""
        return self._file >= 0

    def end(self) -> None:
        """Count no more."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
        self._skipped = 0
        self.skip = self.long_ns = _NEVER
        self.in_stages = False
