"""Real clusters for tests, on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
        deadline = time.monotonic() + 60
        while not (file.exists() and file.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.1)
        with distributed.Client(scheduler_file=str(file), timeout=60, set_as_default=False) as client:
            if workers:
                client.wait_for_workers(workers, timeout=60)
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
