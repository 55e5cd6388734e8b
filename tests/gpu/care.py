"""The training stays as it was: what recording costs, compiled models, streams, other profilers, faults."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from tests.gpu import raw
from tests.gpu.points import Point, between, near, says, skipped
from tests.gpu.recorded import Place, Run, analyzed, must, train
from tests.gpu.setups import Setup

MODEL = Setup(layers=4, width=512, batch=8, context=256)
LAUNCHES = Setup(model="small", layers=24, width=128, batch=16, context=32, precision="fp32", workers=0)
NEVER = ("--wait", "1000000")
"""No capture: what ``perfscope run`` costs outside of them."""
ROUNDS = 2
LONG = 90
RECORDED, AFTER = slice(8, 14), slice(30, None)
"""Of such a run: steps in its capture, which are 8 to 15, and steps after it and after what is written then."""
KINETO = re.compile(r"USDT|CUPTI|ActivityProfiler\w*\.cpp")
REFUSING = "int cuptiSubscribe() { return 35; }\nint cuptiActivityEnable() { return 35; }\n"
"""In place of CUPTI's: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES."""


def checks(place: Place) -> Iterator[Point]:
    """All of them."""
    yield from _overhead(place)
    yield from _after_captures(place)
    yield from _side_stream(place)
    yield from _own_profiler(place)
    yield from _out_of_memory(place)
    yield from _without_nvml(place)
    yield from _compiled(place)
    yield from _graphed(place)
    yield from _cupti_taken(place)
    yield from _cupti_refused(place)


def _overhead(place: Place) -> Iterator[Point]:
    """Runs in turn: bare, with a collector that waits, profiled by hand, recorded. Noise only lengthens steps, so of
    each kind the quicker run counts.
    """
    bare, waiting, by_hand, ours = [], [], [], []
    lines = []
    for number in range(ROUNDS):
        bare.append(must(train(place, f"bare-{number}", [MODEL], steps=LONG)))
        waiting.append(must(train(place, f"waiting-{number}", [MODEL], steps=LONG, record=NEVER)))
        by_hand.append(must(train(place, f"by-hand-{number}", [MODEL], job=("--own-profiler", "5,3,8"))))
        ours.append(must(train(place, f"ours-{number}", [MODEL], steps=LONG, record=())))
        lines += [line for line in ours[-1].done.output.splitlines() if KINETO.search(line)]
    waits, inside = _ratio(waiting, bare, AFTER), _ratio(ours, by_hand, RECORDED)
    yield between("care", "step time outside of captures, of a bare run's", 0.8, waits, 1.02)
    yield between("care", "recorded steps, of torch.profiler's by hand", 0.8, inside, 1.15)
    yield says("care", "the output", "no line of Kineto's", "; ".join(lines) or "none", holds=not lines)


def _after_captures(place: Place) -> Iterator[Point]:
    """Steps after the last capture, of a model that is bound by launches: CUPTI, which lengthens these, is detached.
    Beside it what it would cost to leave it attached (``TEARDOWN_CUPTI=0``).
    """
    bare, ours, attached = [], [], []
    for number in range(ROUNDS):
        bare.append(must(train(place, f"launches-bare-{number}", [LAUNCHES], steps=LONG)))
        ours.append(must(train(place, f"launches-{number}", [LAUNCHES], steps=LONG, record=())))
        if place.on_gpu:
            variables = {"TEARDOWN_CUPTI": "0"}
            run = train(place, f"attached-{number}", [LAUNCHES], steps=LONG, record=(), environment=variables)
            attached.append(must(run))
    left = f"; {_ratio(attached, bare, AFTER):.3f} with CUPTI attached" if attached else ""
    yield between("care", f"step time after captures, of a bare run's{left}", 0.8, _ratio(ours, bare, AFTER), 1.05)


def _ratio(runs: Sequence[Run], others: Sequence[Run], steps: slice) -> float:
    """Median step time of the quickest of these runs, of that of the others."""
    quickest = [min(median(run.steps_ms()[steps]) for run in each) for each in (runs, others)]
    return quickest[0] / quickest[1]


def _side_stream(place: Place) -> Iterator[Point]:
    if not place.on_gpu:
        yield skipped("care", "a stream other than the default", "no GPU")
        return
    run = must(train(place, "side-stream", [replace(MODEL, side_stream=True)], record=()))
    yield near("care", "another stream: step time", run.recorded_ms(), run.reported_ms(), 0.02, " ms")
    by_events, row = raw.busy(run.traces()[0]), run.summary["time_breakdown"][0]
    expected = by_events[0] if by_events else 0.0
    yield near("care", "another stream: device busy per step", expected, row["compute_us"], 0.05, " µs")


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
    ends = replace(MODEL, oom_at=12, oom_caught=False)
    bare, run = train(place, "oom-ends-bare", [ends]), train(place, "oom-ends", [ends], record=())
    codes = f"exit code {run.done.code}"
    expected = f"exit code {bare.done.code}"
    yield says("care", "memory runs out and ends the training", expected, codes, holds=run.done.code == bare.done.code)
    steps = len(analyzed(run).summary.get("job", {}).get("steps", ()))
    yield says("care", "its recording", "the steps before", f"{steps} steps", holds=1 <= steps <= 4)


def _without_nvml(place: Place) -> Iterator[Point]:
    """NVML's package cannot be imported in any process of the run."""
    folder = place.folder / "stub"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pynvml.py").write_text("raise ImportError('no NVML here')\n", encoding="utf-8")
    path = os.pathsep.join((str(folder), str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")))
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


def _graphed(place: Place) -> Iterator[Point]:
    """CUDA graphs of the script's own, made before it is recorded: their kernels are there, nothing breaks."""
    if not place.on_gpu:
        yield skipped("care", "CUDA graphs by hand", "no GPU")
        return
    setup, same = replace(MODEL, graph=True, precision="tf32"), {"job": ("--deterministic",)}
    bare = must(train(place, "graphs-bare", [setup], **same))
    run = must(train(place, "graphs", [setup], record=("--repeat", "2"), steps=40, **same))
    equal = bare.losses() == run.losses()[: len(bare.losses())]
    yield says(
        "care", "CUDA graphs, two captures: losses", "a bare run's", "equal" if equal else "different", holds=equal
    )
    yield near("care", "CUDA graphs: step time", run.recorded_ms(), run.reported_ms(), 0.03, " ms")
    unlisted = run.noted("graphs_unlisted")
    yield says("care", "CUDA graphs: their kernels", "in the recording", unlisted or "in it", holds=not unlisted)


def _cupti_taken(place: Place) -> Iterator[Point]:
    """Another subscriber has CUPTI: the training is unharmed, and clear words say what is missing."""
    if not place.on_gpu:
        yield skipped("care", "CUPTI is in use", "no GPU")
        return
    run = train(place, "cupti-taken", [MODEL], job=("--take-cupti",), record=())
    if "libcupti is not installed" in run.done.output or "cuptiSubscribe returned" in run.done.output:
        yield skipped("care", "CUPTI is in use", run.done.output.strip().splitlines()[-1])
        return
    yield from _untraced(run, "CUPTI is in use")


def _cupti_refused(place: Place) -> Iterator[Point]:
    """CUPTI answers as it does a user who may not profile. A library in front of it stands for the driver's setting."""
    what = "CUPTI is not permitted"
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if not place.on_gpu or compiler is None:
        yield skipped("care", what, "no C compiler" if place.on_gpu else "no GPU")
        return
    place.folder.mkdir(parents=True, exist_ok=True)
    source, library = place.folder / "refusing.c", (place.folder / "librefusing.so").resolve()
    source.write_text(REFUSING, encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    run = train(place, "cupti-refused", [MODEL], record=(), environment={"LD_PRELOAD": str(library)})
    yield from _untraced(run, what)


def _untraced(run: Run, what: str) -> Iterator[Point]:
    """The training went on, and the analysis says why there are no kernels, if there are none."""
    yield _ended(run, what)
    kernels = sum(len(raw.device_spans(raw.events(path))) for path in run.traces())
    said = _problems(run) + run.noted("no_device_events")
    found = f"{kernels} kernels; {said[-250:]}"
    clear = kernels > 0 or "CUPTI" in said
    yield says("care", f"{what}: it is said", "kernels, or words about CUPTI", found, holds=clear)


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
