"""Two processes that name their rank and open named ranges; started by test_nsys_recorded.py.

Each writes what it measured of itself with its own clock, in ns since the epoch, into the folder that it is given.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from pathlib import Path

import nvtx

RANKS, STEPS = 2, 3


def busy(seconds: float) -> None:
    """Compute, without a call into the operating system."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def train(rank: int, folder: str) -> None:
    nvtx.mark(f"perfscope::rank#{rank} of {RANKS}")
    whole = nvtx.start_range("training", domain="mine")
    measured = []
    for step in range(STEPS):
        began = time.time_ns()
        with nvtx.annotate(f"perfscope::step#{step}"):
            with nvtx.annotate("perfscope::dataloader"):
                time.sleep(0.010 * (rank + 1))
            with nvtx.annotate("aten::mm, seq = 12, op_id = 4, sizes = [[2, 3], [3, 4]]"):
                busy(0.015)
        measured.append((began, time.time_ns()))
    nvtx.end_range(whole)
    Path(folder, f"rank{rank}.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=train, args=(rank, sys.argv[1])) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(process.exitcode or 0 for process in processes))
