"""Real clusters for tests, on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[1]


@contextmanager
def dask_cluster(folder: Path, workers: int) -> Iterator[str]:
    """The address of a scheduler with that many workers, processes of their own, on loopback."""
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed (the dask extra)")
    file = folder / "scheduler.json"
    commands = [["scheduler", "--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"]]
    if workers:
        commands.append(
            ["worker", "--nworkers", str(workers), "--nthreads", "1", "--no-dashboard", "--memory-limit", "0"]
        )
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "dask", *command, "--scheduler-file", str(file)],
            # The workers import this module to call its functions.
            env={**os.environ, "DASK_TEMPORARY_DIRECTORY": str(folder), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for command in commands
    ]
    try:
        until(lambda: file.exists() and file.stat().st_size, "the scheduler is there", started[0])
        with distributed.Client(scheduler_file=str(file), timeout=PATIENCE_S, set_as_default=False) as client:
            if workers:
                client.wait_for_workers(workers, timeout=PATIENCE_S)
            address = client.scheduler.address
        yield address
    finally:
        for process in started:
            process.terminate()
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:  # as while it starts a worker anew in the place of one that died
                process.kill()
                process.wait()
