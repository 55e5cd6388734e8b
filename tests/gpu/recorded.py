"""Runs the acceptance run's training, bare or under ``perfscope run``, and reads what was measured and found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from tests.gpu.setups import Setup

PERFSCOPE: Final = (sys.executable, "-m", "perfscope")
LONGEST_S: Final = 300
STEPS: Final = 24
"""Of a recorded run: ``perfscope run`` records steps 8 to 15."""

SHRUNK: Final = {"batch": 4, "width": 128, "layers": 2, "context": 64, "workers": 0, "pinned": False}
"""What a CPU makes of any setup: the same code, in seconds."""


@dataclass(frozen=True)
class Place:
    """Where the run takes place: the device, and the folder that keeps the evidence."""

    device: str
    devices: int
    folder: Path

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def fit(self, setup: Setup) -> Setup:
        """The setup as this place can run it."""
        if self.on_gpu or setup.fitted:
            return setup
        precision = "fp32" if setup.precision == "tf32" else setup.precision
        optimizer = "for-loop" if setup.optimizer == "fused" else setup.optimizer
        kept = {"workers": setup.workers} if setup.load_ms else {}
        compiled = "" if setup.compile == "reduce-overhead" else setup.compile
        small: dict[str, Any] = SHRUNK | kept | {
            "precision": precision, "optimizer": optimizer, "compile": compiled, "graph": False, "fitted": True,
        }  # fmt: skip
        return replace(setup, **small)


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    code: int
    output: str


@dataclass(frozen=True)
class Run:
    """A training that ended: what it measured by itself, and the analysis where it was recorded."""

    done: Done
    truths: list[dict[str, Any]]
    """By rank."""
    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)
    analysis: Done = field(default_factory=lambda: Done(0, ""))

    def steps_ms(self, rank: int = 0) -> list[float]:
        """Time of each step after the first, by the training's own events; item 0 is step 1."""
        found: list[float] = self.truths[rank]["turns"][0][0]["steps_ms"]
        return found

    def recorded_ms(self, rank: int = 0) -> float:
        """Mean time of the steps that the analysis used, by the training's own events.

        Without the last: the script's own mark comes after the optimizer's step, in which the capture ends.
        """
        return mean(self.steps_ms(rank)[step - 1] for step in self.summary["job"]["steps"][:-1])

    def reported_ms(self) -> float:
        """Mean time of the same steps by the analysis."""
        return mean(self.summary["job"]["step_time_us_per_step"][:-1]) / 1e3

    def losses(self, rank: int = 0) -> list[float]:
        found: list[float] = self.truths[rank]["turns"][0][0]["losses"]
        return found

    def finding(self, *rules: str) -> dict[str, Any] | None:
        """The first of these rules that fired."""
        return next((finding for finding in self.summary["findings"] if finding["rule"] in rules), None)

    def noted(self, kind: str) -> str:
        """The text of the summary's first note of a kind; empty without one."""
        return next((str(note["text"]) for note in self.summary.get("notes", ()) if note["kind"] == kind), "")

    def traces(self) -> list[Path]:
        return sorted(self.folder.glob("recording/*.trace.json.gz"))


def command(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Done:
    """Run it to its end; it is stopped after ``LONGEST_S``."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "PERFSCOPE_CACHE": "off", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **(environment or {})},
    ) as running:  # fmt: skip
        try:
            output = running.communicate(timeout=LONGEST_S)[0]
        except subprocess.TimeoutExpired:
            running.terminate()
            output = running.communicate(timeout=30)[0] + f"\nnot over after {LONGEST_S} s"
    return Done(running.returncode, output)


def train(
    place: Place,
    name: str,
    setups: Sequence[Setup],
    *,
    steps: int = STEPS,
    rounds: int = 1,
    ranks: int = 0,
    job: Sequence[str] = (),
    record: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Run:
    """Train in a folder of the name, ``ranks`` of them under torchrun where not 0, recorded with these options of
    ``perfscope run`` where there are any (an empty list: its defaults), and analyzed. Outputs are kept in the folder.
    """
    folder = place.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    line = [sys.executable, *launch, "-m", "tests.gpu.job", "--device", place.device, "--out", str(folder / "truth")]
    line += ["--steps", str(steps), "--rounds", str(rounds), *job]
    line += [f"--setup={json.dumps(vars(place.fit(setup)))}" for setup in setups]
    recorder = [] if record is None else [*PERFSCOPE, "run", "-o", str(folder / "recording"), *record, "--"]
    done = command([*recorder, *line], environment)
    (folder / "training.txt").write_text(done.output, encoding="utf-8")
    truths = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("truth.*.json"))]
    if record is None or done.code:
        return Run(done, truths, folder)
    return analyzed(Run(done, truths, folder))


def analyzed(run: Run) -> Run:
    """The run with its recording's summary."""
    answer = run.folder / "summary.json"
    page = str(run.folder / "report.html")
    analysis = command([*PERFSCOPE, "analyze", str(run.folder / "recording"), "--json", str(answer), "--output", page])
    (run.folder / "analysis.txt").write_text(analysis.output, encoding="utf-8")
    summary = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    return replace(run, summary=summary, analysis=analysis)


def must(run: Run) -> Run:
    """The run; raises RuntimeError with the end of what it printed where it failed."""
    for what, done in (("training", run.done), ("analysis", run.analysis)):
        if done.code:
            raise RuntimeError(f"the {what} in {run.folder} ended with {done.code}: {done.output[-1500:]}")
    return run


def in_turn(
    place: Place, name: str, before: Setup, after: Setup, rounds: int = 3, *, ranks: int = 0, job: Sequence[str] = ()
) -> tuple[float, float]:
    """Step time without a profiler, ms, before and after a change: both take turns in one process.

    The ratio is the median of the rounds', in each of which ``before`` stands on both sides of ``after``.
    """
    run = must(train(place, name, [before, after, before], rounds=rounds, steps=STEPS, ranks=ranks, job=job))
    first, changed, last = ([turn["step_ms"] for turn in turns] for turns in run.truths[0]["turns"])
    # Compilation and the device's first use belong to no round.
    ratios = [2 * b / (a + c) for a, b, c in zip(first[1:], changed[1:], last[1:], strict=True)]
    base = median([*first[1:], *last[1:]])
    return base, base * median(ratios)
