"""The jobs of which pages are pictured: recorded here, sampled, generated, or of hardware that only recordings are of.

Each is made in a folder of its own, and gives what to write: a ``Summary`` or a ``Comparison``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import perfscope
from perfscope.analyzers.compare.compare import compare
from perfscope.results.comparison import Comparison
from perfscope.results.prices import Price, priced
from perfscope.results.summary import Summary
from tests.analyzers.readers.nsys_jobs import write_report
from tests.benchmarks.page import spec
from tests.generator import MS, JobSpec, LoaderSpec, SlowHost, SlowLoader, simulate
from tests.stuck.jobs import stuck_job

ROOT: Final = Path(__file__).parents[2]
TRACES: Final = ROOT.parent / "shared" / "traces"
"""Recordings by other projects, not a part of this one."""

HANG: Final = 7001
"""Seed of a job that stands still."""


class LeftOutError(Exception):
    """A page that cannot be made here, and why."""


def _sample(name: str) -> Callable[[Path], Summary]:
    return lambda folder: perfscope.analyze(ROOT / "sample_traces" / name)


def _real(name: str) -> Callable[[Path], Summary]:
    def analyzed(folder: Path) -> Summary:
        if not (TRACES / name).exists():
            raise LeftOutError(f"{TRACES / name} is not there")
        return perfscope.analyze(TRACES / name)

    return analyzed


def _trained(*options: str) -> Callable[[Path], Summary]:
    """The demo's training, recorded with ``options`` of ``perfscope run``."""

    def analyzed(folder: Path) -> Summary:
        try:
            import torch  # noqa: F401
        except ImportError:
            raise LeftOutError("torch is not installed") from None
        recording = folder / "recording"
        command = [sys.executable, "-m", "perfscope", "run", "--output", str(recording), *options, "--"]
        command += [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["sample_traces/train.py", "--load-ms", "120"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LeftOutError(f"the training failed: {done.stderr[-300:]}")
        return perfscope.analyze(recording)

    return analyzed


def _generated(job: JobSpec, *, price: float | None = None) -> Callable[[Path], Summary]:
    def analyzed(folder: Path) -> Summary:
        simulate(job).write(folder / "traces")
        summary = perfscope.analyze(folder / "traces")
        return summary if price is None else priced(summary, Price(per_device_hour=price))

    return analyzed


def _nsys(folder: Path) -> Summary:
    """A generated job as Nsight Systems records it: without marked steps."""
    return perfscope.analyze(write_report(simulate(spec(4)), folder / "report.sqlite"))


def _comparison(folder: Path) -> Comparison:
    """The job of eight ranks before and after its slow rank went."""
    for name, job in (("slow", spec(8)), ("repaired", replace(spec(8), causes=(), seed=1))):
        simulate(job).write(folder / name)
    return compare(folder / "slow", folder / "repaired")


def _hang(folder: Path) -> Summary:
    stuck_job(HANG).write(folder)
    return perfscope.analyze(folder)


ONE_DEVICE: Final = JobSpec(
    ranks=1, noise=0.02, loader=LoaderSpec(load_ns=6 * MS), causes=(SlowHost(factor=2.0), SlowLoader(load_ns=9 * MS))
)

PAGES: Final[Mapping[str, Callable[[Path], Summary | Comparison]]] = {
    "demo": _trained(),
    "steps_only": _trained("--steps-only"),
    "healthy": _sample("healthy"),
    "starved": _sample("starved"),
    "slow_rank": _sample("slow_rank"),
    "one_device": _generated(ONE_DEVICE),
    "one_h100": _real("h100_eager_single"),
    "one_of_two_a100": _real("a100_ddp_rank0of2"),
    "nsys": _nsys,
    "nsys_h100": _real("nsys_h100_2gpu"),
    "ranks_8": _generated(spec(8)),
    "ranks_64": _generated(spec(64)),
    "ranks_1024": _generated(spec(1024), price=2.5),
    "compared": _comparison,
    "hang": _hang,
    "hang_megatron": _real("flight_recorder/gpu_error_2nd"),
}
"""Name -> what makes it in a folder; raises ``LeftOutError`` where it cannot."""
