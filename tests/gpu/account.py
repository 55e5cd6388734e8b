"""Step times, busy time, data loading, MFU, memory and device of one recording, against the training's own books."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from tests.gpu import raw
from tests.gpu.peaks import published
from tests.gpu.points import Point, near, says, skipped
from tests.gpu.recorded import Place, Run, must, train
from tests.gpu.setups import Setup

BUSY = Setup(count_flops=True)
STARVED = Setup(load_ms=60.0, workers=0, layers=4)
PLAIN = Setup(model="small", layers=8, width=256, context=32, precision="fp32")

LONG = 100
"""Steps of a run whose steps without the profiler are looked at: the first ones after a capture do not count."""


def checks(place: Place) -> Iterator[Point]:
    """All of them."""
    run = must(train(place, "busy", [BUSY], record=()))
    yield from _times(run, "busy device")
    yield from _utilisation(place, run)
    yield from _memory(place, run)
    yield from _device(place, run)
    starved = must(train(place, "starved", [STARVED], record=()))
    yield from _times(starved, "60 ms to load")
    yield _loading(place, starved)
    yield from _unchanged(place)


def _times(run: Run, case: str) -> Iterator[Point]:
    rows = run.summary["time_breakdown"]
    yield near("times", f"{case}: step time", run.recorded_ms(), run.reported_ms(), 0.02, " ms")
    parts = sum(value for name, value in rows[0].items() if name.startswith(("compute_us", "exposed_", "idle_")))
    yield near("times", f"{case}: the categories add up", rows[0]["step_time_us"], parts, 1e-6, " µs")
    share = raw.busy_share(run.traces()[0])
    if share is None:
        yield skipped("times", f"{case}: device busy", "no kernels in the trace")
        return
    working = ("compute_us", "exposed_comm_wait_us", "exposed_comm_transfer_us", "exposed_copy_us")
    found = sum(rows[0][name] for name in working) / rows[0]["step_time_us"]
    yield near("times", f"{case}: device busy, of the raw events", share, found, 0.02)


def _loading(place: Place, run: Run) -> Point:
    """The device has nothing else to wait for than the batch: what it idles is data loading."""
    what = "60 ms to load: idle for data loading"
    row = run.summary["time_breakdown"][0]
    share = raw.busy_share(run.traces()[0]) if place.on_gpu else None
    if share is None:
        return near("times", what, 60.0, row["idle_dataloader_us"] / 1e3, 0.1, " ms")
    return near("times", what, run.recorded_ms() * (1 - share), row["idle_dataloader_us"] / 1e3, 0.05, " ms")


def _utilisation(place: Place, run: Run) -> Iterator[Point]:
    truth, found = run.truths[0], run.summary["utilisation"]
    hand = truth["flops_by_hand"][0]
    yield near("MFU", "model FLOPs, by hand", hand, found["model_flops_per_step"], 0.02)
    if not place.on_gpu:
        yield skipped("MFU", "MFU", "a CPU has no published peak")
        return
    # The counter adds attention's forward again in its backward, which flash attention computes twice.
    yield near("MFU", "model FLOPs, by torch's counter", truth["flops"][0], found["model_flops_per_step"], 0.04)
    peak = published(truth["device"], place.fit(BUSY).precision)
    if peak is None:
        yield skipped("MFU", "MFU", f"tests/gpu/peaks.py has no published peak of {truth['device']}")
        return
    yield near("MFU", "MFU, by hand", hand / (run.recorded_ms() / 1e3) / (peak * 1e12), found["mfu"], 0.02)


def _memory(place: Place, run: Run) -> Iterator[Point]:
    if not place.on_gpu:
        yield skipped("memory", "peaks", "a CPU has no such allocator")
        return
    row = run.summary["memory"][0]
    for what, name, share in (("allocated", "allocated_peak_bytes", 0.0), ("reserved", "peak_bytes", 0.0)):
        yield near("memory", f"peak {what}, by torch", run.truths[0]["memory"][what], row[name], share, " bytes")


def _device(place: Place, run: Run) -> Iterator[Point]:
    truth = run.truths[0]
    if not place.on_gpu:
        yield skipped("device", "name and NVML's figures", "no GPU")
        return
    name = truth["device"]
    shown = ", ".join(run.summary["job"]["devices"])
    yield says("device", "name", name, shown, holds=name in shown)
    yield from _nvml(run)


def _nvml(run: Run) -> Iterator[Point]:
    """Capacity and what the sampler saw, by NVML itself."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as why:  # the package or the driver's library may be missing
        yield skipped("device", "NVML", f"{type(why).__name__}: {why}")
        return
    total = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total
    pynvml.nvmlShutdown()
    yield near("device", "capacity, by NVML", total, run.summary["memory"][0]["capacity_bytes"], 0.02, " bytes")
    system: dict[str, Any] = run.summary["system"] or {}
    count = len(system.get("devices", ()))
    yield says("device", "the sampler saw the device", "samples", f"{count} devices", holds=count > 0)


def _unchanged(place: Place) -> Iterator[Point]:
    """Losses of a recorded training are a bare one's, to the last bit; so is the time outside of the capture."""
    same: dict[str, Any] = {"steps": LONG, "job": ("--deterministic",)}
    bare = must(train(place, "bare", [PLAIN], **same))
    again = must(train(place, "bare again", [PLAIN], **same))
    recorded = must(train(place, "recorded", [PLAIN], record=(), **same))
    if bare.losses() != again.losses():
        yield skipped("unchanged", "losses", "two bare runs differ from each other already")
    else:
        equal = bare.losses() == recorded.losses()
        shown = "equal" if equal else "different"
        yield says("unchanged", "losses", "a bare run's, to the last bit", shown, holds=equal)
    after = recorded.summary["job"]["unprofiled_step_us"]
    known = median(recorded.steps_ms()[-60:])
    found = None if after is None else after / 1e3
    yield near("times", "steps without the profiler", known, found, 0.1, " ms")
