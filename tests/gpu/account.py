"""Step times, busy time, data loading, MFU, memory and device of one recording, against the training's own books."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from tests.gpu import raw
from tests.gpu.peaks import published
from tests.gpu.points import Point, between, near, says, skipped
from tests.gpu.recorded import STEPS, Place, Run, must, train
from tests.gpu.setups import Setup

BUSY = Setup(count_flops=True)
STARVED = Setup(load_ms=60.0, workers=0, layers=4)
PLAIN = Setup(model="small", layers=8, width=256, context=32, precision="fp32")

WORKING = ("compute_us", "exposed_comm_wait_us", "exposed_comm_transfer_us", "exposed_copy_us")
"""Categories in which a device works."""
LOSS_BYTES = 512
"""What the allocator takes for a loss; the training keeps them all."""

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
    by_events = raw.busy(run.traces()[0])
    if by_events is None:
        yield skipped("times", f"{case}: device busy", "no kernels in the trace")
        return
    # Of a step, not its share: where the host sets the pace no two steps are equally long.
    found = sum(rows[0][name] for name in WORKING)
    yield near("times", f"{case}: device busy per step, by the raw events", by_events[0], found, 0.02, " µs")


def _loading(place: Place, run: Run) -> Point:
    """The device waits for the batch, and no longer than it is idle: the host then has to launch the step."""
    what = "60 ms to load: idle for data loading"
    found = run.summary["time_breakdown"][0]["idle_dataloader_us"] / 1e3
    by_events = raw.busy(run.traces()[0]) if place.on_gpu else None
    if by_events is None:
        return near("times", what, 60.0, found, 0.1, " ms")
    return between("times", what, 0.9 * 60, found, min(1.05 * 60, (by_events[1] - by_events[0]) / 1e3), " ms")


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
    row, known = run.summary["memory"][0], run.truths[0]["memory"]
    # The recording tells the peak as it was when the capture ended.
    share = STEPS * LOSS_BYTES / known["allocated"]
    yield near("memory", "peak allocated, by torch", known["allocated"], row["allocated_peak_bytes"], share, " bytes")
    yield near("memory", "peak reserved, by torch", known["reserved"], row["peak_bytes"], 0.0, " bytes")


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
