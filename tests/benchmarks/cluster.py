"""A large job read by a dask cluster of which one worker is killed and one stopped; the answer is right all the same.

python -m tests.benchmarks.cluster --ranks 4096 --workers 3
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

from perfscope.analyzers.analyze import analyze
from perfscope.execution import executors
from perfscope.results.summary import Summary
from tests.clusters import dask_cluster
from tests.generator import Job, JobSpec, ModelSpec, SlowCompute, simulate

KILL_AT, STOP_AT = 0.1, 0.2
"""Shares of the ranks that are read by then."""


def job(ranks: int) -> Job:
    """Data-parallel training of two layers, in which one rank computes half as fast again as the others."""
    slow = SlowCompute(ranks=(2 * ranks // 3,), factor=1.5)
    return simulate(JobSpec(ranks=ranks, steps=2, model=ModelSpec(layers=1), causes=(slow,)))


def _pids(address: str) -> list[int]:
    """The processes of the workers."""
    from distributed import Client

    with Client(address, set_as_default=False) as client:
        return [int(each["pid"]) for each in client.run(lambda: {"pid": os.getpid()}).values()]


def analyzed(folder: Path, workers: int) -> Summary:
    """Read on a cluster of so many processes, two of which are lost in the course of it."""
    lost: dict[float, int] = {}
    with (
        tempfile.TemporaryDirectory() as scratch,
        dask_cluster(Path(scratch), workers) as address,
        executors.cluster(address) as executor,
    ):
        pids = _pids(address)

        def progress(done: int, total: int) -> None:
            for share, number in ((KILL_AT, signal.SIGKILL), (STOP_AT, signal.SIGSTOP)):
                if share not in lost and done >= share * total:
                    lost[share] = pids[len(lost)]
                    os.kill(lost[share], number)

        try:
            return analyze(folder, executor=executor, progress=progress)
        finally:
            if STOP_AT in lost:
                os.kill(lost[STOP_AT], signal.SIGKILL)


def faults(summary: Summary, truth: Job) -> list[str]:
    """What is not as it was simulated."""
    (slow,) = truth.spec.causes
    found = {
        "failures": [failure.error for failure in summary.job.failures],
        "ranks": len(summary.job.ranks) - truth.spec.ranks,
        "stragglers": [row.rank for row in summary.stragglers if row.rank not in slow.ranks],
        "straggler": not summary.stragglers,
        "step time": abs(summary.job.step_time_us * 1e3 / truth.truth.step_time_ns - 1) > 0.001,
    }
    return [f"{what}: {value}" for what, value in found.items() if value]


def main() -> int:
    """Make the job, read it, compare with what was simulated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=3)
    options = parser.parse_args()
    os.environ["PERFSCOPE_CACHE"] = "off"
    with tempfile.TemporaryDirectory() as place:
        made = job(options.ranks)
        made.write(Path(place))
        print(f"{options.ranks} ranks written, {time.process_time():.0f} s of CPU", flush=True)
        began, used = time.monotonic(), time.process_time()
        summary = analyzed(Path(place), options.workers)
        wrong = faults(summary, made)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{options.workers} workers, one killed and one stopped: {time.monotonic() - began:.0f} s, "
        f"{time.process_time() - used:.0f} s of CPU here and {workers.ru_utime + workers.ru_stime:.0f} s in workers, "
        f"{peak} MiB here at most; {'; '.join(wrong) or 'as simulated'}"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
