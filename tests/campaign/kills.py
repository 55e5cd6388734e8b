"""Trainings of which a process is killed at a random moment; what must be true afterwards.

Each job is a short training under ``perfscope run``, of one process or of two ranks under torchrun. In some the sampler
is killed first, and another process later. Whatever is killed: the recording can be read or is said to hold
nothing yet, its files are whole, exit codes are those of the command, and what was not killed trains to its end.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from perfscope.analyzers.analyze import analyze
from perfscope.errors import PerfscopeError, UnusableInput
from tests.campaign.whole import RAW
from tests.collectors.harness import PERFSCOPE, SCRIPTS

STEPS = 200
TRAINING = (str(SCRIPTS / "paced.py"), "--ms", "4", "--steps", str(STEPS))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
OPTIONS = ("--wait", "5", "--warmup", "1", "--active", "3", "--repeat", "6", "--sample-every", "0.1")
PATIENCE_S = 180.0
"""For what should end by itself; a busy machine takes long."""

CODES = {("rank", 1): -9, ("rank", 2): 1, ("launcher", 2): -9}
"""(what was killed last, ranks) -> the command's exit code. Of ``perfscope`` itself it is -9, of the sampler 0."""


@dataclass
class Results:
    """What was killed, how recordings were found, and what was wrong."""

    kills: Counter[str] = field(default_factory=Counter)
    recordings: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


@dataclass
class Job:
    """A training that runs."""

    folder: Path
    ranks: int
    process: subprocess.Popen[bytes]
    out: Path
    began: float = field(default_factory=time.monotonic)
    known: dict[int, psutil.Process] = field(default_factory=dict)
    """Every process of the job that was ever seen."""

    def look(self) -> list[psutil.Process]:
        """The processes of the job that are there, ``perfscope`` first."""
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            self.known.update({each.pid: each for each in (own, *own.children(recursive=True))})
        return [each for each in self.known.values() if _runs(each)]

    def find(self, what: str) -> psutil.Process | None:
        """A process by what it is."""
        for each in self.look():
            with suppress(psutil.Error):
                if _kind(each.cmdline(), each.pid == self.process.pid) == what:
                    return each
        return None

    def end(self) -> None:
        """Nothing of the job is left."""
        for each in self.look():
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _kind(words: list[str], is_first: bool) -> str:
    if is_first:
        return "perfscope"
    if any('"period_s"' in word for word in words):
        return "sampler"
    if "torch.distributed.run" in words:
        return "launcher"
    return "rank" if TRAINING[0] in words else ""


def start(folder: Path, ranks: int) -> Job:
    """Begin a training that records into ``folder / "r"``."""
    out = folder / "out.txt"
    launcher = (sys.executable,) if ranks == 1 else TORCHRUN
    with out.open("wb") as stream:
        process = subprocess.Popen(
            [*PERFSCOPE, "run", "--output", str(folder / "r"), *OPTIONS, "--", *launcher, *TRAINING],
            stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    return Job(folder / "r", ranks, process, out)


def kill(job: Job, what: str, at_s: float, results: Results) -> bool:
    """Kill one process ``at_s`` after the beginning, or as soon as it is there; False where the job was over."""
    while time.monotonic() - job.began < PATIENCE_S:
        victim = job.find(what)
        if job.process.poll() is not None and what != "sampler":
            return False
        if victim is not None and time.monotonic() - job.began >= at_s:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
                results.kills[f"{what} of {job.ranks} {'rank' if job.ranks == 1 else 'ranks'}"] += 1
                return True
        if job.process.poll() is not None:
            return False
        time.sleep(0.01)
    return False


def judge(job: Job, killed: list[str], results: Results, label: str) -> None:
    """Wait for what goes on, and check what is left."""
    last = next((what for what in reversed(killed) if what != "sampler"), None)

    def wrong(text: str) -> None:
        results.faults.append(f"{label}: {text}\n{job.out.read_text(errors='replace')[-1500:]}")

    goes_on = last in (None, "perfscope")
    if not _wait(lambda: job.process.poll() is not None):
        wrong("perfscope run does not end")
    # While a process becomes another program, its command line is empty: whatever is no sampler may be a rank.
    if goes_on and not _wait(lambda: not [each for each in job.look() if _kind_of(each) != "sampler"]):
        wrong("the training does not end")
    said = job.out.read_text(errors="replace")
    # perfscope may be killed before it has started anything.
    goes_on = goes_on and (len(job.known) > 1 or bool(said))
    expected = -9 if last == "perfscope" else CODES.get((last, job.ranks), 0) if last else 0
    if job.process.poll() is not None and job.process.returncode != expected:
        wrong(f"exit code {job.process.returncode}, not {expected}")
    if goes_on and said.count(f"done after {STEPS} steps") != job.ranks:
        wrong("the training did not train to its end")
    if "Traceback" in said and "perfscope/" in said.partition("Traceback")[2].partition("torch/distributed")[0]:
        wrong("a traceback of ours")
    job.end()
    try:
        results.recordings[_read(job.folder, complete=goes_on)] += 1
    except Exception as error:
        wrong(f"the recording: {type(error).__name__}: {error}")


def _kind_of(process: psutil.Process) -> str:
    try:
        return _kind(process.cmdline(), False)
    except psutil.Error:
        return ""


def _wait(done: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE_S
    while not (is_done := done()) and time.monotonic() < until:
        time.sleep(0.05)
    return is_done


def _read(folder: Path, *, complete: bool) -> str:
    """What the recording holds. Raises where it cannot be read, or lacks what a training that ended leaves."""
    if not folder.exists():
        return "killed before there was a folder"
    try:
        summary = analyze(folder, workers=1)
    except UnusableInput as error:
        if complete or str(folder) not in str(error) or RAW.search(str(error)):
            raise
        return "nothing recorded yet"
    bad = [each.error for each in summary.job.failures if each.path.endswith((".gz", ".json"))]
    if bad or RAW.search(" ".join(bad)):
        raise PerfscopeError(f"files that are not whole: {bad}")
    if complete and not summary.job.steps:
        raise PerfscopeError("no step of a training that ended")
    return "steps with a trace" if summary.job.steps else "step times"


def run(count: int, seed: int, results: Results | None = None) -> Iterator[Results]:
    """Jobs until ``count`` processes were killed; the results so far after each."""
    results, number = results or Results(), 0
    longest = {1: 6.0, 2: 10.0}
    while sum(results.kills.values()) < count:
        dice = random.Random(f"{seed}/{number}")
        ranks = dice.choice((1, 1, 1, 1, 2))  # torchrun and each rank import torch, which takes most of the time
        last = dice.choice(("rank", "perfscope") if ranks == 1 else ("rank", "launcher", "launcher", "perfscope"))
        targets = dice.choice((("sampler",), (last,), *[("sampler", last)] * 4))
        with tempfile.TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as folder:
            job = start(Path(folder), ranks)
            try:
                killed = [what for what in targets if kill(job, what, dice.uniform(0, longest[ranks]), results)]
                judge(job, killed, results, f"--seed {seed}, job {number}, killed {' then '.join(killed) or 'nothing'}")
                if not killed:
                    longest[ranks] *= 0.8  # the job was over: it is shorter than thought
            finally:
                job.end()
        number += 1
        yield results


def report(results: Results) -> str:
    """As text."""
    total = sum(results.kills.values())
    lines = [f"{total} kills, {len(results.faults)} faults"]
    lines += [f"  {count:4}  {what}" for what, count in results.kills.most_common()]
    lines += [f"  {count:4}  recordings: {what}" for what, count in results.recordings.most_common()]
    return "\n".join([*lines, *results.faults])
