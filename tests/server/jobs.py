"""The recordings that questions are about, and what is true of each: by stopwatch, by simulation, or as written.

Nothing here comes from the analyzers. A truth is a number or a text under a name that ``questions.toml`` uses.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from perfscope.recording import metadata, paths
from perfscope.recording.history import Block, pack
from tests import emulator
from tests.generator import MS, JobSpec, LoaderSpec, Pause, SlowCompute, SlowLink, simulate
from tests.stuck.jobs import stuck_job

Truth = Mapping[str, Any]

_A100_FLOPS = 312e12
"""Dense peak of an A100 in bf16, by its data sheet."""
_STEPS = 2_000
_US = 1e3
"""Of ns."""

SLOW = SlowCompute(ranks=(2,), factor=1.5)
LINK = SlowLink(factor=4.0)
PAUSE = Pause(ranks=(1,), steps=(13,), pause_ns=30 * MS)
STUCK = 5
"""A seed whose job has one rank at fault."""


class Recordings:
    """A folder of recordings, each written when it is first asked for."""

    def __init__(self, folder: Path, samples: Path) -> None:
        self.folder, self._samples = folder, samples
        self._truths: dict[str, Truth] = {}

    def truth(self, name: str) -> Truth:
        """Write a recording, unless it is there; what is true of it."""
        if name not in self._truths:
            place = self.folder / name
            place.parent.mkdir(exist_ok=True)
            if name in _MADE:
                self._truths[name] = _MADE[name](place)
            else:
                shutil.copytree(self._samples / name, place)
                self._truths[name] = _sample(place)
        return self._truths[name]


def _simulated(spec: JobSpec) -> Callable[[Path], Truth]:
    def make(folder: Path) -> Truth:
        job = simulate(spec)
        job.write(folder)
        truth, ranks = job.truth, range(spec.ranks)
        largest = max(truth.collectives, key=lambda each: each.bytes)
        found: dict[str, Any] = {
            "ranks": spec.ranks,
            "steps": spec.steps,
            "step_us": truth.step_time_ns / _US,
            "compute_share": sum(truth.mean_ns(rank, "compute") for rank in ranks)
            / sum(truth.step_ns(rank) for rank in ranks),
            "transfer_us": largest.transfer_ns / _US,
            "collective_bytes": largest.bytes,
            "collectives": sum(each.count for each in truth.collectives),
            "flops_per_step": truth.flops_per_step,
            "mfu": truth.flops_per_step / (truth.step_time_ns / 1e9 * spec.ranks * _A100_FLOPS),
            "slowest_step": spec.recorded_steps[max(range(spec.steps), key=truth.steps_ns.__getitem__)],
            "slowest_step_us": max(truth.steps_ns) / _US,
        }
        for category in ("compute", "exposed_comm_wait", "exposed_comm_transfer", "idle_dataloader"):
            found |= {f"{category}_{rank}_us": truth.mean_ns(rank, category) / _US for rank in ranks}
        if spec.causes:
            lost_us = job.lost_ns(*spec.causes) / _US
            found |= {"lost_us": lost_us, "without_us": found["step_us"] - lost_us}
        if spec.strategy == "pipeline":
            found |= {"bubble_share": truth.bubble_share, "stage_0_busy_us": truth.stages[0].busy_ns / _US}
        return found

    return make


def _emulated(folder: Path) -> Truth:
    slow = emulator.Cause("slow compute", 1.4, ranks=(1,))
    recording = emulator.Recording(steps=4)
    job = emulator.Job(seed=4, ranks=3, model=emulator.Model(blocks=4), recording=recording, causes=(slow,))
    run, well = emulator.emulate(job), emulator.emulate(job.without(slow))
    folder.mkdir()
    run.write(folder)
    return {"step_us": run.step_ns / _US, "lost_us": (run.step_ns - well.step_ns) / _US, "slow_rank": 1}


def _long_run(folder: Path) -> Truth:
    """Four ranks of 2,000 steps of 100 ms: step 137 takes 900 ms, and rank 1 loads 20 ms longer than the others'."""
    folder.mkdir()
    for rank in range(4):
        loading = [50_000 if rank == 1 else 30_000] * _STEPS
        steps = [100_000 + step % 3 for step in range(_STEPS)]
        steps[137] = 900_000
        block = Block(0, 0, 1_758_580_000_000_000_000, steps, {"dataloader": loading}, bytes(_STEPS))
        paths.steps_file(folder, rank).write_bytes(pack(block))
    return {"outlier": 137, "outlier_us": 900_000, "median_us": 100_001, "last_step": _STEPS - 1, "slow_rank": 1}


def _stuck(folder: Path) -> Truth:
    folder.mkdir()
    job = stuck_job(STUCK)
    job.write(folder)
    (root,) = job.roots
    return {"missing": str(root)}


def _sample(folder: Path) -> Truth:
    """By the training script's own stopwatch: medians over the recorded steps."""
    truth = json.loads((folder / "truth.json").read_text(encoding="utf-8"))
    planted = truth["planted"]
    found: dict[str, Any] = {"ranks": len(truth["ranks"]), **planted, "slow_us": planted["slow_ms"] * _US}
    (capture,) = metadata.load_run(paths.run_file(folder, 0)).captures
    first, last = capture.first_step, capture.last_step
    for each in truth["ranks"]:
        for what in ("step", "load"):
            found[f"{what}_us_{each['rank']}"] = median(each[f"{what}_ms"][first : last + 1]) * _US
    mine = truth["ranks"][0]
    # The last recorded step's time includes writing the trace, its parts do not.
    parts = {
        step: sum(mine[what][step] for what in ("load_ms", "forward_ms", "backward_ms"))
        for step in range(first, last + 1)
    }
    return {
        **found,
        "recorded": f"{first}-{last}",
        "steps": last + 1 - first,
        "slowest_step": max(parts, key=parts.__getitem__),
        "step_11_us": mine["step_ms"][11] * _US,
        "load_share": found["load_us_0"] / found["step_us_0"],
        "without_load_us": found["step_us_0"] - found["load_us_0"],
        "without_slow_us": found["step_us_0"] - found["slow_us"],
    }


GPU = JobSpec()
PIPELINE = JobSpec(
    strategy="pipeline", pipeline=2, ranks=2, microbatches=4, steps=4, warmup=1,
    model=dataclasses.replace(GPU.model, layers=2),
)  # fmt: skip

_MADE: dict[str, Callable[[Path], Truth]] = {
    "gpu/good": _simulated(dataclasses.replace(GPU, steps=5)),
    "gpu/slow-compute": _simulated(dataclasses.replace(GPU, causes=(SLOW,))),
    "gpu/slow-loader": _simulated(
        dataclasses.replace(GPU, steps=5, end_sync=True, loader=LoaderSpec(workers=0, load_ns=8 * MS))
    ),
    "gpu/slow-link": _simulated(dataclasses.replace(GPU, steps=5, causes=(LINK,))),
    "gpu/one-pause": _simulated(dataclasses.replace(GPU, end_sync=True, causes=(PAUSE,))),
    "gpu/pipeline": _simulated(PIPELINE),
    "emulated": _emulated,
    "long-run": _long_run,
    "stuck": _stuck,
}
