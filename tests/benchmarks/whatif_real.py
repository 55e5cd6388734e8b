"""Predictions against reality: record once, predict, change the setting for real, measure.

    python -m tests.benchmarks.whatif_real [--only network] [--random SEED] [--rounds 6] [--keep FOLDER]

Real trainings on two ranks of this machine's CPU (gloo; ``whatif_job.py``). A scene is recorded once, with
``perfscope run``, in its first setup alone. What its changes would bring is predicted from that recording. Then,
without a profiler, the first setup, every changed one and the first again take turns, and the script's own stopwatch
measures how long steps took. How far ``before`` and ``before again`` are apart shows how much of a difference is noise.

What is measured has no profiler in it, and neither has what is predicted. Best on a machine with two idle cores and
more. The slow link is a token bucket on the loopback interface of a network namespace of the benchmark's own; scenes
that need it are left out, with the reason, where that is not allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from perfscope.analyzers.whatif.predict import predict
from perfscope.analyzers.whatif.whatif import context_of
from perfscope.errors import UnusableInput
from tests.benchmarks.whatif_scenes import SCENES, Scene, drawn
from tests.real import network

PERFSCOPE: Final = (sys.executable, "-c", "from perfscope.cli.main import main; main()")
WAIT, WARMUP, ACTIVE = 5, 2, 10
RECORDED_STEPS: Final = WAIT + WARMUP + ACTIVE + 8
LONGEST_S: Final = 600


@dataclass(frozen=True)
class Outcome:
    """One change: step times in ms. ``before`` and ``after`` by the stopwatch, unprofiled; the prediction scaled to
    that; ``profiled`` as recorded. ``refused`` is why nothing was predicted.
    """

    scene: str
    change: str
    profiled: float
    before: float
    noise: float
    after: float
    low: float = 0.0
    mid: float = 0.0
    high: float = 0.0
    refused: str = ""

    @property
    def inside(self) -> bool:
        return not self.refused and self.low <= self.after <= self.high

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.mid / self.after - 1

    def row(self) -> str:
        """One line of the table."""
        shown = [self.scene, f"`{self.change}`", f"{self.before:.1f}", f"{self.noise:.1%}"]
        if self.refused:
            return _line([*shown, f"refused: {self.refused}", f"{self.after:.1f}", "**no**", ""])
        predicted = f"{self.low:.1f} .. **{self.mid:.1f}** .. {self.high:.1f}"
        return _line([*shown, predicted, f"{self.after:.1f}", "yes" if self.inside else "**no**", f"{self.error:+.1%}"])


HEAD: Final = ("scenario", "setting", "before, ms", "noise", "predicted, ms", "measured, ms", "in range", "error")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def outcomes(scene: Scene, folder: Path, steps: int, rounds: int) -> list[Outcome]:
    """Record, predict, measure."""
    folder.mkdir(parents=True, exist_ok=True)
    recording = folder / "recording"
    _record(scene, recording)
    measured = _measure(scene, folder, steps, rounds)
    return judged(scene, recording, measured)


def judged(scene: Scene, recording: Path, measured: list[list[float]]) -> list[Outcome]:
    """What was predicted of each change beside what was measured: ``before``, each change and ``before`` again, by
    round.
    """
    context = context_of(recording)
    first, *changed, last = measured
    before = median([*first, *last])
    noise = median(abs(one / other - 1) for one, other in zip(first, last, strict=True))
    found = []
    for change, after in zip(scene.changes, changed, strict=True):
        # What else the machine did in a round met all of its turns: ratios within rounds, not of medians.
        ratio = median(2 * one / (a + b) for one, a, b in zip(after, first, last, strict=True))
        known: dict[str, Any] = {"scene": scene.name, "change": change.name, "before": before, "noise": noise}
        known |= {"after": before * ratio, "profiled": context.result.step_ns / 1e6}
        try:
            answer = predict(context, {change.setting: change.value})
        except UnusableInput as reason:
            found.append(Outcome(**known, refused=str(reason)))
            continue
        low, mid, high = (ns / 1e6 for ns in answer.where_step_takes(before * 1e6))
        found.append(Outcome(**known, low=low, mid=mid, high=high))
    return found


def _record(scene: Scene, recording: Path) -> None:
    counts = ("--wait", str(WAIT), "--warmup", str(WARMUP), "--active", str(ACTIVE))
    recorder = (*PERFSCOPE, "run", "--output", str(recording), "--overwrite", *counts, "--")
    _run(scene, recorder, [scene.setup], recording.parent / "recorded.json", RECORDED_STEPS, 1)


def _measure(scene: Scene, folder: Path, steps: int, rounds: int) -> list[list[float]]:
    """Step time of each setup (before, the changed ones, before again) in each round, ms: the slowest rank's.

    The mean, because batches of two workers come in pairs: half of the steps wait long, and half not at all.
    """
    setups = [scene.setup, *({**scene.setup, **change.real} for change in scene.changes), scene.setup]
    took = _run(scene, (), setups, folder / "measured.json", steps, rounds)
    return [[max(map(mean, ranks)) for ranks in turns] for turns in took]


def _run(
    scene: Scene, before: Sequence[str], setups: Sequence[dict[str, Any]], out: Path, steps: int, rounds: int
) -> list[list[list[list[float]]]]:
    """The job under a network of its own where it needs one: step times [setup][round][rank][step], ms."""
    link = network.throttled(scene.setup["megabits"]) if scene.throttled else ()
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    job = ("-m", "tests.benchmarks.whatif_job", "--steps", str(steps), "--rounds", str(rounds), "--out", str(out))
    every = [f"--setup={json.dumps(setup)}" for setup in setups]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(network.GLOO if scene.throttled else {})}
    with subprocess.Popen(
        [*link, *before, *launch, *job, *every], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=environment, start_new_session=True,
    ) as running:  # fmt: skip
        try:
            stderr = running.communicate(timeout=LONGEST_S)[1]
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGTERM)
            stderr = running.communicate(timeout=60)[1]
    if running.returncode:
        raise RuntimeError(f"{scene.name} ended with {running.returncode}:\n{stderr[-6000:]}")
    found: list[list[list[list[float]]]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def main() -> int:
    """Play the scenes and print the table; 0 where at least nine of ten measured times lie in their ranges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[scene.name for scene in SCENES], help="may be repeated")
    parser.add_argument("--random", type=int, metavar="SEED", help="play scenes of sizes drawn at random")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=18, help="of a turn; the first eight do not count")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep recordings and figures here")
    options = parser.parse_args()
    os.environ["PERFSCOPE_CACHE"] = "off"
    played = SCENES if options.random is None else drawn(options.random)
    scenes = [scene for scene in played if not options.only or scene.name in options.only]
    if any(scene.throttled for scene in scenes) and (reason := network.why_not()):
        print(f"left out, for want of a network namespace: {reason}", file=sys.stderr)
        scenes = [scene for scene in scenes if not scene.throttled]
    found: list[Outcome] = []
    failed: list[str] = []
    print(_line(HEAD))
    print(_line(["---"] * len(HEAD)))
    with tempfile.TemporaryDirectory() as scratch:
        for scene in scenes:
            folder = (options.keep or Path(scratch)) / scene.name.replace(" ", "-")
            try:
                measured = outcomes(scene, folder, options.steps, options.rounds)
            except RuntimeError as failure:
                print(failure, file=sys.stderr)
                failed.append(scene.name)
                continue
            (folder / "outcomes.json").write_text(json.dumps([asdict(one) for one in measured], indent=1))
            for one in measured:
                print(one.row(), flush=True)
            found += measured
    if failed:
        print(f"\nnot run to the end: {', '.join(failed)}")
    if not found:
        return 1
    inside = sum(one.inside for one in found)
    errors = [abs(one.error) for one in found if not one.refused]
    print(f"\n{inside} of {len(found)} inside, {len(found) - len(errors)} refused", end="")
    print(f"; error {mean(errors):.1%} on average, {median(errors):.1%} in the middle" if errors else "")
    return 0 if inside >= 0.9 * len(found) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
