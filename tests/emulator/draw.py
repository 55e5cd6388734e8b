"""Random jobs from a seed, with no, one or two things wrong, large or small."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.emulator.emulate import emulate
from tests.emulator.spec import MIB, MS, US, Cause, Cpu, Job, Loader, Model, Network, Recording

AGES = (0, 10, 100, 400, 400)
"""Steps before the emulated ones: loaders that are a few percent too slow drain their queues in hundreds."""
COPIED_AHEAD, COPIED_AHEAD_FROM = 0.25, 70_000
"""Share of jobs that copy the next batch on a stream of its own, and the first seed of such: tests know some
jobs before it as they are."""
NAMES = ("rank{rank}.json", "worker{rank}.1751410836123.pt.trace.json", "{host}_{pid}.1751410836123.pt.trace.json")


@dataclass(frozen=True)
class Plant:
    """One thing that is wrong: a cause, or fields of the job that would be otherwise in a good one."""

    kind: str
    ranks: tuple[int, ...] | None = None
    cause: Cause | None = None
    fields: dict[str, Any] = field(default_factory=dict, hash=False)

    def cure(self, job: Job) -> Job:
        """The job without it."""
        return job.without(self.cause) if self.cause is not None else replace(job, **self.fields)

    def __str__(self) -> str:
        value = f" {self.cause.value:.4g} {self.cause.how}" if self.cause is not None else ""
        return f"{self.kind}{value} of {'all' if self.ranks is None else list(self.ranks)}"


@dataclass(frozen=True)
class Drawn:
    """A random job."""

    seed: int
    job: Job
    plants: tuple[Plant, ...]

    def __str__(self) -> str:
        job, model, recording = self.job, self.job.model, self.job.recording
        parts = (
            f"{job.strategy} {job.ranks} ranks / {job.ranks_per_host} a host, t{job.tensor} p{job.stages}",
            f"m{job.microbatches}, {model.blocks} blocks {model.tokens}x{model.width}, {recording.steps} steps",
            f"without {recording.missing}" if recording.missing else "all ranks",
            f"{'by run, ' if recording.run else ''}{job.loader.workers} workers, item {job.item_every}",
            f"age {job.age}",
            f"noise {job.noise}: {', '.join(map(str, self.plants)) or 'healthy'}",
        )
        return f"{self.seed}: {' '.join(parts)}"


def _between(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def draw(seed: int) -> Drawn:
    """The job of a seed."""
    rng = random.Random(f"emulator {seed}")
    job = _healthy(rng, seed)
    count = rng.choice((0, 1, 1, 1, 1, 2, 2))
    step_ns = emulate(replace(job, warmup=5, recording=replace(job.recording, steps=3))).step_ns
    job = replace(
        job, loader=replace(job.loader, load_ns=round(rng.uniform(0.05, 0.5) * step_ns * max(job.loader.workers, 0.3)))
    )
    plants: list[Plant] = []
    for _ in range(20):
        if len(plants) == count:
            break
        made = rng.choice(_PLANTERS)(rng, job, step_ns)
        if made is not None and all(plant.kind != made[0].kind for plant in plants):
            plants.append(made[0])
            job = made[1]
    struck = {rank for plant in plants for rank in plant.ranks or ()}
    if rng.random() < 0.06 and (spare := [rank for rank in range(1, job.ranks) if rank not in struck]):
        job = replace(job, recording=replace(job.recording, missing=(rng.choice(spare),)))
    # Another stream of numbers, so that the jobs of earlier seeds stay what they were but for this.
    job = replace(job, age=random.Random(f"emulator age {seed}").choice(AGES))
    if (
        seed >= COPIED_AHEAD_FROM
        and job.stages == 1
        and random.Random(f"emulator copies {seed}").random() < COPIED_AHEAD
    ):
        job = replace(job, loader=replace(job.loader, ahead=True))
    return Drawn(seed, job, tuple(plants))


def _healthy(rng: random.Random, seed: int) -> Job:
    strategy = rng.choice(("ddp",) * 4 + ("fsdp",) * 3 + ("tensor", "pipeline", "single"))
    tensor = 2 if strategy == "tensor" else 1
    stages = rng.choice((2, 4)) if strategy == "pipeline" else 1
    ranks = (
        1
        if strategy == "single"
        else rng.choice([n for n in (2, 4, 4, 8) if n % (2 * tensor) == 0 and n >= stages and n % stages == 0])
    )
    width = rng.choice((512, 1024, 1024, 2048))
    model = Model(
        blocks=4 if stages > 1 else rng.choice((2, 3, 4, 6)),
        tokens=rng.choice((1024, 2048, 4096, 8192)) * (4 if stages > 1 else 1),
        width=width,
        small_kernels=rng.choice((1, 3, 6)),
        flops_per_ns=rng.choice((100_000.0, 180_000.0)),
    )
    cpu = Cpu(
        python_ns=round(_between(rng, 2, 10) * US), operator_ns=round(_between(rng, 3, 12) * US),
        launch_ns=round(_between(rng, 3, 6) * US), collective_ns=round(_between(rng, 25, 80) * US),
    )  # fmt: skip
    network = Network(
        latency_ns=round(_between(rng, 10, 60) * US), gbps=_between(rng, 40, 250),
        between_latency_ns=round(_between(rng, 25, 90) * US), between_gbps=_between(rng, 15, 100),
        jitter=rng.choice((0.0, 0.02, 0.1)),
    )  # fmt: skip
    per_host = rng.choice([ranks, ranks, max(ranks // 2, 1)])
    recording = Recording(
        run=rng.random() < 0.35,
        steps=rng.choice((1, 2, 3, 4, 4, 4, 5, 5, 6, 6)), first=rng.randrange(2, 40), annotated=rng.random() < 0.85,
        metadata=rng.choice(("kernel", "kernel", "kernel", "operator", "none" if tensor == stages == 1 else "kernel")),
        described=rng.random() < 0.6, shapes=rng.random() < 0.7, old=rng.random() < 0.15, names=rng.choice(NAMES),
        start_skew_ns=rng.choice((0, 0, 2 * MS)), clock_ns=rng.choice((0, 2 * MS)),
        drift_ppm=rng.choice((0.0, 10.0)),
    )  # fmt: skip
    loader = Loader(
        workers=rng.choice((0, 1, 2, 4, 4)), load_ns=0, jitter=rng.choice((0.02, 0.1, 0.2)), pinned=rng.random() < 0.8,
        batch_bytes=round(_between(rng, 0.2, 8) * MIB),
    )  # fmt: skip
    # torch's profiler marks the steps of every run.
    recording = replace(recording, annotated=recording.annotated or recording.run)
    return Job(
        seed=seed, strategy="ddp" if strategy == "single" else strategy, ranks=ranks, ranks_per_host=per_host,
        tensor=tensor, stages=stages,
        microbatches=rng.choice((stages, 2 * stages, 4 * stages)) if stages > 1 else rng.choice((1, 1, 1, 2)),
        gradient_bytes=rng.choice((4, 4, 2)), bucket_mb=rng.choice((25, 25, 50, 10)), reshard=rng.random() < 0.8,
        version=rng.choice((1, 2)), optimizer_kernels=rng.choice((4, 10)), item_every=rng.choice((0, 0, 1, 5)),
        noise=rng.choice((0.0, 0.005, 0.01, 0.03)), model=model, cpu=cpu, network=network, loader=loader,
        recording=recording,
    )  # fmt: skip


Made = tuple[Plant, Job] | None


def _with(job: Job, kind: str, value: float, ranks: tuple[int, ...] | None, **more: Any) -> Made:
    cause = Cause(kind, value, ranks, **more)
    return Plant(kind, ranks, cause), replace(job, causes=(*job.causes, cause))


def _some(rng: random.Random, job: Job) -> tuple[int, ...] | None:
    """One rank, or all of a host; None where nobody is left to compare with."""
    if job.ranks < 2:
        return None
    one = rng.randrange(job.ranks)
    if job.ranks_per_host < job.ranks and job.ranks_per_host > 1 and rng.random() < 0.25:
        return tuple(rank for rank in range(job.ranks) if job.host_of(rank) == job.host_of(one))
    return (one,)


def _size(rng: random.Random) -> float:
    return rng.choice((rng.uniform(0.03, 0.1), rng.uniform(0.1, 0.6)))


def _slow_compute(rng: random.Random, job: Job, step_ns: float) -> Made:
    ranks = _some(rng, job)
    return None if ranks is None else _with(job, "slow compute", 1 + _size(rng), ranks)


def _slow_host(rng: random.Random, job: Job, step_ns: float) -> Made:
    ranks = _some(rng, job)
    return None if ranks is None else _with(job, "slow host", rng.uniform(1.5, 6), ranks)


def _slow_loader(rng: random.Random, job: Job, step_ns: float) -> Made:
    ranks = None if rng.random() < 0.4 else _some(rng, job)
    workers = job.loader.workers
    wanted = (1 + _size(rng)) * step_ns * workers if workers else job.loader.load_ns + _size(rng) * step_ns
    return _with(job, "slow loader", max(wanted / job.loader.load_ns, 1.1), ranks)


def _pause(rng: random.Random, job: Job, step_ns: float) -> Made:
    how = rng.choice(("gc", "checkpoint", "log"))
    ranks = (0,) if how == "log" and job.ranks > 1 else _some(rng, job)
    every = rng.choice((1, 1, 2, 3))
    if how == "gc" and rng.random() < 0.3:
        ranks = None
    elif ranks is None:
        return None
    return _with(job, "pause", _size(rng) * step_ns * every, ranks, every=min(every, job.recording.steps), how=how)


def _sync(rng: random.Random, job: Job, step_ns: float) -> Made:
    if job.stages > 1:
        return None
    return _with(job, "sync", 1.0, None if rng.random() < 0.7 else _some(rng, job))


def _slow_link(rng: random.Random, job: Job, step_ns: float) -> Made:
    return _with(job, "slow link", rng.uniform(2, 15), None) if job.ranks > 1 else None


def _setting(
    kind: str, bad: dict[str, Any], cured: dict[str, Any] | None = None
) -> Callable[[random.Random, Job, float], Made]:
    """A setting of the job that is badly chosen; ``cured``: what a good job has, where that is not how it was."""

    def plant(rng: random.Random, job: Job, step_ns: float) -> Made:
        good = {name: getattr(job, name) for name in bad}
        if good == bad or not _fits(kind, job):
            return None
        if kind == "by hand":  # DDP as it is when nobody sets anything
            good["bucket_mb"] = 25
        return Plant(kind, None, None, cured or good), replace(job, **bad)

    return plant


def _fits(kind: str, job: Job) -> bool:
    match kind:
        case "small buckets" | "by hand":
            return job.strategy == "ddp" and job.ranks > 1
        case "reduces every batch":
            return job.strategy == "ddp" and job.ranks > 1 and job.microbatches > 1
        case "gathers late":
            return job.strategy == "fsdp"
        case "uneven work":
            return job.ranks > 1 and job.stages == 1
        case _:
            return True


_PLANTERS: tuple[Callable[[random.Random, Job, float], Made], ...] = (
    _slow_compute, _slow_compute, _slow_host, _slow_loader, _slow_loader, _pause, _pause, _sync, _slow_link,
    _setting("small buckets", {"bucket_mb": 1}), _setting("by hand", {"strategy": "manual"}),
    _setting("reduces every batch", {"no_sync": False}), _setting("gathers late", {"backward_prefetch": False}),
    _setting("uneven work", {"imbalance": 0.15}, {"evened": True}),
    _setting("loops over parameters", {"foreach": False}),
)  # fmt: skip
