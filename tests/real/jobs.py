"""Records real trainings with something planted in them, and compares the analysis with the script's own stopwatch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import perfscope
from perfscope.results.summary import Summary
from tests.collectors.harness import record
from tests.real.checks import Check
from tests.real.truth import Truth

SCRIPT = Path(__file__).parent / "scripts" / "train.py"

TRUTH = "truth.json"

WAIT, WARMUP, ACTIVE = 2, 2, 6
"""Steps of one capture."""
PERIOD = WAIT + WARMUP + ACTIVE

Judge = Callable[[Summary, Truth], list[Check]]


@dataclass(frozen=True)
class Case:
    """What is planted in a training (``--plant`` of scripts/train.py, less the steps), and what must be found."""

    name: str
    plants: tuple[str, ...]
    judge: Judge


@dataclass(frozen=True)
class Job:
    """Trainings that differ only in what is planted: one process group, its cases one after the other."""

    name: str
    ranks: int
    cases: tuple[Case, ...]
    arguments: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    """Before the command: see ``network``."""
    environment: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """Of ``perfscope run``."""
    fixed: Job | None = None
    """The same training without the cause of its only case: the time breakdown must show where the difference was."""


@dataclass(frozen=True)
class Result:
    """One case as recorded and analyzed."""

    case: Case
    summary: Summary
    truth: Truth

    def checks(self) -> list[Check]:
        return self.case.judge(self.summary, self.truth)

    def failures(self) -> list[str]:
        return [f"{self.case.name}: {check}" for check in self.checks() if not check.holds]


def run(job: Job, folder: Path) -> list[Result]:
    """Record the job's cases, one capture each, and analyze them."""
    recorded(job, folder)
    return analyzed(job, folder)


def recorded(job: Job, folder: Path) -> None:
    """Record the job into ``folder``, with the stopwatch's figures beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    done = record(
        folder / "recording",
        *job.prefix,
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.ranks)),
        *(str(SCRIPT), "--truth", str(folder / TRUTH), "--steps", str(PERIOD * len(job.cases) + 1)),
        *(f"--plant={plant}" for plant in _plants(job.cases)),
        *job.arguments,
        options=(*_options(len(job.cases)), *job.options),
        environment=job.environment,
    )
    if done.exit_code:
        raise RuntimeError(f"{job.name} ended with {done.exit_code}:\n{done.err[-4000:]}")


def analyzed(job: Job, folder: Path) -> list[Result]:
    """What the analysis makes of each of a recorded job's cases."""
    results = []
    for index, case in enumerate(job.cases):
        summary = perfscope.analyze(folder / "recording", capture=index)
        results.append(Result(case, summary, Truth.load(folder / TRUTH, summary.job.steps)))
    return results


def _options(captures: int) -> tuple[str, ...]:
    counts = {"--wait": WAIT, "--warmup": WARMUP, "--active": ACTIVE, "--repeat": captures}
    return ("--overwrite", *(word for name, count in counts.items() for word in (name, str(count))))


def _plants(cases: Sequence[Case]) -> list[str]:
    """Each case has the steps of its capture to itself."""
    return [
        f"{plant}:{PERIOD * index}-{PERIOD * (index + 1) - 1}"
        for index, case in enumerate(cases)
        for plant in case.plants
    ]
