"""Simulates a job, knows the truth about it and writes its traces."""

from __future__ import annotations

import functools
import gzip
from dataclasses import dataclass
from pathlib import Path

from tests.generator import chrome
from tests.generator.engine import Collective, Fabric, Host, run
from tests.generator.loader import Delivery, Loader
from tests.generator.process import CpuProcess, CudaProcess
from tests.generator.spec import MS, Cause, JobSpec
from tests.generator.training import STRATEGIES
from tests.generator.truth import Truth, establish

_BEGIN_NS = 1_000 * MS


@dataclass(frozen=True)
class Job:
    """A simulated job."""

    spec: JobSpec
    hosts: tuple[Host, ...]
    collectives: tuple[Collective, ...]
    """All of them, warm-up included, in order."""
    deliveries: dict[int, list[Delivery]]

    @functools.cached_property
    def truth(self) -> Truth:
        """What is true of it."""
        return establish(self.spec, self.hosts, self.collectives, self.deliveries)

    def lost_ns(self, *causes: Cause) -> float:
        """Step time that these causes cost: this job's against the same job simulated without them."""
        return self.truth.step_time_ns - simulate(self.spec.without(*causes)).truth.step_time_ns

    def write(self, folder: Path, *, compress: bool = True, file_template: str = "rank{rank}.json") -> list[Path]:
        """Write one trace a rank into ``folder`` (made if need be) and return the files."""
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        for host in self.hosts:
            path = folder / file_template.format(rank=host.rank)
            text = chrome.document(self.spec, host).encode()
            if compress:
                path = path.with_name(path.name + ".gz")
                path.write_bytes(gzip.compress(text, compresslevel=1))
            else:
                path.write_bytes(text)
            files.append(path)
        return files


def simulate(spec: JobSpec) -> Job:
    """Run the job: warm-up steps first, then the recorded ones."""
    steps = range(spec.first_step - spec.warmup, spec.first_step + spec.steps)
    fabric = Fabric(spec.ranks, spec.network.end_jitter_ns, spec.seed)
    hosts, programs, loaders = [], [], {}
    for rank in range(spec.ranks):
        start = _BEGIN_NS + spec.start_skew_ns.get(rank, 0)
        host = Host(rank, start, spec.noise, spec.seed)
        process = CudaProcess(spec, host, fabric) if spec.backend == "nccl" else CpuProcess(spec, host, fabric)
        loaders[rank] = Loader(spec.loader, start, functools.partial(_load_ns, spec, rank))
        hosts.append(host)
        programs.append(STRATEGIES[spec.strategy](process, loaders[rank]).run(steps))
    run(hosts, programs, fabric)
    return Job(spec, tuple(hosts), tuple(fabric.collectives), {rank: made.deliveries for rank, made in loaders.items()})


def _load_ns(spec: JobSpec, rank: int, batch: int) -> int:
    """Load time of a rank's ``batch``-th batch, warm-up included."""
    return spec.load_ns(rank, spec.first_step - spec.warmup + batch)
