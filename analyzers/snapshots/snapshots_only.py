"""The Summary of a folder that holds memory snapshots, and neither traces nor step histories nor dumps."""

from __future__ import annotations

from perfscope.analyzers.history.steps_only import untraced_job, untraced_summary
from perfscope.errors import UnusableInput
from perfscope.recording.job import Job
from perfscope.results.memory.snapshots import MemorySnapshots
from perfscope.results.rows import Failure, Verdict
from perfscope.results.summary import Summary


def summarize_snapshots(job: Job, snapshots: MemorySnapshots, failures: tuple[Failure, ...]) -> Summary:
    """A Summary of the ranks alone, without a verdict. ``failures``: files that could not be read."""
    unread = tuple(Failure(rank=problem.rank, path=str(problem.path), error=problem.error) for problem in job.problems)
    ranks = sorted({row.rank for row in snapshots.devices if row.rank is not None})
    info = untraced_job(
        job,
        tuple(ranks),
        tuple(sorted(set(range(ranks[-1] + 1 if ranks else 0)) - set(ranks))),
        (*unread, *failures),
        steps_from="no steps: only memory snapshots were recorded",
    )
    verdict = Verdict(headline="", healthy=False, first_action=None)
    return untraced_summary(job, info, verdict, "No trace was recorded")


def unreadable(job: Job, failures: tuple[Failure, ...]) -> UnusableInput:
    """The error where there is nothing but snapshots or logs, and none can be used."""
    why = failures[0].error if failures else "it holds no memory of a device; dump it while the training runs"
    return UnusableInput(why if str(job.path) in why else f"{job.path}: {why}")
