"""Jobs of every strategy and two sizes with every cause planted: what was planted, and what the analysis must say.

The tests run the small ones and some of the large; ``python -m tests.benchmarks.planted`` runs them all and prints the
table. Steps last 2 to 30 ms, so that causes are a share of the step that somebody would look for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tests.generator import (
    MIB,
    MS,
    Cause,
    HostSpec,
    HostSync,
    JobSpec,
    ModelSpec,
    NetworkSpec,
    Pause,
    RotatingPause,
    SlowCompute,
    SlowHost,
    SlowLink,
    SlowLoader,
    SmallBuckets,
)

FAST = NetworkSpec(busbw_gbps=600.0)
SMALL = ModelSpec(tokens=2048)
STAGES = ModelSpec(layers=8, tokens=2048)


def data_parallel(ranks: int, strategy: str) -> JobSpec:
    """One step's loss is printed, so that a host that does something else holds its device up."""
    return JobSpec(
        ranks=ranks, ranks_per_host=ranks // 2 if ranks < 16 else 8, strategy=strategy, steps=6, model=SMALL,
        network=FAST, end_sync=True, noise=0.003,
    )  # fmt: skip


def pipeline(ranks: int) -> JobSpec:
    """1F1B in four stages on 8 ranks, in eight on 64."""
    stages = 4 if ranks < 64 else 8
    return JobSpec(
        ranks=ranks, ranks_per_host=4 if ranks < 64 else 8, strategy="pipeline", pipeline=stages, microbatches=8,
        steps=6, model=replace(STAGES, layers=2 * stages), network=FAST, end_sync=True, noise=0.003,
    )  # fmt: skip


LAYOUTS: dict[str, Callable[[int], JobSpec]] = {
    "ddp": lambda ranks: data_parallel(ranks, "ddp"),
    "fsdp": lambda ranks: data_parallel(ranks, "fsdp"),
    "zero3": lambda ranks: data_parallel(ranks, "zero3"),
    "1f1b": pipeline,
}


@dataclass(frozen=True)
class Expected:
    """A straggler that must be named: any of ``ranks`` (all of them where ``scope`` is not rank), for ``cause``."""

    ranks: tuple[int, ...]
    cause: str
    scope: str = "rank"
    pattern: str | None = None


@dataclass(frozen=True)
class Planted:
    """A job with causes, the straggler expected for each cause (None: no rank), and the rule that must fire, if any."""

    name: str
    spec: JobSpec
    attributed: tuple[tuple[Cause, Expected], ...] = ()
    rule: str | None = None


def jobs(ranks: int) -> Iterator[Planted]:
    """Every layout with every cause that means something in it."""
    for layout, make in LAYOUTS.items():
        for planted in _of(make(ranks)):
            yield replace(planted, name=f"{layout} on {ranks}: {planted.name}")


def _of(spec: JobSpec) -> Iterator[Planted]:
    staged = spec.strategy == "pipeline"
    # A pipeline's later stages wait for the first one's batch, and those of one stage are each other's peers.
    one = 1
    step = 15 * MS if staged else 4 * MS
    yield Planted("healthy", spec)
    yield Planted(
        "clocks apart", replace(spec, host_clock_offsets_ns={0: 5 * MS, 1: -5 * MS}, host_drift_ppm={1: 15.0})
    )
    yield _attributed(spec, "slow rank", SlowCompute(ranks=(one,), factor=1.3), Expected((one,), "compute"))
    apart = replace(spec, host_clock_offsets_ns={0: -5 * MS, 1: 5 * MS})
    yield _attributed(
        apart, "slow rank, clocks apart", SlowCompute(ranks=(one,), factor=1.3), Expected((one,), "compute")
    )
    host = spec.ranks_of_host(1)
    yield _attributed(spec, "slow host", SlowCompute(ranks=host, factor=1.3), Expected(host, "compute", "host"))
    if staged:
        stage = spec.ranks_of_stage(2)
        scope = "host" if stage == spec.ranks_of_host(2) else "stage"
        yield _attributed(spec, "slow stage", SlowCompute(ranks=stage, factor=1.3), Expected(stage, "compute", scope))
    yield _attributed(
        spec, "slow loader on one rank", SlowLoader(ranks=(0,), load_ns=4 * step), Expected((0,), "dataloader")
    )
    yield _attributed(
        spec,
        "loader stalls on one rank",
        SlowLoader(ranks=(0,), steps=(12,), load_ns=12 * step),
        Expected((0,), "dataloader", pattern="intermittent"),
    )
    yield Planted(
        "slow loader on all", replace(spec, causes=(SlowLoader(load_ns=4 * step),)), rule="dataloader-workers"
    )
    yield _attributed(spec, "launch-bound rank", SlowHost(ranks=(one,), factor=20.0), Expected((one,), "launch"))
    late = replace(spec, host=HostSpec(sync_return_ns=MS))
    yield _attributed(late, "sync on one rank", HostSync(ranks=(one,)), Expected((one,), "sync"))
    yield _attributed(
        spec,
        "collector pauses on one rank",
        Pause(ranks=(one,), steps=(11, 14), pause_ns=step),
        Expected((one,), "host", pattern="intermittent"),
    )
    group = spec.ranks if not staged else spec.ranks // spec.pipeline
    if group > 2:
        yield _attributed(
            spec,
            "collector pauses in turn",
            # Not in the first recorded step, before whose window a pause leaves no trace on a device.
            RotatingPause(pause_ns=step, steps=tuple(range(11, 16))),
            Expected(tuple(range(spec.ranks)), "host", "job", "rotating"),
        )
    yield _two(spec, one, step)
    if staged and spec.hosts > 2:
        link = SlowLink(factor=20.0, hosts=(2,))
        yield _attributed(spec, "slow link", link, Expected(spec.ranks_of_host(2), "communication", "host"))
    if spec.strategy == "ddp":
        buckets = replace(
            spec,
            model=ModelSpec(layers=12, tokens=2048, width=512, hidden=1024),
            network=NetworkSpec(alpha_ns=200_000),
            bucket_bytes=100 * MIB,
            causes=(SmallBuckets(bucket_bytes=3 * MIB),),
        )
        yield Planted("small buckets", buckets, rule="ddp-bucket-size")


def _attributed(spec: JobSpec, name: str, cause: Cause, expected: Expected) -> Planted:
    return Planted(name, replace(spec, causes=(cause,)), ((cause, expected),))


def _two(spec: JobSpec, one: int, step: int) -> Planted:
    """Two causes at once, on two ranks: the pause comes on top of the slow rank's lateness in two steps of six."""
    slow, other = SlowCompute(ranks=(one,), factor=1.3), 3 if spec.strategy != "pipeline" else 0
    pause = Pause(ranks=(other,), steps=(11, 12, 14), pause_ns=step)
    return Planted(
        "slow rank and pauses on another",
        replace(spec, causes=(slow, pause)),
        ((slow, Expected((one,), "compute")), (pause, Expected((other,), "host"))),
    )
