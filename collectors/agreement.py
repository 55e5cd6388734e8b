"""How ranks agree on a capture that nothing planned: through two small files in the recording's bootstrap folder.

A capture is of use only if every rank records the same steps. So a rank that wants one proposes a step a few seconds
ahead, and the proposal that comes first holds for all. No message travels over the job's own groups or store: a
collective of ours in the middle of the script's would be a deadlock in waiting.

``plans`` and ``requests`` hold records of :data:`RECORD` bytes, JSON and blanks; a plan's number is its place. To
propose number 3 is to create ``plan-3``, which succeeds for one process alone, also on NFS, and then to write record 3.
Both files exist before the ranks do and are opened anew at every look, because that is when NFS asks the server: a new
file's name may be unknown to another node for a minute, new content of an old file is not. Nodes whose folders are not
shared agree each for itself.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from perfscope.recording.paths import BOOTSTRAP_FOLDER

RECORD: Final = 256
"""Bytes of a record: one file system page holds sixteen, so none is ever seen half written where pages are whole."""

LEAD_S: Final = 3.0
"""From a proposal to its step: three looks of every rank's background thread, or the time that NFS takes."""

ABANDONED_S: Final = 30.0
"""Age of a ``plan-N`` without its record from which its owner is taken to be dead."""

PLANS_FILE: Final = "plans"
REQUESTS_FILE: Final = "requests"

_REASON_BYTES: Final = 100


@dataclass(frozen=True)
class CapturePlan:
    """A capture that all ranks make."""

    number: int
    start: int
    """Step at whose beginning the profiler starts, warm-up first."""
    active: int
    """Steps to record."""
    attempt: int
    """Elastic restarts before it: later attempts count their steps anew."""
    reason: str
    asked: bool = False
    """Somebody asked for it; else a slow step did."""
    request: int | None = None
    """The request that it answers."""


@dataclass(frozen=True)
class Request:
    """Somebody asked for a capture of the next steps."""

    number: int
    active: int | None
    """Steps to record; None: as many as the run's options."""
    seconds: float | None = None
    """Record as many steps as take so long, where their number is not given."""


class Board:
    """The two files, as one rank sees them."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self._folder = folder / BOOTSTRAP_FOLDER
        self._attempt = attempt
        self._plans = 0
        """Records of plans seen."""
        self._requests: list[Request] = []
        self._requests_read = 0
        self._answered: set[int | None] = set()
        self.by_slow_steps = 0
        """Plans that slow steps made, in all attempts."""

    def look(self) -> list[CapturePlan]:
        """Read both files; the plans of this attempt that are new. Raises OSError when the folder is gone."""
        plans = []
        for number, content in _records(self._folder / PLANS_FILE, self._plans):
            self._plans = number + 1
            plan = _plan(number, content)
            if plan is not None:
                self._answered.add(plan.request)
                self.by_slow_steps += not plan.asked
                if plan.attempt == self._attempt:
                    plans.append(plan)
        for number, content in _records(self._folder / REQUESTS_FILE, self._requests_read):
            self._requests_read = number + 1
            active, seconds = content.get("active"), content.get("seconds")
            steps = active if isinstance(active, int) and active > 0 else None
            wanted = seconds if isinstance(seconds, int | float) and seconds > 0 else None
            self._requests.append(Request(number, steps, wanted))
        return plans

    def open_request(self) -> Request | None:
        """The first request that no plan answers."""
        return next((request for request in self._requests if request.number not in self._answered), None)

    def propose(self, start: int, active: int, reason: str, *, asked: bool, request: int | None = None) -> bool:
        """Propose a capture; False when another rank's proposal stands, which the next look will find.

        Raises OSError when the folder cannot be written.
        """
        began = time.monotonic()
        number = self._plans
        while (owned_for := _claim(self._folder / f"plan-{number}")) is not None:
            if owned_for < ABANDONED_S:
                return False
            number += 1
        if time.monotonic() - began > ABANDONED_S / 2:
            return False  # the others may think us dead by now
        reason = reason.encode("ascii", "replace")[:_REASON_BYTES].decode()
        plan = CapturePlan(number, start, active, self._attempt, reason, asked, request)
        _write(self._folder / PLANS_FILE, asdict(plan), number * RECORD)
        return True


def open_board(folder: Path) -> None:
    """Make both files, in the bootstrap folder that is there. Raises OSError."""
    for name in (PLANS_FILE, REQUESTS_FILE):
        (folder / BOOTSTRAP_FOLDER / name).touch()


def ask(folder: Path, active: int | None, seconds: float | None = None) -> None:
    """Ask the ranks that record into ``folder`` for a capture of ``active`` steps, or of as many as take ``seconds``.

    Raises OSError.
    """
    path = folder / BOOTSTRAP_FOLDER / REQUESTS_FILE
    _write(path, {"active": active, "seconds": seconds}, -(-path.stat().st_size // RECORD) * RECORD)


def _claim(path: Path) -> float | None:
    """Create a file: None when that succeeded, else for how many seconds another's has been there."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    except FileExistsError:
        with suppress(OSError):
            return time.time() - path.stat().st_mtime
        return 0.0
    return None


def _write(path: Path, content: dict[str, Any], place: int) -> None:
    """Write one record, in one call."""
    record = json.dumps(content).encode().ljust(RECORD - 1) + b"\n"
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(file, record[:RECORD], place)
    finally:
        os.close(file)


def _records(path: Path, first: int) -> list[tuple[int, dict[str, Any]]]:
    """Whole records from number ``first`` on. One that is not there yet, before others, is left out."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(file, 1 << 20, first * RECORD)
    finally:
        os.close(file)
    records = []
    for place in range(len(data) // RECORD):
        record = data[place * RECORD : (place + 1) * RECORD]
        with suppress(ValueError):
            content = json.loads(record) if record.endswith(b"\n") else None
            if isinstance(content, dict):
                records.append((first + place, content))
    return records


def _plan(number: int, content: dict[str, Any]) -> CapturePlan | None:
    known = {entry.name for entry in fields(CapturePlan)}
    values = {name: value for name, value in content.items() if name in known}
    try:
        plan = CapturePlan(**{**values, "number": number})
    except TypeError:
        return None
    numbers: list[Any] = [plan.start, plan.active, plan.attempt, plan.request if plan.request is not None else 0]
    return plan if all(isinstance(number, int) for number in numbers) and plan.active > 0 else None
