"""The stacks of all threads, as ``faulthandler`` writes them.

Where threads run or wait outside the interpreter, the watch writes them. Where one holds the interpreter's lock and
does not let go of it, nothing in Python runs, the watch included: a thread of ``faulthandler``'s own, which needs no
lock, then writes when the watch has not put it off for long enough. It writes into a file that has been open before,
in the bootstrap folder; the watch takes what it wrote once the lock is free again, else ``perfscope run`` does at the
end.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from perfscope.recording.paths import BOOTSTRAP_FOLDER, stacks_file

_JOINED: Final = tuple(str(Path("multiprocessing", name)) for name in ("process.py", "spawn.py"))
"""Ends of the files whose ``join`` waits for processes."""
_WAITED_IN: Final = "/proc/self/task/{}/wchan"
"""Where in the kernel a thread waits, by name."""
_DO_WAIT: Final = "do_wait"

LOCKED: Final = "stacks-"
"""In the bootstrap folder, before a rank's number: stacks that were written while its interpreter was locked."""

REARMS: Final = 4
"""In one timeout: putting it off starts a thread, which takes some 100 µs."""


def write_stacks(path: Path, error: BaseException | None) -> None:
    """Write every thread's stack, and last, as that of the main thread, where an uncaught exception was raised.

    Raises OSError.
    """
    with path.open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        if error is not None and error.__traceback__ is not None and not isinstance(error, SystemExit):
            file.seek(0, os.SEEK_END)
            file.write(f"\nUncaught {type(error).__name__}\n\n")
            file.write(f"Thread 0x{threading.main_thread().ident or 0:016x} (most recent call first):\n")
            for frame in reversed(traceback.extract_tb(error.__traceback__)):
                file.write(f'  File "{frame.filename}", line {frame.lineno} in {frame.name}\n')


def waits_for_processes() -> bool:
    """Whether the main thread waits for other processes to end, in Python's or torch's ways, or (on Linux) in any."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "join" and frame.f_code.co_filename.endswith(_JOINED):
            return True
        frame = frame.f_back
    with suppress(OSError):
        return Path(_WAITED_IN.format(os.getpid())).read_text() == _DO_WAIT
    return False


_users: list[bool] = []
"""Not empty once the script has set ``faulthandler``'s timer: there is one in a process, and it is the script's."""


def notice_users_timers() -> None:
    """Have ``faulthandler`` tell when the script sets its timer. Further calls do nothing."""
    if _own_timer:
        return
    original = faulthandler.dump_traceback_later

    @functools.wraps(original)
    def dump_traceback_later(*args: Any, **kwargs: Any) -> None:
        _users.append(True)
        original(*args, **kwargs)

    _own_timer.append(original)
    faulthandler.dump_traceback_later = dump_traceback_later


_own_timer: list[Any] = []
"""``faulthandler.dump_traceback_later`` as it was."""


class StuckInterpreter:
    """Writes the stacks where the interpreter's lock is not let go of."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None
        self._armed_at = -float("inf")
        self._lock = threading.Lock()

    def arm(self, rank: int, patience_s: float) -> None:
        """Called every now and then: what was to be written unless that happened is put off. Raises OSError."""
        with self._lock:
            if _users or not _own_timer or time.monotonic() - self._armed_at < patience_s / REARMS:
                return
            if self._file is None:
                self._file = (self._folder / BOOTSTRAP_FOLDER / f"{LOCKED}{rank:05d}").open("w", encoding="utf-8")
            elif os.fstat(self._file.fileno()).st_size:
                os.ftruncate(self._file.fileno(), 0)
                os.lseek(self._file.fileno(), 0, os.SEEK_SET)
            self._armed_at = time.monotonic()
            _own_timer[0](patience_s, repeat=False, file=self._file)

    def take(self, path: Path) -> bool:
        """Put what was written while the interpreter was locked into ``path``; False where nothing was."""
        with self._lock:
            if self._file is None or not os.fstat(self._file.fileno()).st_size:
                return False
            path.write_bytes(Path(self._file.name).read_bytes())
            return True

    def before_fork(self) -> None:
        """No timer may run: a child would wait for its thread, which it has not got, when it ends."""
        self._lock.acquire()
        if self._file is not None and not _users:
            faulthandler.cancel_dump_traceback_later()
        self._armed_at = -float("inf")

    def after_fork(self) -> None:
        """In the parent: the watch sets the timer again."""
        self._lock.release()

    def forget(self) -> None:
        """In the child: nothing is written there."""
        self._file = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """The process ends, or is not to be watched."""
        with self._lock:
            file, self._file = self._file, None
            if file is None:
                return
            if not _users:
                faulthandler.cancel_dump_traceback_later()
            file.close()
            with suppress(OSError):
                os.unlink(file.name)  # noqa: PTH108 - a mere name


def take_locked(folder: Path) -> None:
    """Called by ``perfscope run`` at the end: stacks that only ``faulthandler`` could write become the ranks'."""
    for path in (folder / BOOTSTRAP_FOLDER).glob(f"{LOCKED}*"):
        rank = path.name.removeprefix(LOCKED)
        with suppress(OSError, ValueError):
            if path.stat().st_size:
                path.replace(stacks_file(folder, int(rank)))
