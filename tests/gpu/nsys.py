"""Nsight Systems around the training, where it is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.gpu.points import Point, near, says, skipped
from tests.gpu.recorded import Place, must, train
from tests.gpu.setups import Setup

MODEL = Setup(layers=4, width=512, batch=8, context=256)


def checks(place: Place) -> Iterator[Point]:
    """Kernels, NVTX ranges and steps of a report that nsys made."""
    found = os.environ.get("PERFSCOPE_NSYS") or shutil.which("nsys")
    if not found:
        yield skipped("nsys", "a report of Nsight Systems", "nsys is neither on the PATH nor in PERFSCOPE_NSYS")
        return
    beside = f"{Path(found).parent}:{os.environ['PATH']}"
    run = must(train(place, "nsys", [MODEL], record=("--with", "nsys"), environment={"PATH": beside}))
    yield near("nsys", "step time", run.recorded_ms(), run.reported_ms(), 0.03, " ms")
    compute = run.summary["time_breakdown"][0]["compute_us"]
    if place.on_gpu:
        yield says("nsys", "kernels", "compute time", f"{compute / 1e3:.2f} ms per step", holds=compute > 0)
    else:
        yield skipped("nsys", "kernels", "no GPU")
    if place.on_gpu:  # there ranks open and close the window of the planned steps, cudaProfilerStart and -Stop
        steps = len(run.summary["job"]["steps"])
        yield says("nsys", "the window", "the 8 planned steps", f"{steps} steps", holds=steps in (7, 8))
    ranges = [row["name"] for row in run.summary["modules"]]
    seen = any("backward" in name for name in ranges)
    yield says("nsys", "ranges", "forward and backward", ", ".join(ranges[:6]), holds=seen)
