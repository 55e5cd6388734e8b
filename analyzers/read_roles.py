"""The other roles of a recording: read and analyzed like the main one, each by itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from perfscope.analyzers.job.apart import Read
from perfscope.analyzers.job.identify import IdentifiedRanks, identify
from perfscope.analyzers.read_ranks import Progress, read_ranks
from perfscope.analyzers.roles.side_by_side import AnalyzedJob, ran_together, with_roles
from perfscope.errors import UnusableInput
from perfscope.execution.outcome import Outcome
from perfscope.frozen import dataclass
from perfscope.recording.job import Job, RoleJob
from perfscope.recording.role_jobs import unnamed_jobs
from perfscope.redact import redact_value
from perfscope.results.rows import Failure
from perfscope.results.summary import Summary
from perfscope.trace.custom_flops import CustomFlops

if TYPE_CHECKING:
    from concurrent.futures import Executor


@dataclass(frozen=True)
class RoleReader:
    """Reads and analyzes one job after the other, with the same settings."""

    executor: Executor | None
    workers: int | None
    progress: Progress | None
    flops: CustomFlops | None
    meanwhile: Callable[[], None] | None

    def read(self, job: Job) -> tuple[Job, IdentifiedRanks]:
        """Every rank of a job. Raises UnusableInput when none can be analyzed."""
        return read_ranks(job, self.executor, self.workers, self.progress, self.flops, self._import_rest)

    def _import_rest(self) -> None:
        """The analysis across ranks takes as long to import as a small trace to read: done while others read."""
        importlib.import_module("perfscope.analyzers.summarize")
        if self.meanwhile is not None:
            self.meanwhile()

    def analyzed(self, role: RoleJob) -> AnalyzedJob:
        """One job of a role, by itself. Raises UnusableInput when no rank can be analyzed."""
        return _analysis(role, *self.read(role.job))


def with_other_roles(job: Job, ranks: IdentifiedRanks, summary: Summary, reader: RoleReader) -> Summary:
    """The summary of the main job, with the other roles that were recorded beside it; as it is where there are none."""
    if job.roles:
        mine = next(each for each in job.roles if each.name == job.role)
        main = AnalyzedJob(replace(mine, job=job), ranks, summary)
        jobs, failures = _analyzed([each for each in job.roles if each is not mine], reader)
        summary = with_roles(main, [main, *jobs], stated=True, source=job.shown_path)
        return _with_failures(summary, failures)
    if ranks.apart:
        return _told_apart(job, ranks, summary)
    if job.further:
        main = AnalyzedJob(RoleJob("job-0", "job-0", job), ranks, summary)
        others = [each for each in unnamed_jobs(job.path) if each.name != "job-0"]
        jobs, _ = _analyzed([replace(each, role=each.name) for each in others], reader)
        beside = [each for each in jobs if ran_together(main, each)]
        return with_roles(main, [main, *beside], stated=False, source=job.shown_path)
    return summary


def unnamed_roles(folder: Path, capture: int | None, reader: RoleReader) -> Summary | None:
    """Folders of jobs whose names state no roles, side by side; None where they did not run at the same time."""
    found = unnamed_jobs(folder, capture) if folder.is_dir() else []
    if len(found) < 2:
        return None
    jobs, _ = _analyzed([replace(each, role=each.name) for each in found], reader)
    if len(jobs) < 2:
        return None
    main = max(jobs, key=lambda each: len(each.ranks.partials))
    beside = [each for each in jobs if each is main or ran_together(main, each)]
    return with_roles(main, beside, stated=False, source=redact_value(str(folder))) if len(beside) > 1 else None


def _told_apart(job: Job, ranks: IdentifiedRanks, summary: Summary) -> Summary:
    """Traces of one folder whose content shows that they are of several jobs."""
    others = [_by_itself(job, read) for read in ranks.apart]
    # Numbers, since nothing in the files names them.
    jobs = [_analysis(_unnamed(number, each[0]), *each) for number, each in enumerate(others, start=1)]
    theirs = {str(source.path) for read in ranks.apart for source, _ in read}
    kept = tuple(each for each in summary.job.failures if each.path not in theirs)
    summary = replace(summary, job=replace(summary.job, failures=kept))
    main = AnalyzedJob(_unnamed(0, job), ranks, summary)
    return with_roles(main, [main, *jobs], stated=False, source=summary.source)


def _by_itself(job: Job, read: Sequence[Read]) -> tuple[Job, IdentifiedRanks]:
    sources = tuple(source for source, _ in read)
    alone = Job(job.path, sources)
    return alone, identify(alone, [Outcome(source, partial, None) for source, partial in read])


def _unnamed(number: int, job: Job) -> RoleJob:
    return RoleJob(f"job {number}", f"job {number}", job)


def _analysis(role: RoleJob, job: Job, ranks: IdentifiedRanks) -> AnalyzedJob:
    """``job`` is the role's with what its traces tell."""
    from perfscope.analyzers.summarize import summarize

    return AnalyzedJob(replace(role, job=job), ranks, summarize(job, ranks))


def _analyzed(roles: Sequence[RoleJob], reader: RoleReader) -> tuple[list[AnalyzedJob], list[Failure]]:
    """Those of the jobs that can be analyzed, and why others cannot."""
    jobs, failures = [], []
    for role in roles:
        try:
            jobs.append(reader.analyzed(role))
        except UnusableInput as error:
            path = str(role.job.sources[0].path if role.job.sources else role.job.path)
            failures.append(Failure(rank=None, path=path, error=f"role {role.name}: {error}"))
    return jobs, failures


def _with_failures(summary: Summary, failures: Sequence[Failure]) -> Summary:
    return replace(summary, job=replace(summary.job, failures=(*summary.job.failures, *failures)))
