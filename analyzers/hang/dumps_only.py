"""The Summary of a folder that holds dumps or stacks of ranks, and neither traces nor step histories."""

from __future__ import annotations

from perfscope.analyzers.hang.words import no_hang, verdict
from perfscope.analyzers.history.steps_only import untraced_job, untraced_summary
from perfscope.recording.job import Job
from perfscope.results.hang import Hang
from perfscope.results.rows import Failure
from perfscope.results.summary import Summary


def summarize_dumps(job: Job, hang: Hang | None, failures: tuple[Failure, ...]) -> Summary:
    """A Summary of the answer alone. ``failures``: files that could not be read."""
    unread = tuple(Failure(rank=problem.rank, path=str(problem.path), error=problem.error) for problem in job.problems)
    seen = {*job.stuck.flights, *job.stuck.stacks} - {failure.rank for failure in failures}
    world = {*seen, *hang.ranks_without_dump} if hang is not None else seen
    info = untraced_job(
        job,
        tuple(sorted(seen)),
        tuple(sorted(world - seen)),
        (*unread, *failures),
        steps_from="no steps: only what ranks that stood still left was recorded",
    )
    return untraced_summary(
        job, info, verdict(hang) if hang is not None else no_hang(), "No trace was recorded", hang=hang
    )
