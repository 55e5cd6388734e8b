"""The launching side of ``perfscope run``: prepares the folder, runs the command as if it had been called directly."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from perfscope.collectors.agreement import ask, open_board
from perfscope.collectors.config import ALWAYS_ON, CollectorConfig
from perfscope.collectors.hang.stacks import take_locked
from perfscope.collectors.launch import bootstrap, inspector
from perfscope.collectors.launch.folder import describe_launch, holds_recording, remove_bytecode, remove_recording
from perfscope.collectors.launch.nsys import wrap
from perfscope.recording.metadata import LaunchMetadata, load_launch, now, save
from perfscope.recording.paths import BOOTSTRAP_FOLDER, LAUNCH_FILE, further_jobs

FORWARDED: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGQUIT)
FROM_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT)
"""A terminal sends these to the command as well, so they are passed on only where no terminal does."""


class FolderTakenError(Exception):
    """The output folder holds a recording already."""


class Launch:
    """One run of a command under ``perfscope run``. Raises NsysNotFoundError when nsys is wanted and there is none."""

    def __init__(self, config: CollectorConfig, command: Sequence[str]) -> None:
        self._config = config
        self._command = wrap(config, command, os.environ) if config.mode == "nsys" else list(command)
        self._record = describe_launch(config, command)
        self._opened = False

    def prepare(self, *, overwrite: bool = False, join: bool = False) -> None:
        """Make the recording's folder. With ``join`` one that another node has opened and not yet finished will do.

        Raises FolderTakenError when it holds a recording, OSError when it cannot be written.
        """
        folder = self._config.folder
        folder.mkdir(parents=True, exist_ok=True)
        if overwrite:
            remove_recording(folder)
        elif holds_recording(folder) and not (join and _unfinished(folder)):
            raise FolderTakenError(f"{folder} already holds a recording")
        (folder / BOOTSTRAP_FOLDER).mkdir(exist_ok=True)
        (folder / BOOTSTRAP_FOLDER / "sitecustomize.py").write_bytes(Path(bootstrap.__file__).read_bytes())
        self._config.save(folder / BOOTSTRAP_FOLDER)
        if self._config.hang_timeout:
            (folder / BOOTSTRAP_FOLDER / bootstrap.HANGS_FILE).touch()
        open_board(folder)
        if not (folder / LAUNCH_FILE).exists():
            self._opened = True
            save(self._record, folder / LAUNCH_FILE)

    def run(self) -> int:
        """Run the command to its end; its exit code, or minus the signal that ended it. Raises OSError."""
        environment = child_environment(os.environ, self._config.folder / BOOTSTRAP_FOLDER)
        if self._config.inspector:
            environment |= inspector.variables(self._config.folder, environment)
        code = run_child(self._command, environment, self._own_signals())
        take_locked(self._config.folder)
        remove_bytecode(self._config.folder)
        if self._opened:
            self._finish(code)
        return code

    def _own_signals(self) -> dict[int, Callable[[], None]]:
        """The signal that asks for a capture: most launchers would die of it, so it goes no further."""
        if self._config.mode not in ALWAYS_ON or self._config.signal == "none":
            return {}
        return {getattr(signal, f"SIG{self._config.signal}"): self._ask}

    def _ask(self) -> None:
        with suppress(OSError):  # the folder is gone: the command matters more
            ask(self._config.folder, None)

    def _finish(self, code: int) -> None:
        record = LaunchMetadata(**{**vars(self._record), "exit_code": code, "ended_at": now("milliseconds")})
        with suppress(OSError):  # the folder is gone or full: the command's exit code matters more
            for folder in (self._config.folder, *further_jobs(self._config.folder)):
                save(record, folder / LAUNCH_FILE)


def child_environment(environment: Mapping[str, str], bootstrap_folder: Path) -> dict[str, str]:
    """``environment`` with the bootstrap first on ``PYTHONPATH``, and without the variable that asks for a recording of
    its own.
    """
    before = environment.get("PYTHONPATH")
    path = str(bootstrap_folder) if not before else os.pathsep.join((str(bootstrap_folder), before))
    return {**{name: value for name, value in environment.items() if name != bootstrap.VARIABLE}, "PYTHONPATH": path}


def run_child(
    command: Sequence[str], environment: Mapping[str, str], own: Mapping[int, Callable[[], None]] | None = None
) -> int:
    """Run a command with our standard streams and file descriptors, passing signals on but those that are our ``own``.

    Returns its exit code, or minus the signal that ended it. Raises OSError when it cannot be started.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []
    ours = own or {}

    def forward(number: int, _frame: FrameType | None) -> None:
        if number in ours:
            ours[number]()
            return
        if number in FROM_TERMINAL and _terminal_is_ours():
            return
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    def take(numbers: Iterable[int]) -> None:
        before.update({number: signal.signal(number, forward) for number in numbers})

    before: dict[int, Any] = {}
    # What this process ignores (nohup, a shell's `&`) the command ignores too, unless it then takes the signal itself,
    # as torchrun does: those are passed on from when it has started.
    ignored = [number for number in FORWARDED if signal.getsignal(number) == signal.SIG_IGN]
    try:
        take(number for number in FORWARDED if number not in ignored)
        child = subprocess.Popen(list(command), env=dict(environment), close_fds=False)
        take(ignored)
        for number in early:
            child.send_signal(number)
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_by(number: int) -> None:
    """End this process by a signal, as the command ended, without a core dump of its own."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def isolated_python(command: Sequence[str]) -> str | None:
    """The option with which a command starts a Python that ignores ``PYTHONPATH`` or ``site``; None without."""
    for position, word in enumerate(command):
        if re.fullmatch(r"python[\d.]*", Path(word).name):
            for option in command[position + 1 :]:
                if not re.fullmatch(r"-[a-zA-Z]+", option) or option in ("-m", "-c"):
                    break
                if set(option) & set("EIS"):
                    return option
    return None


def _unfinished(folder: Path) -> bool:
    try:
        return load_launch(folder / LAUNCH_FILE).exit_code is None
    except ValueError:
        return False


def _terminal_is_ours() -> bool:
    """Is this process in the foreground of a terminal, so that the terminal's signals reach the command as well?"""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
