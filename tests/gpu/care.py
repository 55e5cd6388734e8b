"""The training stays as it was: what recording costs, compiled models, streams, other profilers, faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

from tests.gpu import raw
from tests.gpu.points import Point, between, near, says, skipped
from tests.gpu.recorded import Place, Run, must, train
from tests.gpu.setups import Setup

MODEL = Setup(layers=4, width=512, batch=8, context=256)
NEVER = ("--wait", "1000000")
"""No capture: what ``perfscope run`` costs outside of them."""
ROUNDS = 3


def checks(place: Place) -> Iterator[Point]:
    """All of them."""
    yield from _outside(place)
    yield from _inside(place)
    yield from _side_stream(place)
    yield from _own_profiler(place)
    yield from _out_of_memory(place)
    yield from _without_nvml(place)
    yield from _compiled(place)
    yield from _cupti_taken(place)


def _outside(place: Place) -> Iterator[Point]:
    """Runs with the collector waiting, between bare ones."""
    ratios = []
    for number in range(ROUNDS):
        bare = must(train(place, f"bare-{number}", [MODEL], steps=120))
        waiting = train(place, f"waiting-{number}", [MODEL], steps=120, record=NEVER)
        ratios.append(median(waiting.steps_ms()[20:]) / median(bare.steps_ms()[20:]))
    yield between("care", "step time outside of captures, of a bare run's", 0.9, median(ratios), 1.02)


def _inside(place: Place) -> Iterator[Point]:
    """Recorded steps beside those of torch.profiler by hand, with the same settings."""
    by_hand = must(train(place, "by-hand", [MODEL], job=("--own-profiler", "5,3,8")))
    ours = must(train(place, "ours", [MODEL], record=()))
    recorded = slice(8, 14)  # steps 9 to 14; item 0 is step 1
    ratio = median(ours.steps_ms()[recorded]) / median(by_hand.steps_ms()[recorded])
    yield between("care", "recorded steps, of torch.profiler's by hand", 0.8, ratio, 1.15)


def _side_stream(place: Place) -> Iterator[Point]:
    if not place.on_gpu:
        yield skipped("care", "a stream other than the default", "no GPU")
        return
    run = must(train(place, "side-stream", [replace(MODEL, side_stream=True)], record=()))
    yield near("care", "another stream: step time", run.recorded_ms(), run.reported_ms(), 0.02, " ms")
    share = raw.busy_share(run.traces()[0])
    row = run.summary["time_breakdown"][0]
    yield near("care", "another stream: device busy", share or 0.0, row["compute_us"] / row["step_time_us"], 0.05)


def _own_profiler(place: Place) -> Iterator[Point]:
    """The script's own torch.profiler gets what it would get without us, and our recording says that it gave way."""
    run = train(place, "own-profiler", [MODEL], job=("--own-profiler", "5,3,8"), record=())
    yield _ended(run, "the script profiles itself")
    own = raw.events(run.folder / "own-0.json")
    steps = {event["name"] for event in own if raw.is_step(event)}
    kernels = len(raw.device_spans(own))
    holds = len(steps) >= 8 and (kernels > 0 or not place.on_gpu)
    found = f"{len(steps)} steps, {kernels} kernels"
    yield says("care", "the script's own trace", "8 steps, with kernels on a GPU", found, holds=holds)
    said = _problems(run)
    yield says("care", "the recording says why it gave way", "profiler", said, holds="profil" in said.lower())


def _out_of_memory(place: Place) -> Iterator[Point]:
    run = train(place, "out-of-memory", [replace(MODEL, oom_at=10)], record=())
    yield _ended(run, "memory runs out in a recorded step, and is caught")
    yield _readable(run)


def _without_nvml(place: Place) -> Iterator[Point]:
    """NVML's package cannot be imported in any process of the run."""
    folder = place.folder / "stub"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pynvml.py").write_text("raise ImportError('no NVML here')\n", encoding="utf-8")
    path = f"{folder}:{Path(__file__).resolve().parents[2]}"
    run = train(place, "without-nvml", [MODEL], record=(), environment={"PYTHONPATH": path})
    yield _ended(run, "without NVML")
    yield _readable(run)


def _compiled(place: Place) -> Iterator[Point]:
    """Compiled with CUDA graphs: as many graphs and graph breaks as in a bare run, and warm before it is recorded."""
    setup = replace(MODEL, compile="reduce-overhead" if place.on_gpu else "default")
    bare = train(place, "compiled-bare", [setup], steps=40)
    if bare.done.code:
        yield skipped("care", "compiled models", f"torch.compile does not run here: {bare.done.output[-200:]}")
        return
    run = must(train(place, "compiled", [setup], steps=40, record=("--wait", "15")))
    expected, found = bare.truths[0]["compiled"], run.truths[0]["compiled"]
    shown = (json.dumps(expected), json.dumps(found))
    yield says("care", "compiled: graphs and graph breaks", *shown, holds=expected == found)
    yield near("care", "compiled: step time", run.recorded_ms(), run.reported_ms(), 0.03, " ms")


def _cupti_taken(place: Place) -> Iterator[Point]:
    """Another subscriber has CUPTI: the training is unharmed, and clear words say what is missing."""
    if not place.on_gpu:
        yield skipped("care", "CUPTI is in use", "no GPU")
        return
    run = train(place, "cupti-taken", [MODEL], job=("--take-cupti",), record=())
    if "libcupti is not installed" in run.done.output or "cuptiSubscribe returned" in run.done.output:
        yield skipped("care", "CUPTI is in use", run.done.output.strip().splitlines()[-1])
        return
    yield _ended(run, "CUPTI is in use")
    kernels = sum(len(raw.device_spans(raw.events(path))) for path in run.traces())
    said = _problems(run) + run.analysis.output
    clear = kernels > 0 or "CUPTI" in said or "no kernels" in said.lower()
    found = f"{kernels} kernels; {said[-250:]}"
    yield says("care", "CUPTI is in use: it is said", "kernels, or words about CUPTI", found, holds=clear)


def _ended(run: Run, what: str) -> Point:
    found = f"exit code {run.done.code}" + (f": {run.done.output[-200:]}" if run.done.code else "")
    return says("care", f"{what}: the training", "exit code 0", found, holds=run.done.code == 0)


def _readable(run: Run) -> Point:
    """Its recording holds the eight planned steps."""
    steps = run.summary["job"]["steps"] if run.summary else []
    found = f"{len(steps)} steps" if steps else run.analysis.output[-200:]
    return says("care", "its recording", "8 steps", found, holds=len(steps) == 8)


def _problems(run: Run) -> str:
    """What the ranks' metadata says went wrong."""
    said = []
    for path in sorted((run.folder / "recording").glob("rank-*.run.json")):
        said += json.loads(path.read_text(encoding="utf-8")).get("problems") or []
    return " ".join(map(str, said))
