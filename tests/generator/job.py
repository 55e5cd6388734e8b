"""Simulates a job, knows its true times and writes its traces."""

from __future__ import annotations

import functools
import gc
import gzip
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.generator import chrome
from tests.generator.causes import Cause
from tests.generator.cpu import CpuProcess
from tests.generator.cuda import CudaProcess
from tests.generator.engine import Host, run
from tests.generator.fsdp import FullyShardedDataParallel
from tests.generator.loader import Delivery, Loader
from tests.generator.parts import MS
from tests.generator.pipeline import Pipeline
from tests.generator.spec import JobSpec
from tests.generator.training import DataParallel, Training
from tests.generator.truth import Truth, truth_of
from tests.generator.work import Collective, Fabric
from tests.generator.zero import Zero1, Zero2, Zero3

_BEGIN_NS = 1_000 * MS

TENSORBOARD = "{host}_{pid}.{ms}.pt.trace.json"
"""How torch's ``tensorboard_trace_handler`` names files: with the host's name, without the rank."""

_STRATEGIES: dict[str, type[Training]] = {
    "ddp": DataParallel,
    "fsdp": FullyShardedDataParallel,
    "zero1": Zero1,
    "zero2": Zero2,
    "zero3": Zero3,
    "pipeline": Pipeline,
}


@dataclass(frozen=True)
class Job:
    """A simulated job."""

    spec: JobSpec
    hosts: tuple[Host, ...]
    collectives: tuple[Collective, ...]
    """All of them, warm-up included, in the order in which their first rank issued them."""
    deliveries: dict[int, list[Delivery]]

    @functools.cached_property
    def truth(self) -> Truth:
        """Its true times."""
        return truth_of(self.spec, self.hosts, self.collectives, self.deliveries)

    def lost_ns(self, *causes: Cause) -> float:
        """Step time that these causes cost: this job's against the same job simulated without them."""
        return self.truth.step_time_ns - step_time_ns(self.spec.without(*causes))

    def write(
        self,
        folder: Path,
        *,
        compress: bool = True,
        file_template: str = "rank{rank}.json",
        ranks: Sequence[int] | None = None,
    ) -> list[Path]:
        """Write one trace per rank (or of ``ranks`` only) into ``folder`` (made if absent); return the files.

        ``file_template`` may name {rank}, {host}, {pid} and {ms}, the end of the recording: ``TENSORBOARD`` does.
        """
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        for host in self.hosts:
            if ranks is not None and host.rank not in ranks:
                continue
            name = file_template.format(
                rank=host.rank,
                host=self.spec.host_name(host.rank),
                pid=chrome.pid(host.rank),
                ms=chrome.finished_ms(self.spec, host),
            )
            path = folder / name
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
        programs.append(_STRATEGIES[spec.strategy](process, loaders[rank]).run(steps))
    with _no_garbage_collection():
        run(hosts, programs, fabric)
    return Job(spec, tuple(hosts), tuple(fabric.collectives), {rank: made.deliveries for rank, made in loaders.items()})


_STEP_TIMES_NS: dict[str, float] = {}
"""Of jobs as they are shown, which is all of them."""


def step_time_ns(spec: JobSpec) -> float:
    """``simulate(spec).truth.step_time_ns``: for jobs whose traces nobody reads, as what another job would be with a
    change, or without its causes. Of each once.
    """
    shown = repr(spec)
    if shown not in _STEP_TIMES_NS:
        _STEP_TIMES_NS[shown] = simulate(spec).truth.step_time_ns
    return _STEP_TIMES_NS[shown]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A simulation makes a million objects and drops none: looking for garbage among them takes longer than it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _load_ns(spec: JobSpec, rank: int, batch: int) -> int:
    """Load time of a rank's ``batch``-th batch, warm-up included."""
    per_step = 1 if spec.strategy == "pipeline" else spec.microbatches
    load_ns = spec.load_ns(rank, spec.first_step - spec.warmup + batch // per_step)
    if not spec.loader.spread:
        return load_ns
    # A batch takes as long whenever, and however often, it is asked for: jobs with a change load the same batches.
    drawn = random.Random(f"{spec.seed} {rank} {batch}").gauss(0.0, spec.loader.spread)
    return round(load_ns * math.exp(drawn - spec.loader.spread**2 / 2))
