"""Runs the user's command for a few steps, with settings applied from outside, and reads the step times."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from perfscope.analyzers.history.rank_history import RankStepTimes, read
from perfscope.collectors.config import CollectorConfig
from perfscope.collectors.launch.folder import package_root
from perfscope.collectors.launch.run import Launch, child_environment
from perfscope.collectors.overrides.overrides import Overrides
from perfscope.collectors.overrides.stop import stopped
from perfscope.errors import TraceError, UnusableInput
from perfscope.frozen import dataclass
from perfscope.recording.metadata import RunMetadata, load_launch, save
from perfscope.recording.paths import BOOTSTRAP_FOLDER, LAUNCH_FILE
from perfscope.recording.role_jobs import open_main
from perfscope.tune.candidates import Value, shown
from perfscope.tune.measuring import Measurement, measured
from perfscope.tune.search import TrialFailed

OUTPUT_FILE: Final = "output.log"
"""In a trial's folder: the command's output."""

ENVIRONMENT: Final = "env."
"""Prefix of settings that are environment variables."""

AFTER_RECORDING: Final = 2
"""Steps after the capture of the recording, so that the capture is whole."""

SETTLING: Final = 6
"""First steps of a trial, which do not count: allocation, DDP's new buckets, the collector's start."""

MOST_QUEUED: Final = 64
"""At most so many batches that workers loaded ahead are used up before steps count."""

LEAST_STEPS: Final = 8
"""Fewer measured steps are no evidence."""

GRACE_S: Final = 60.0
"""Time for the command to end once its ranks have left."""

_SHORT_GRACE_S: Final = 15.0
_LOOK_S: Final = 0.1
_TAIL_BYTES: Final = 1 << 16

_ERROR: Final = re.compile(r"^(?:\[rank\d+\]: ?)?[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b")
"""The last line of a traceback; torchrun's own, which reports only that a rank failed, is left out."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """The user's command, and what its recording shows of it."""

    words: tuple[str, ...]
    folder: Path
    """Each run gets a folder of its own under it."""
    datasets: tuple[str, ...] = ()
    """Classes of the training's datasets."""
    microbatches: int = 1
    workers: int = 0
    prefetch: int = 2
    limit_s: float | None = None
    """A run that takes longer is ended, and counts as failed; None: no limit."""


def record(command: Command) -> Path:
    """Run the command under the profiler until a capture is whole; the recording's folder. Raises UnusableInput."""
    folder = command.folder / "recording"
    config = CollectorConfig(output=str(folder.absolute()), package_root=package_root())
    config = replace(config, stop_after=config.cycle + AFTER_RECORDING)
    code = _run(command, config, Overrides())
    if code != 0 and not any(folder.glob("*.trace.json*")):
        raise UnusableInput(f"the command failed (exit code {code}) before anything was recorded; {_tail(folder)}")
    return folder


class Trials:
    """Runs of the command, each in a folder of its own: ``trial-00``, ``trial-01`` and so on."""

    def __init__(self, command: Command, steps: int) -> None:
        self._command = command
        self._steps = steps
        self.number = 0

    def measure(self, settings: Mapping[str, Value]) -> Measurement:
        """Run with ``settings`` for some steps. Raises TrialFailed."""
        command = self._command
        folder = command.folder / f"trial-{self.number:02d}"
        self.number += 1
        workers, queued = _queued(command, settings)
        settling = SETTLING + queued
        config = CollectorConfig(
            output=str(folder.absolute()),
            package_root=package_root(),
            mode="steps",
            signal="none",
            sample_every=0.0,
            stop_after=settling + self._steps,
        )
        code = _run(command, config, overrides_of(command, settings))
        try:
            job = open_main(folder)
            ranks = [read(path) for path in job.histories.values()]
        except (UnusableInput, TraceError) as error:
            raise TrialFailed(f"no step was measured (exit code {code}); {_tail(folder)}") from error
        _check_applied(list(job.runs.values()), settings)
        if len(ranks) < max(run.world_size for run in job.runs.values()):
            raise TrialFailed(f"only {len(ranks)} ranks wrote step times (exit code {code}); {_tail(folder)}")
        durations = _common(ranks, settling)
        if durations.shape[1] < LEAST_STEPS:
            raise TrialFailed(
                f"only {durations.shape[1]} steps were measured (exit code {code}), {LEAST_STEPS} are needed; "
                f"the command must run at least {settling + LEAST_STEPS} steps; {_tail(folder)}"
            )
        return measured(durations * 1e3, max(workers, 1))


def overrides_of(command: Command, settings: Mapping[str, Value]) -> Overrides:
    """Settings as the ranks read them."""
    environment = {name.removeprefix(ENVIRONMENT): value for name, value in settings.items() if name[:4] == ENVIRONMENT}
    return Overrides(
        settings={name: value for name, value in settings.items() if name[:4] != ENVIRONMENT},
        environment={name: None if value is None else shown(value) for name, value in environment.items()},
        datasets=command.datasets,
        microbatches=command.microbatches,
    )


def _queued(command: Command, settings: Mapping[str, Value]) -> tuple[int, int]:
    """Workers, and steps after which the batches that they loaded before the first one are used up."""
    workers = settings.get("dataloader.num_workers", command.workers)
    prefetch = settings.get("dataloader.prefetch_factor", command.prefetch)
    assert isinstance(workers, int)
    assert isinstance(prefetch, int)
    return workers, min(-(-workers * prefetch // command.microbatches), MOST_QUEUED)


def _common(ranks: Sequence[RankStepTimes], settling: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Durations in µs, ranks x steps, of the steps that all ranks took after the first ``settling``."""
    numbers = set.intersection(*(set(rank.number[rank.number >= settling].tolist()) for rank in ranks))
    return np.array([rank.step_us[np.isin(rank.number, list(numbers))] for rank in ranks], dtype=np.float64)


def _check_applied(runs: Sequence[RunMetadata], settings: Mapping[str, Value]) -> None:
    """Were the settings in force on every rank? Raises TrialFailed."""
    for run in runs:
        for name, value in settings.items():
            if against := _against(run, name, value):
                raise TrialFailed(f"rank {run.rank}: {against}")


def _against(run: RunMetadata, name: str, value: Value) -> str:
    """Why a setting was not in force on a rank; empty where it was."""
    variable = name.removeprefix(ENVIRONMENT)
    if name == "env.OMP_NUM_THREADS" and run.cpu_threads is not None and str(run.cpu_threads) != shown(value):
        return f"the script sets its number of threads itself, to {run.cpu_threads} (torch.set_num_threads)"
    if variable != name and run.environment.get(variable, shown(value)) != shown(value):
        return f"the script or its launcher sets {variable} itself, to {run.environment[variable]}"
    entry = run.applied.get(name)
    if entry is not None and entry["refused"]:
        return str(entry["refused"])
    return "" if entry is not None and entry["times"] else f"it never reached the code where {name} is set"


def _run(command: Command, config: CollectorConfig, overrides: Overrides) -> int:
    """Run the command into its folder, ended after ``config.stop_after`` steps; its exit code. Raises UnusableInput."""
    launch = Launch(config, command.words)
    folder = config.folder
    try:
        launch.prepare(overwrite=True)
        if overrides != Overrides(datasets=command.datasets, microbatches=command.microbatches):
            overrides.save(folder / BOOTSTRAP_FOLDER)
        with (folder / OUTPUT_FILE).open("wb") as output:
            process = subprocess.Popen(
                command.words,
                env=child_environment(os.environ, folder / BOOTSTRAP_FOLDER),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the command
            )
    except OSError as error:
        raise UnusableInput(f"{command.words[0]} cannot be run, or {folder} cannot be written ({error})") from error
    try:
        code = _wait(process, folder, command.limit_s)
    finally:
        _end(process)
    with suppress(OSError, ValueError):
        save(replace(load_launch(folder / LAUNCH_FILE), exit_code=code), folder / LAUNCH_FILE)
    return code


def _wait(process: subprocess.Popen[bytes], folder: Path, limit_s: float | None) -> int:
    """Wait until the command has ended; end it where it goes on after its ranks have left, or beyond its limit."""
    began = time.monotonic()
    left_at: float | None = None
    while (code := process.poll()) is None:
        time.sleep(_LOOK_S)
        now = time.monotonic()
        with suppress(OSError):
            if left_at is None and stopped(folder):
                left_at = now
        if (left_at is not None and now - left_at > GRACE_S) or (limit_s is not None and now - began > limit_s):
            break
    return code if code is not None else _end(process)


def _end(process: subprocess.Popen[bytes]) -> int:
    """End the command and what it started: SIGTERM first, then SIGKILL."""
    for number, patience in ((signal.SIGTERM, _SHORT_GRACE_S), (signal.SIGKILL, None)):
        if process.poll() is None:
            with suppress(ProcessLookupError):
                process.send_signal(number) if number == signal.SIGTERM else os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
    # Ranks that outlived their launcher are in its session.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode is not None
    return process.returncode


def _tail(folder: Path) -> str:
    """The last error in the command's output, or its last line, and the file."""
    path = folder / OUTPUT_FILE
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    except OSError:
        return f"see {path}"
    errors = [line for line in lines if _ERROR.match(line) and "ChildFailedError" not in line]
    last = (errors or [line for line in lines if line] or ["(empty)"])[-1]
    return f"its output ends: {last[:200]} ({path})"
