"""Runs programs and reads what they print after each step: one to its end, or two in turns."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from tests.codebases.catalog import ASSETS, PORT, Program
from tests.collectors.harness import kill_all

LIMIT_S = 300.0
STARTING = 5
"""Steps that are not timed: what is allocated, connected and loaded at the start takes longer."""
TURN, TURN_S = 8, 1.0
"""A turn lasts so many steps, and at least so long."""
STEPS_IN_TURNS = 1000
_POLL_S = 0.005


@dataclass
class Printed:
    """What a run of a program printed: a loss and a time for each step."""

    losses: list[str] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    code: int = 0
    out: str = ""
    others: float = 0.0
    """Cores that other processes of the machine used meanwhile."""

    def step_s(self, steps: range) -> float:
        """Median seconds of these steps; 0 without any."""
        times = [self.ends[each] - self.ends[each - 1] for each in steps if 0 < each < len(self.ends)]
        return median(times) if times else 0.0

    @property
    def failure(self) -> str:
        """Its first line that names an error, or what it printed last."""
        named = re.search(r"^(?:\[rank\d\]: ?)?(\w*(?:Error|Exception): .*)", self.out, re.MULTILINE)
        return f"exit code {self.code}: {named[1] if named else self.out[-300:]}"


class _Running:
    """A program that runs in a folder of its own; close() ends it."""

    def __init__(self, command: tuple[str, ...], program: Program, assets: Path, **variables: str) -> None:
        self.printed = Printed()
        self.program = program
        self.turns: list[float] = []
        """Mean step of each turn, s."""
        self._until, self._lines = time.monotonic() + LIMIT_S, list[str]()
        self._folder, self._log = tempfile.TemporaryDirectory(), tempfile.NamedTemporaryFile()  # noqa: SIM115
        self._reader = open(self._log.name, "rb")  # noqa: PTH123, SIM115 - close() closes it
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "RAY_DEDUP_LOGS": "0", "HF_HUB_OFFLINE": "1",
            "TORCH_EXTENSIONS_DIR": str(_extensions(assets)), **variables,
        }  # fmt: skip
        self._process = subprocess.Popen(
            tuple(word.replace(ASSETS, str(assets)).replace(PORT, str(_free_port())) for word in command),
            stdout=self._log, stderr=subprocess.STDOUT, cwd=self._folder.name, env=environment, start_new_session=True,
        )  # fmt: skip

    def goes_on(self) -> bool:
        """Read what it has printed. False when it has ended, or its time is up."""
        ended, now = self._process.poll() is not None, time.perf_counter()
        for line in self._reader:
            if not line.endswith(b"\n"):
                self._reader.seek(-len(line), os.SEEK_CUR)  # the rest is about to come
                break
            self._lines.append(line.decode(errors="replace"))
            if found := re.search(self.program.log, self._lines[-1]):
                self.printed.losses.append(found[1])
                self.printed.ends.append(float(found[2]) if found.re.groups > 1 else now)
        if not ended and time.monotonic() > self._until:
            self._lines.append(f"stopped after {LIMIT_S:.0f} s")
            return False
        return not ended

    def until(self, steps: int) -> bool:
        """Wait for so many steps. False where it ends before."""
        while self.goes_on() and len(self.printed.ends) < steps:
            time.sleep(_POLL_S)
        return len(self.printed.ends) >= steps

    def take_turn(self, seconds: float) -> bool:
        """Let it go on for so long, and time the steps that lie wholly in that. False when it has ended."""
        self.goes_on()  # what it printed before it was stopped
        first = len(self.printed.ends)
        self.signal(signal.SIGCONT)
        until = time.monotonic() + seconds
        while (goes_on := self.goes_on()) and time.monotonic() < until:
            time.sleep(_POLL_S)
        self.signal(signal.SIGSTOP)
        # The first step that ends in a turn began before it.
        ends = self.printed.ends[first:]
        if len(ends) > 2:
            self.turns.append((ends[-1] - ends[0]) / (len(ends) - 1))
        return goes_on

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes: launchers, ranks, workers."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(number)

    def close(self) -> Printed:
        """End it where it has not, and return what it printed."""
        if self._process.poll() is None:
            kill_all(self._process)
        self.printed.code = self._process.wait()
        self.printed.out = "".join(self._lines)
        for each in (self._reader, self._log):
            each.close()
        self._folder.cleanup()
        return self.printed


def run(command: tuple[str, ...], program: Program, assets: Path) -> Printed:
    """Run a command to its end or the limit."""
    # One that was killed while it compiled leaves a lock for which the next would wait for ever.
    for lock in _extensions(assets).glob("**/lock"):
        lock.unlink()
    begin, used_s = time.monotonic(), _used_s()
    running = _Running(command, program, assets, STEPS=str(program.steps))
    while running.goes_on():
        time.sleep(_POLL_S)
    printed = running.close()
    printed.others = max(_used_s() - used_s, 0.0) / (time.monotonic() - begin)
    return printed


def run_in_turns(
    commands: Sequence[tuple[str, ...]], program: Program, assets: Path, turns: int
) -> tuple[list[float], list[Printed]]:
    """Two programs started at once, of which one is stopped while the other goes on, so that what else keeps
    the machine busy slows both: (the second's mean step over the first's, turn by turn; what they printed).
    """
    both: list[_Running] = []
    for command in commands:
        both.append(_Running(command, program, assets, STEPS=str(STEPS_IN_TURNS)))
        if not both[-1].until(STARTING):
            return [], [each.close() for each in both]
        both[-1].signal(signal.SIGSTOP)
    go_on = True
    while go_on and len(both[-1].turns) < turns:
        for each in both:
            seconds = max(TURN * each.printed.step_s(range(STARTING // 2, STARTING)), TURN_S)
            go_on &= each.take_turn(seconds)
    return [after / before for before, after in zip(*(each.turns for each in both), strict=False)], [
        each.close() for each in both
    ]


def _extensions(assets: Path) -> Path:
    """Where DeepSpeed puts what it compiles at its first start."""
    return assets.parent / "extensions"


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _used_s() -> float:
    """CPU time of the machine less that of this process and of those that it has waited for, s."""
    machine = psutil.cpu_times()
    busy = sum(machine[:3])  # user, nice and system
    mine = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy - sum(each.ru_utime + each.ru_stime for each in mine)
