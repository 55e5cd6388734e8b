"""What the reader must know to judge the numbers: what is missing, bounded, assumed or perturbed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from perfscope.analyzers.collectives.of_rank import UNKNOWN_GROUP
from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.facts import JobFacts
from perfscope.job import Job
from perfscope.summary import Note

DEVICE_BACKENDS: Final = ("nccl", "rccl", "xccl", "hccl", "mccl")
"""Backends of torch.distributed that only move data between devices."""

UNKNOWN_SHARE: Final = 0.02
"""Idle time without a cause above this share of the step is a defect of the recording or of the analysis."""


def job_notes(job: Job, result: Comparison, facts: JobFacts) -> tuple[Note, ...]:
    """Every note on this job, the gravest kinds first."""
    return (
        *_about_steps(result, facts),
        *_about_ranks(facts),
        *_about_reading(result),
        *_about_devices(result),
        *_about_collectives(result),
        *_about_clock(result),
        *_about_idle(facts),
        *_about_collection(job),
    )


def _about_steps(result: Comparison, facts: JobFacts) -> Iterator[Note]:
    if facts.steps == 0:
        yield Note(
            about="steps",
            text="Nothing marks steps: the whole recording is accounted for as one window, and advice that needs "
            "steps is withheld. Record with perfscope run, or call prof.step() under a torch.profiler schedule.",
        )
    elif facts.few_steps:
        yield Note(
            about="steps",
            text=f"Only {facts.steps} step{'s' if facts.steps > 1 else ''} recorded: confidence is low. "
            "Record more with perfscope run --active 8.",
        )
    if len(result.evaluated):
        numbers = ", ".join(map(str, result.evaluated[:8])) + (" …" if len(result.evaluated) > 8 else "")
        kept = np.isin(result.evaluated, result.steps).any()
        then = "as most steps do: their times include it" if kept else "which are left out: it is no part of training"
        yield Note(
            about="steps", text=f"The model is evaluated (evaluation mode, no gradients) in steps {numbers}, {then}."
        )
    sources = {partial.steps.source for partial in result.partials.values()}
    if facts.steps and any("optimizer" in source for source in sources):
        yield Note(
            about="steps", text="Steps were found by optimizer steps; their numbers count from the recording's start."
        )


def _about_ranks(facts: JobFacts) -> Iterator[Note]:
    if facts.missing_ranks:
        shown = ", ".join(str(rank) for rank in facts.missing_ranks[:8])
        more = f" and {len(facts.missing_ranks) - 8} more" if len(facts.missing_ranks) > 8 else ""
        yield Note(
            about="ranks",
            text=f"{len(facts.missing_ranks)} of {len(facts.missing_ranks) + len(facts.ranks)} ranks are not in the "
            f"recording ({shown}{more}): waits are bounds, and a slow rank may be among them.",
            ranks=facts.missing_ranks,
        )


def _about_reading(result: Comparison) -> Iterator[Note]:
    for rank, partial in sorted(result.partials.items()):
        losses = partial.losses
        told = []
        if losses.truncated:
            told.append("the file ends early: steps up to the cut were read")
        if losses.dropped_events:
            told.append(f"{losses.dropped_events} events could not be read")
        if losses.repaired_slices:
            told.append(f"{losses.repaired_slices} stretches of invalid JSON were mended")
        told += losses.notes
        if told:
            yield Note(about="reading", text=f"Rank {rank} ({partial.source}): {'; '.join(told)}.", ranks=(rank,))


def _about_devices(result: Comparison) -> Iterator[Note]:
    blind = tuple(
        rank
        for rank, partial in sorted(result.partials.items())
        if not partial.has_device_work and (partial.lists_devices or partial.backend in DEVICE_BACKENDS)
    )
    if blind:
        yield Note(
            about="accounting",
            text="The job has devices, but the recording holds no work of theirs: the account shows the host's threads "
            "only. Record device activities too (ProfilerActivity.CUDA; perfscope run does).",
            ranks=blind,
        )


def _about_collectives(result: Comparison) -> Iterator[Note]:
    for mismatch in result.mismatches[:3]:
        yield Note(
            about="collectives",
            text=f"Group {mismatch.group!r}, step {mismatch.step}: {mismatch.text}; those left over are not compared.",
            ranks=mismatch.ranks,
        )
    if len(result.mismatches) > 3:
        yield Note(about="collectives", text=f"{len(result.mismatches) - 3} more mismatches like these.")
    instances = result.matched.instances
    if len(instances) and not instances.complete.all():
        share = 1 - float(np.mean(instances.complete))
        yield Note(
            about="collectives",
            text=f"{share:.0%} of the collectives have participants that are not in the recording: their wait is the "
            "least it can be, and nothing is said of who came last.",
        )
    if instances.inferred.any():
        yield Note(
            about="collectives",
            text=f"{int(instances.inferred.sum())} collectives were put together by when their kernels end: order does "
            "not tell, or nothing says between which ranks these messages pass.",
        )
    if UNKNOWN_GROUP in instances.groups:
        yield Note(
            about="collectives",
            text="The recording does not say which ranks take part in some collectives; these are not compared "
            "across ranks.",
        )


def _about_clock(result: Comparison) -> Iterator[Note]:
    clocks = result.clocks
    if result.hosts.source == "device numbers" and len(set(result.hosts.names.values())) > 1:
        yield Note(
            about="clock",
            text="The recording does not name hosts: ranks are taken to share one, and its clock, where the numbers of "
            "their devices count up.",
        )
    alone = tuple(int(rank) for rank in clocks.ranks[~clocks.aligned])
    if alone:
        yield Note(
            about="clock",
            text=f"Rank{'s' if len(alone) > 1 else ''} {', '.join(map(str, alone[:8]))} "
            f"share{'' if len(alone) > 1 else 's'} no collective with the lowest rank: clocks stay as recorded.",
            ranks=alone,
        )


def _about_idle(facts: JobFacts) -> Iterator[Note]:
    unknown = tuple(row.rank for row in facts.accounting if row.idle_unknown_us > UNKNOWN_SHARE * row.step_time_us)
    if unknown:
        yield Note(
            about="accounting",
            text="Part of the idle time has no visible cause: the recording holds too little of the host "
            "(record CPU activities too).",
            ranks=unknown,
        )


def _choice(job: Job) -> str:
    return f"The recording holds captures {', '.join(map(str, job.captures))}; capture {job.capture} is shown."


def _about_collection(job: Job) -> Iterator[Note]:
    if len(job.captures) > 1:
        yield Note(
            about="steps",
            text=f"{job.choice or _choice(job)} (perfscope analyze --capture N shows another.)",
        )
    captures = [run.capture(job.capture) for run in job.runs.values()] if job.capture is not None else []
    for reason in dict.fromkeys(capture.reason for capture in captures if capture is not None and capture.reason):
        yield Note(about="collection", text=f"This capture was not planned: {reason}.")
    problems: dict[str, list[int]] = {}
    for rank, run in sorted(job.runs.items()):
        for problem in run.problems:
            problems.setdefault(problem, []).append(rank)
    for problem, ranks in problems.items():
        yield Note(about="collection", text=problem, ranks=tuple(ranks))
    cut = tuple(
        rank for rank, run in sorted(job.runs.items()) if any(not capture.complete for capture in run.captures[-1:])
    )
    if cut:
        yield Note(about="collection", text="The job ended before the last planned step was recorded.", ranks=cut)
    if job.launch is not None and job.launch.exit_code not in (0, None):
        yield Note(about="collection", text=f"The recorded command ended with exit code {job.launch.exit_code}.")
