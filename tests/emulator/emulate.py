"""``emulate(job)``: run the programs of all ranks on one machine; what a step takes, and the traces. ``step_ns(job)``:
what a step takes, sooner."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

from tests.emulator import trace
from tests.emulator.loader import queues
from tests.emulator.machine import Machine
from tests.emulator.nccl import communicators
from tests.emulator.rank import Rank
from tests.emulator.spec import Job
from tests.emulator.training import Script

GAP_NS = 900
"""Between two kernels of a stream that follow each other."""


@dataclass(frozen=True)
class Emulation:
    """A job that has run."""

    job: Job
    ranks: list[Rank]

    @property
    def step_ns(self) -> float:
        """Mean period of the recorded steps, from the last rank's end of the last step before them to that of the last
        of them. The few that a run has timed before do not count: too few to tell what a step takes."""
        ends, steps = self.ends_ns, self.job.recording.steps
        return (ends[-1] - ends[-1 - steps]) / steps

    @property
    def ends_ns(self) -> list[int]:
        """When each step has ended on all ranks, host and device."""
        found = []
        for step in range(self.job.warmup + self.job.recording.steps):
            last = [work.end_ns or 0 for rank in self.ranks for work in rank.final if work.step == step]
            found.append(max(last + [rank.bounds[step + 1] for rank in self.ranks]))
        return found

    def write(self, folder: Path) -> None:
        """The traces of the recorded ranks."""
        trace.write(self.job, self.ranks, self.ends_ns, folder)


def emulate(job: Job) -> Emulation:
    """Run it."""
    machine = Machine(GAP_NS)
    ranks = [Rank(job, number, machine, mine) for number, mine in enumerate(communicators(job))]
    if job.age and job.loader.workers:
        at_work = [Script(rank, queue) for rank, queue in zip(ranks, queues(job, _alone_ns(job)), strict=True)]
    else:
        at_work = [Script(rank) for rank in ranks]
    machine.run([script.run() for script in at_work])
    return Emulation(job, ranks)


@functools.lru_cache(maxsize=4096)
def step_ns(job: Job) -> float:
    """``emulate(job).step_ns``: for jobs whose traces nobody reads."""
    return step_and_long_run_ns(job, 0)[0]


def step_and_long_run_ns(job: Job, long_run: int) -> tuple[float, float]:
    """The same, and what a step takes on the mean of so many steps from the first recorded one on, or of the recorded
    ones where these are more.
    """
    recording = job.recording
    steps = max(long_run, recording.steps)
    # What a trace would hold is not needed, unless noting it takes time.
    job = replace(job, recording=replace(recording, steps=steps, kept=job.cpu.profiler_ns > 0))
    ends = emulate(job).ends_ns[job.warmup - 1 :]
    return (ends[recording.steps] - ends[0]) / recording.steps, (ends[steps] - ends[0]) / steps


def _alone_ns(job: Job) -> float:
    """What a step takes that never waits for a batch."""
    quick = replace(job.loader, load_ns=1)
    return emulate(replace(job, age=0, warmup=3, loader=quick, recording=replace(job.recording, steps=3))).step_ns
