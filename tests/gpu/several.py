"""Several processes: strategies on one device and on more, and a rank that is slow."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tests.gpu import raw
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
    yield from _under_mps(place)
    if place.on_gpu and place.devices < 2:
        yield skipped("several", "DDP, FSDP2, ZeRO-2 and a pipeline with NCCL on several devices", "one device")
        return
    ranks, backend = (place.devices, ("--backend", "nccl")) if place.on_gpu else (2, ("--backend", "gloo"))
    for strategy in ("ddp", "fsdp2"):
        yield from _slow_rank(place, strategy, ranks, backend)
    yield from _zero(place, ranks, backend)
    yield from _pipeline(place, ranks, backend)


def _zero(place: Place, ranks: int, job: Sequence[str]) -> Iterator[Point]:
    if importlib.util.find_spec("deepspeed") is None:
        yield skipped("several", "ZeRO-2", "DeepSpeed is not installed")
        return
    run = must(train(place, "zero2", [replace(MODEL, strategy="zero2")], ranks=ranks, job=job, record=()))
    yield _strategy(run, "zero2", "zero2")
    yield near("several", "zero2: step time", run.recorded_ms(), run.reported_ms(), 0.03, " ms")


def _pipeline(place: Place, ranks: int, job: Sequence[str]) -> Iterator[Point]:
    """A stage for each rank, as many layers on each: 1F1B of four micro-batches."""
    setup = replace(place.fit(MODEL), strategy="pipeline", layers=2 * ranks, precision="fp32")
    run = must(train(place, "pipeline", [setup], ranks=ranks, job=job, record=()))
    yield _strategy(run, "pipeline", "pipeline")
    yield near("several", "pipeline: step time", run.recorded_ms(), run.reported_ms(), 0.03, " ms")
    found = run.summary["pipeline"] or {}
    shown = f"{found.get('schedule')}, {len(found.get('stages', ()))} stages, {found.get('microbatches')} micro-batches"
    right = len(found.get("stages", ())) == ranks and found.get("microbatches") == 4
    yield says("several", "pipeline: its stages", f"{ranks} stages, 4 micro-batches", shown, holds=right)


def _under_mps(place: Place) -> Iterator[Point]:
    """Two ranks on one device through NVIDIA's Multi-Process Service: each rank's kernels are in its own trace."""
    what = "two ranks under MPS"
    if not place.on_gpu or shutil.which("nvidia-cuda-mps-control") is None:
        yield skipped("several", what, "no nvidia-cuda-mps-control" if place.on_gpu else "no GPU")
        return
    setup, job = replace(MODEL, strategy="ddp"), ("--backend", "gloo", "--share")
    with _mps(place) as environment:
        run = train(place, "mps", [setup], ranks=2, job=job, record=(), environment=environment)
    if run.done.code:
        yield skipped("several", what, f"the training does not run: {run.done.output[-200:]}")
        return
    kernels = [len(raw.device_spans(raw.events(path))) for path in run.traces()]
    said = run.noted("no_device_events")
    holds = bool(kernels) and (all(kernels) or "CUPTI" in said)
    yield says("several", what, "kernels of both, or words about CUPTI", f"{kernels} kernels; {said}", holds=holds)
    yield near("several", f"{what}: step time", run.recorded_ms(), run.reported_ms(), 0.05, " ms")


@contextmanager
def _mps(place: Place) -> Iterator[dict[str, str]]:
    """MPS of our own, with its pipes and logs in the folder of the evidence; its environment."""
    folder = (place.folder / "mps-daemon").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}

    def control(*options: str, said: str = "") -> None:
        subprocess.run(
            ["nvidia-cuda-mps-control", *options], env={**os.environ, **own}, input=said, text=True,
            check=False, timeout=60, capture_output=True,
        )  # fmt: skip

    control("-d")
    try:
        yield own
    finally:
        control(said="quit\n")


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
    name = f"slow-{strategy}-{ranks}-{job[1]}{'-shared' * ('--share' in job)}"
    run = must(train(place, name, [setup], ranks=ranks, job=job, record=()))
    yield _strategy(run, name, strategy)
    rows = run.summary["stragglers"]
    named = f"rank {rows[0]['rank']}, {rows[0]['cause']}, {rows[0]['lost_us'] / 1e3:.1f} ms" if rows else "nobody"
    right = bool(rows) and rows[0]["rank"] == 1
    yield says("several", f"{name}: rank 1 sleeps {SLOW_MS:g} ms in every step", "rank 1", named, holds=right)
    if right:
        yield near("several", f"{name}: what it costs", SLOW_MS, rows[0]["lost_us"] / 1e3, 0.25, " ms")


def _strategy(run: Run, name: str, strategy: str) -> Point:
    expected = {"fsdp2": ("fsdp", "fsdp2", "fsdp-2")}.get(strategy, (strategy,))
    found = str(run.summary["job"]["strategy"])
    return says("several", f"{name}: strategy", strategy, found, holds=found.lower().replace(" ", "") in expected)
