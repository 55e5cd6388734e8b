"""Runs real trainings under ``perfscope run`` and reads back what they recorded; writes files of a pretended system."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from perfscope.recording.metadata import LaunchMetadata, RunMetadata, load_launch, load_run
from perfscope.recording.paths import LAUNCH_FILE, run_file, trace_file
from perfscope.recording.vocabulary import GARBAGE_COLLECTION
from tests.waiting import PATIENCE_S, free_port, until

SCRIPTS = Path(__file__).parent / "scripts"
PERFSCOPE = (sys.executable, "-c", "from perfscope.cli.main import main; main()")

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


@dataclass
class Recording:
    """A finished run of the command line."""

    folder: Path
    exit_code: int
    out: str
    err: str

    @property
    def messages(self) -> str:
        """What perfscope printed on stderr, without the command's own output."""
        return "\n".join(line for line in self.err.splitlines() if line.startswith("perfscope:"))

    @property
    def launch(self) -> LaunchMetadata:
        return load_launch(self.folder / LAUNCH_FILE)

    def run(self, rank: int = 0) -> RunMetadata:
        return load_run(run_file(self.folder, rank))

    def traces(self) -> list[str]:
        """Names of all files that look like traces, finished or not."""
        return sorted(path.name for path in self.folder.iterdir() if "trace" in path.name)

    def trace(self, rank: int = 0, capture: int = 0) -> Trace:
        with gzip.open(trace_file(self.folder, rank, capture)) as file:
            return Trace(json.load(file))


class Trace:
    """A Chrome trace as JSON."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content
        self.events = [event for event in content["traceEvents"] if event.get("ph") == "X"]

    def steps(self) -> list[int]:
        """Numbers of the steps, in order of time."""
        steps = [event for event in self.events if event["name"].startswith("ProfilerStep#")]
        return [int(event["name"].partition("#")[2]) for event in sorted(steps, key=lambda event: event["ts"])]

    def recorded_steps(self) -> list[int]:
        """Numbers of the recorded steps: without the last warm-up step, which is in the trace before them."""
        return [number for number in self.steps() if number >= self.content["perfscope"]["first_step"]]

    def ranges(self) -> Counter[str]:
        """How often each range of ours occurs on the host in the recorded steps, garbage collections left out."""
        first = f"ProfilerStep#{self.recorded_steps()[0]}"
        begin = min(event["ts"] for event in self.events if event["name"] == first)
        return Counter(
            event["name"]
            for event in self.events
            if event["name"].startswith("perfscope::")
            and event["name"] != GARBAGE_COLLECTION
            and event.get("cat") == "user_annotation"
            and event["ts"] >= begin
        )

    def within(self, inner: str, outer: str) -> bool:
        """Does every event ``inner`` lie inside one called ``outer``?"""
        spans = [(event["ts"], event["ts"] + event["dur"]) for event in self.events if event["name"] == outer]
        return all(
            any(start <= event["ts"] and event["ts"] + event["dur"] <= end for start, end in spans)
            for event in self.events
            if event["name"] == inner
        )


def kill_all(process: subprocess.Popen[Any]) -> None:
    """Kill a command and all that it started: torchrun's workers have sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        for each in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
            with suppress(psutil.NoSuchProcess):
                each.kill()


def record(
    folder: Path,
    *arguments: str,
    options: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    stdin: str = "",
    timeout: float = PATIENCE_S,
) -> Recording:
    """``perfscope run OPTIONS -- ARGUMENTS``, recording into ``folder``."""
    process = subprocess.Popen(
        [*PERFSCOPE, "run", "--output", str(folder), *options, "--", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(stdin, timeout)
    except BaseException:
        kill_all(process)
        process.communicate()
        raise
    return Recording(folder, process.returncode, out, err)


def record_ranks(folder: Path, ranks: int, script: str, *arguments: str, options: tuple[str, ...] = ()) -> Recording:
    """``record`` so many processes of a script, each a rank, without a launcher of torch's."""
    port = {"MASTER_PORT": str(free_port())}
    return record(folder, *of_ranks(ranks, script, *arguments), options=options, environment=port)


def of_ranks(ranks: int, script: str, *arguments: str) -> tuple[str, ...]:
    """A command that starts them; ``MASTER_PORT`` is to say where they meet."""
    return sys.executable, str(SCRIPTS / "ranks.py"), str(ranks), script, *arguments


Started = TypeVar("Started", bound="Running")


class Running:
    """A command under ``perfscope run`` that goes on until the file ``stop`` beside its recording is there.

    As a context it leaves no process behind.
    """

    def __init__(
        self, folder: Path, *command: str, options: tuple[str, ...] = (), environment: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [*PERFSCOPE, "run", "--output", str(folder), *options, "--", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            start_new_session=True,
        )

    @staticmethod
    def stop_file(folder: Path) -> Path:
        """Ends what records into ``folder``."""
        return folder.parent / "stop"

    def __enter__(self: Started) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        kill_all(self.process)
        self.process.communicate()

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition while the command runs."""
        until(condition, what, self.process)

    def until_written(self, *names: str) -> None:
        """Wait for files of these names in the recording, with something in them."""
        files = [self.folder / name for name in names]
        self.until(lambda: all(file.exists() and file.stat().st_size for file in files), f"{names} are written")

    def stop(self) -> Recording:
        """Let the command end."""
        self.stop_file(self.folder).touch()
        return self.ended()

    def ended(self) -> Recording:
        """What is there once the command has ended."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return Recording(self.folder, self.process.returncode, out, err)


def train(folder: Path, *arguments: str, options: tuple[str, ...] = (), **more: Any) -> Recording:
    """``record`` a plain Python process that runs ``scripts/train.py``."""
    return record(folder, sys.executable, str(SCRIPTS / "train.py"), *arguments, options=options, **more)


def without_compiled(folder: Path) -> dict[str, str]:
    """Environment of processes that find nothing compiled of the collectors, by a file in ``folder``."""
    hidden = "import sys; sys.modules['perfscope.collectors.phases._clock'] = None\n"
    (folder / "sitecustomize.py").write_text(hidden)
    return {"PYTHONPATH": os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))}


SHORT = ("--wait", "1", "--warmup", "1", "--active", "2")
"""Options that record steps 2 and 3."""


def write_files(root: Path, files: dict[str, str]) -> Path:
    """Write ``files`` (name -> text) below ``root``, as a system's /proc and /sys would have them; returns ``root``."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
