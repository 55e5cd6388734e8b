"""Several processes: strategies on one device and on more, and a rank that is slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.gpu.points import Point, near, says, skipped
from tests.gpu.recorded import Place, Run, must, train
from tests.gpu.setups import Setup

SLOW_MS = 30.0
MODEL = Setup(layers=4, width=512, batch=8, context=256, workers=0)
SLOW = Setup(layers=4, width=512, batch=8, context=256, workers=0, slow_ms=SLOW_MS)


def checks(place: Place) -> Iterator[Point]:
    """One rank with NCCL, two ranks on one device with gloo, and NCCL on as many devices as there are."""
    nccl = ("--backend", "nccl") if place.on_gpu else ("--backend", "gloo")
    for strategy in ("ddp", "fsdp2"):
        alone = Setup(**{**vars(MODEL), "strategy": strategy})
        run = must(train(place, f"{strategy}-alone", [alone], ranks=1, job=nccl, record=()))
        yield _strategy(run, f"{strategy}, one rank", strategy)
        yield near("several", f"{strategy}, one rank: step time", run.recorded_ms(), run.reported_ms(), 0.02, " ms")
    yield from _shared(place)
    if place.devices < 2:
        yield skipped("several", "DDP and FSDP2 with NCCL on several devices", f"{place.devices} device")
        return
    for strategy in ("ddp", "fsdp2"):
        yield from _slow_rank(place, strategy, place.devices, ("--backend", "nccl"))


def _shared(place: Place) -> Iterator[Point]:
    """Two gloo ranks, on one device where there is one: a healthy pair, and one with a slow rank."""
    job, what = ("--backend", "gloo", "--share"), "two ranks share a device"
    setup = Setup(**{**vars(MODEL), "strategy": "ddp"})
    healthy = must(train(place, "shared-healthy", [setup], ranks=2, job=job, record=()))
    accused = [row["rank"] for row in healthy.summary["stragglers"] if row["confidence"] == "high"]
    expected = "no rank with high confidence"
    yield says("several", f"{what}: nobody is accused", expected, str(accused), holds=not accused)
    yield near("several", f"{what}: step time", healthy.recorded_ms(), healthy.reported_ms(), 0.03, " ms")
    yield from _slow_rank(place, "ddp", 2, job)


def _slow_rank(place: Place, strategy: str, ranks: int, job: Sequence[str]) -> Iterator[Point]:
    setup = Setup(**{**vars(SLOW), "strategy": strategy})
    name = f"slow-{strategy}-{ranks}-{job[1]}"
    run = must(train(place, name, [setup], ranks=ranks, job=job, record=()))
    yield _strategy(run, name, strategy)
    rows = run.summary["stragglers"]
    named = f"rank {rows[0]['rank']}, {rows[0]['cause']}, {rows[0]['lost_us'] / 1e3:.1f} ms" if rows else "nobody"
    right = bool(rows) and rows[0]["rank"] == 1
    yield says("several", f"{name}: rank 1 sleeps {SLOW_MS:g} ms in every step", "rank 1", named, holds=right)
    if right:
        yield near("several", f"{name}: what it costs", SLOW_MS, rows[0]["lost_us"] / 1e3, 0.25, " ms")


def _strategy(run: Run, name: str, strategy: str) -> Point:
    expected = {"ddp": ("ddp",), "fsdp2": ("fsdp", "fsdp2", "fsdp-2")}[strategy]
    found = str(run.summary["job"]["strategy"])
    return says("several", f"{name}: strategy", strategy, found, holds=found.lower().replace(" ", "") in expected)
