"""Random jobs with random causes, from a seed: any strategy, size, jitter, clocks, recording and cause."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.generator import (
    MIB,
    MS,
    US,
    Cause,
    Evaluation,
    HostSpec,
    HostSync,
    JobSpec,
    LoaderSpec,
    ModelSpec,
    NetworkSpec,
    Pause,
    PipelineSpec,
    RotatingPause,
    SlowCompute,
    SlowHost,
    SlowLink,
    SlowLoader,
    SmallBuckets,
    step_time_ns,
)
from tests.planted.jobs import Expected

RANKS = (4, 4, 4, 4, 6, 6, 8, 8, 8, 8, 8, 12, 16, 32)
HOSTS = (1, 2, 2, 4)


@dataclass(frozen=True)
class Drawn:
    """A random job. ``causes`` are those planted in it, each with the straggler expected (None: it hits all
    ranks alike, or the data cannot say which); what else the job suffers from (a warm-up step, an evaluation) is in the
    ``spec`` alone. ``missing`` ranks leave no trace."""

    seed: int
    kind: str
    """Its layout in a word: ``ddp``, ``hsdp``, ``1f1b`` ..."""
    spec: JobSpec
    causes: tuple[tuple[Cause, Expected | None], ...]
    missing: tuple[int, ...]

    @property
    def recorded(self) -> tuple[int, ...]:
        """Ranks whose traces there are."""
        return tuple(rank for rank in range(self.spec.ranks) if rank not in self.missing)

    def __str__(self) -> str:
        spec = self.spec
        size = f"{spec.ranks} ranks on {spec.hosts} hosts, t{spec.tensor} p{spec.pipeline} r{spec.replicas}"
        rest = f"{spec.steps} steps, noise {spec.noise:.3f}, missing {list(self.missing)}"
        return f"{self.seed} {self.kind}, {size}, {rest}: {', '.join(map(str, spec.causes)) or 'healthy'}"


def draw(seed: int) -> Drawn:
    """The job of this seed."""
    rng = random.Random(seed)
    kind, spec = _layout(rng)
    late = rng.random() < 0.3
    spec = replace(
        spec,
        steps=rng.choice((3, 5, 6, 6, 8, 12)),
        warmup=rng.choice((1, 3)),
        noise=rng.choice((0.0, 0.003, 0.01, 0.02, 0.05)),
        end_sync=not late and rng.random() < 0.7,
        seed=seed,
        host_clock_offsets_ns={host: rng.randint(-5 * MS, 5 * MS) for host in range(spec.hosts)},
        host_drift_ppm={host: rng.uniform(-20, 20) for host in range(spec.hosts)} if rng.random() < 0.5 else {},
        start_skew_ns={rank: rng.randint(0, 3 * MS) for rank in range(spec.ranks)} if rng.random() < 0.3 else {},
        metadata=rng.choice(("kernel", "kernel", "numbered", "operator", *(["none"] if _one_group(spec) else []))),
        groups=rng.choice(("megatron", "mesh")),
        host=HostSpec(sync_return_ns=500 * US if late else 5 * US),
        loader=rng.choice(
            (
                LoaderSpec(workers=0, load_ns=50 * US),
                *(LoaderSpec(workers=count, load_ns=400 * US) for count in (1, 2, 4)),
            )
        ),
    )
    step_ns = step_time_ns(replace(spec, steps=3, warmup=1))
    planted = _causes(rng, spec, step_ns)
    aside = _aside(rng, spec)
    if any(isinstance(cause, SmallBuckets) for cause, _ in planted):
        spec = replace(spec, bucket_bytes=100 * MIB, network=NetworkSpec(alpha_ns=100 * US, busbw_gbps=600.0))
    spec = replace(spec, causes=(*(cause for cause, _ in planted), *aside))
    missing = rng.sample(range(spec.ranks), rng.randint(1, spec.ranks // 4)) if rng.random() < 0.08 else []
    return Drawn(seed, kind, spec, planted, tuple(sorted(missing)))


def _one_group(spec: JobSpec) -> bool:
    """Whether all ranks form the only group, so that nothing need say which ranks do."""
    return spec.tensor == spec.pipeline == spec.replicas == 1


def _layout(rng: random.Random) -> tuple[str, JobSpec]:
    """A healthy job whose device is busy, so that whatever is planted is what there is."""
    kind = rng.choice(("ddp", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "1f1b", "1f1b", "gpipe", "interleaved"))
    pipelined = kind in ("1f1b", "gpipe", "interleaved")
    tensor = rng.choice((1, 1, 1, 2, 4) if pipelined or kind in ("ddp", "fsdp") else (1,))
    stages = rng.choice((2, 4)) if pipelined else 1
    sizes = [ranks for ranks in RANKS if ranks % (2 * tensor * stages) == 0]
    if pipelined and tensor * stages in RANKS:
        sizes.append(tensor * stages)
    ranks = rng.choice(sizes)
    data = ranks // (tensor * stages)
    hosts = rng.choice([hosts for hosts in HOSTS if ranks % hosts == 0])
    chunks = 2 if kind == "interleaved" else 1
    schedule = PipelineSpec(
        schedule=kind if pipelined else "1f1b",
        chunks=chunks,
        coalesced=kind == "interleaved" or rng.random() < 0.3,
        peers=rng.random() < 0.7,
        ranges=rng.random() < 0.5,
    )
    layers = rng.choice((1, 2)) * stages * chunks if pipelined else rng.choice((2, 3, 4))
    spec = JobSpec(
        ranks=ranks, ranks_per_host=ranks // hosts, tensor=tensor, pipeline=stages, schedule=schedule,
        strategy="fsdp" if kind == "hsdp" else "pipeline" if pipelined else kind,
        replicas=rng.choice([count for count in (2, 4) if data % count == 0]) if kind == "hsdp" else 1,
        microbatches=rng.choice((stages, 2 * stages)) if pipelined else rng.choice((1, 1, 1, 2)),
        model=ModelSpec(layers=layers, tokens=rng.choice((2048, 4096))), network=NetworkSpec(busbw_gbps=600.0),
    )  # fmt: skip
    return kind, spec


def _aside(rng: random.Random, spec: JobSpec) -> tuple[Cause, ...]:
    """What befalls all ranks alike and is nobody's fault."""
    found: list[Cause] = []
    if rng.random() < 0.2:
        found.append(SlowCompute(steps=(spec.first_step,), factor=rng.uniform(1.2, 2.0)))
    if rng.random() < 0.2 and spec.pipeline == 1 and spec.steps > 3:
        found.append(Evaluation(steps=(rng.choice(spec.recorded_steps[1:-1]),), marked=rng.random() < 0.7))
    return tuple(found)


def _causes(rng: random.Random, spec: JobSpec, step_ns: float) -> tuple[tuple[Cause, Expected | None], ...]:
    planted: list[tuple[Cause, Expected | None]] = []
    count = rng.choice((0, 1, 1, 1, 2, 2))
    while len(planted) < count:
        made = rng.choice(_KINDS)(rng, spec, step_ns)
        if made is not None and all(type(made[0]) is not type(cause) or rng.random() < 0.5 for cause, _ in planted):
            planted.append(made)
    return tuple(planted)


Made = tuple[Cause, Expected | None] | None


def _size(rng: random.Random) -> float:
    """Share of a step: small or large."""
    return rng.choice((rng.uniform(0.03, 0.1), rng.uniform(0.1, 0.5), rng.uniform(0.1, 0.5)))


def _slow_compute(rng: random.Random, spec: JobSpec, step_ns: float) -> Made:
    who = _ranks(rng, spec)
    return SlowCompute(ranks=who.ranks, factor=1 + _size(rng)), replace(who, cause="compute")


def _slow_host(rng: random.Random, spec: JobSpec, step_ns: float) -> Made:
    who = _ranks(rng, spec)
    return SlowHost(ranks=who.ranks, factor=rng.uniform(4, 25)), replace(who, cause="launch")


def _everyones_host(rng: random.Random, spec: JobSpec, step_ns: float) -> Made:
    return SlowHost(factor=rng.uniform(4, 25)), None


def _slow_loader(rng: random.Random, spec: JobSpec, step_ns: float) -> Made:
    """The loader can deliver a batch every ``load / workers``."""
    rank = (rng.randrange(spec.ranks),) if rng.random() < 0.7 else None
    per_step = 1 if spec.strategy == "pipeline" else spec.microbatches
    pace = (1 + _size(rng)) * step_ns / per_step * max(1, spec.loader.workers)
    if spec.loader.workers == 0:
        pace = _size(rng) * step_ns / per_step
    expected = Expected(rank, "dataloader") if rank is not None else None
    return SlowLoader(ranks=rank, load_ns=round(pace)), expected


def _loader_stalls(rng: random.Random, spec: JobSpec, step_ns: float) -> Made:
    rank, steps = rng.randrange(spec.ranks), _some_steps(rng, spec)
    ahead = max(1, spec.loader.workers * spec.loader.prefetch)
    load = round((ahead + spec.steps * rng.uniform(0.2, 1)) * step_ns)
    return SlowLoader(ranks=(rank,), steps=steps, load_ns=load), Expected((rank,), "dataloader")


def _pause(rng: random.Random, spec: JobSpec, step_ns: float) -> Made:
    rank = rng.randrange(spec.ranks)
    steps = _some_steps(rng, spec) if rng.random() < 0.7 else None
    share = _size(rng) * (spec.steps / len(steps) if steps else 1)
    return Pause(ranks=(rank,), steps=steps, pause_ns=round(share * step_ns)), Expected((rank,), "host")


def _pauses_in_turn(rng: random.Random, spec: JobSpec, step_ns: float) -> Made:
    if spec.steps < 6 or spec.ranks // spec.pipeline < 3:
        return None
    every = rng.choice((1, 2)) if spec.steps > 8 else 1
    steps = spec.recorded_steps[1:]
    share = _size(rng) * every
    return (
        RotatingPause(pause_ns=round(share * step_ns), steps=steps, every=every),
        Expected(tuple(range(spec.ranks)), "host", "job", "rotating"),
    )


def _sync(rng: random.Random, spec: JobSpec, step_ns: float) -> Made:
    rank = rng.randrange(spec.ranks)
    if rng.random() < 0.4:
        return HostSync(), None
    return HostSync(ranks=(rank,)), Expected((rank,), "sync")


def _slow_link(rng: random.Random, spec: JobSpec, step_ns: float) -> Made:
    """A ring of all ranks has no slow link to be seen, a pipeline's messages have: ``Judge`` knows."""
    if spec.hosts < 2:
        return None
    host = rng.randrange(spec.hosts)
    return (
        SlowLink(factor=rng.uniform(3, 30), hosts=(host,)),
        Expected(spec.ranks_of_host(host), "communication", "host"),
    )


def _small_buckets(rng: random.Random, spec: JobSpec, step_ns: float) -> Made:
    return (SmallBuckets(bucket_bytes=2 * MIB), None) if spec.strategy == "ddp" else None


_KINDS: Sequence[Callable[[random.Random, JobSpec, float], Made]] = (
    _slow_compute, _slow_compute, _slow_compute, _slow_host, _everyones_host, _slow_loader, _loader_stalls, _pause,
    _pause, _pauses_in_turn, _sync, _slow_link, _small_buckets,
)  # fmt: skip


def _ranks(rng: random.Random, spec: JobSpec) -> Expected:
    """One rank, one host or one stage."""
    scopes = ["rank", "rank"]
    scopes += ["host"] if spec.hosts > 1 else []
    scopes += ["stage"] if spec.pipeline > 2 else []
    scope = rng.choice(scopes)
    if scope == "host":
        return Expected(spec.ranks_of_host(rng.randrange(spec.hosts)), "", "host")
    if scope == "stage":
        return Expected(spec.ranks_of_stage(rng.randrange(spec.pipeline)), "", "stage")
    return Expected((rng.randrange(spec.ranks),), "")


def _some_steps(rng: random.Random, spec: JobSpec) -> tuple[int, ...]:
    """A few of the recorded steps, but for the first, before whose window a pause leaves no trace on a device."""
    steps = spec.recorded_steps[1:]
    return tuple(sorted(rng.sample(steps, max(1, round(len(steps) * rng.uniform(0.15, 0.4))))))
