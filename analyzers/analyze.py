"""From a folder of traces to a Summary: read and analyze every rank, then put the ranks side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from perfscope.analyzers.crash.job_crash import job_crash
from perfscope.analyzers.hang.job_hang import job_hang
from perfscope.analyzers.read_ranks import Progress, read_ranks
from perfscope.analyzers.read_roles import RoleReader, unnamed_roles, with_other_roles
from perfscope.errors import UnusableInput
from perfscope.frozen import dataclass
from perfscope.recording import remote
from perfscope.recording.job import Job, TraceSource
from perfscope.recording.role_jobs import open_main
from perfscope.results.communication.inspector import InspectorRow
from perfscope.results.ending.crash import Crash
from perfscope.results.hang import Hang
from perfscope.results.history import History
from perfscope.results.memory.snapshots import MemorySnapshots
from perfscope.results.rows import Failure
from perfscope.results.summary import Summary
from perfscope.trace.custom_flops import CustomFlops

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from perfscope.analyzers.job.tables.ncu import MeasuredKernel
    from perfscope.analyzers.replay.job_replay import JobReplay


def analyze(
    path: str | Path,
    *,
    executor: Executor | None = None,
    workers: int | None = None,
    capture: int | None = None,
    progress: Progress | None = None,
    flops: str | Path | None = None,
    ncu: Sequence[str | Path] = (),
    role: str | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Summary:
    """Analyze a recording's folder, a folder of one job's traces, or one trace file; ``path`` may be a URL.

    ``executor`` runs the per-rank work: any ``concurrent.futures.Executor``, such as ``executors.cluster``'s; by
    default ``workers`` processes, or as many as cores and memory allow, or the caller's own process where the files are
    small.
    ``capture`` chooses among several captures. ``flops`` is a file of formulas for operators of the user's own
    (``perfscope.trace.custom_flops``); ``ncu`` are CSV exports of Nsight Compute. Of several roles in one folder
    (rollout, update …) the one that trains is analyzed in full, beside an overview of all (``summary.roles``); ``role``
    chooses one alone. ``meanwhile`` is called in this process while others read ranks, where others do.

    Raises UnusableInput, naming the path and the remedy, when no rank can be analyzed. A rank that fails costs only
    itself: it is in ``summary.job.failures``. Raises PerfscopeError where ``flops`` or ``ncu`` cannot be used.
    """
    formulas = CustomFlops.read(flops) if flops is not None else None
    measured = _measured(ncu)
    reader = RoleReader(executor, workers, progress, formulas, meanwhile)
    with remote.opened(path) as folder:
        try:
            job = open_main(folder, capture, role)
        except UnusableInput:
            together = None if role is not None else unnamed_roles(folder, capture, reader)
            if together is None:
                raise
            return together
        history, failures = _history(job, executor, workers)
        crash = job_crash(job, history)
        hang, unread = (None, ()) if crash is not None else job_hang(job, executor, workers)
        snapshots, inspected, unusable = _beside(job, executor, workers)
        failures += unread + unusable
        if not job.sources and (history is not None or job.stuck or job.snapshots or job.inspector):
            return _with_crash(_untraced(job, history, hang, snapshots, inspected, failures), crash)
        try:
            read, ranks = reader.read(job)
        except UnusableInput:
            if hang is None and snapshots is None and not inspected:
                raise
            return _with_crash(_untraced(job, history, hang, snapshots, inspected, failures), crash)
        from perfscope.analyzers.summarize import summarize

        ranks.failures += failures
        summary = summarize(read, ranks, measured, snapshots=snapshots)
        if history is not None:
            from perfscope.analyzers.verdict_of_run import with_history

            summary = with_history(summary, history)
        summary = with_other_roles(read, ranks, summary, reader) if role is None else summary
        return _inspected(_with_crash(_with_hang(summary, hang), crash), inspected)


def _history(job: Job, executor: Executor | None, workers: int | None) -> tuple[History | None, tuple[Failure, ...]]:
    """What the step histories show, and which of them cannot be read."""
    if not job.histories:
        return None, ()
    from perfscope.analyzers.history.job_history import job_history

    return job_history(job, executor, workers)


def _measured(exports: Sequence[str | Path]) -> list[MeasuredKernel]:
    if not exports:
        return []
    from perfscope.analyzers.job.tables.ncu import read_export

    return [kernel for export in exports for kernel in read_export(Path(export))]


def _beside(
    job: Job, executor: Executor | None, workers: int | None
) -> tuple[MemorySnapshots | None, tuple[InspectorRow, ...], tuple[Failure, ...]]:
    """What memory snapshots and NCCL Inspector's logs show, and which of them cannot be read."""
    snapshots: MemorySnapshots | None = None
    inspected: tuple[InspectorRow, ...] = ()
    failures: tuple[Failure, ...] = ()
    if job.snapshots:
        from perfscope.analyzers.snapshots.job_snapshots import job_snapshots

        snapshots, failures = job_snapshots(job, executor, workers)
    if job.inspector:
        from perfscope.analyzers.job.inspected import job_inspector

        inspected, damaged = job_inspector(job)
        failures += damaged
    return snapshots, inspected, failures


def _inspected(summary: Summary, rows: tuple[InspectorRow, ...]) -> Summary:
    """The summary with what NCCL Inspector logged; its collectives are the job's where traces show none."""
    if not rows:
        return summary
    summary = replace(summary, inspector=rows)
    if summary.collectives:
        return summary
    from perfscope.analyzers.job.collectives.inspector import as_collectives, inspector_costs

    return replace(summary, collectives=as_collectives(rows), cost_model=inspector_costs(rows))


def _untraced(
    job: Job,
    history: History | None,
    hang: Hang | None,
    snapshots: MemorySnapshots | None,
    inspected: tuple[InspectorRow, ...],
    failures: tuple[Failure, ...],
) -> Summary:
    """Without a trace: of dumps and stacks, of step histories, of memory snapshots, of logs, or of several of them."""
    from perfscope.analyzers.hang.dumps_only import summarize_dumps
    from perfscope.analyzers.history.steps_only import summarize_steps
    from perfscope.analyzers.job.inspected import summarize_inspected
    from perfscope.analyzers.snapshots.snapshots_only import summarize_snapshots, unreadable
    from perfscope.analyzers.summarize import with_snapshots

    if history is not None:
        summary = _with_hang(summarize_steps(job, history, failures), hang)
    elif job.stuck:
        summary = summarize_dumps(job, hang, failures)
    elif snapshots is not None:
        summary = summarize_snapshots(job, snapshots, failures)
    elif inspected:
        summary = summarize_inspected(job, inspected, failures)
    else:
        raise unreadable(job, failures)
    return _inspected(with_snapshots(summary, job.runs, snapshots), inspected)


def _with_hang(summary: Summary, hang: Hang | None) -> Summary:
    """The summary, with the verdict on a job that stands still where it does."""
    if hang is None:
        return summary
    from perfscope.analyzers.hang.words import verdict

    return replace(summary, hang=hang, verdict=verdict(hang))


def _standing(summary: Summary, crash: Crash | None) -> Summary:
    """The summary, with the verdict on a job that made no step for long before it was ended, and left nothing that
    tells why.
    """
    history = summary.history
    if crash is not None or summary.hang is not None or history is None or not history.stood_still_us:
        return summary
    from perfscope.analyzers.verdict_of_run import standing

    return replace(summary, verdict=standing(summary, history))


def _with_crash(summary: Summary, crash: Crash | None) -> Summary:
    """The summary, with the verdict on a job that failed where it did, before that on its recorded steps: not where
    these are few, which the first steps of a job are that failed early.
    """
    summary = _standing(summary, crash)
    if crash is None:
        return summary
    from perfscope.analyzers.crash.words import verdict

    found = verdict(crash)
    if summary.time_breakdown and not summary.job.few_steps:
        found = replace(found, headline=f"{found.headline} Until then: {summary.verdict.headline}")
    return replace(summary, crash=crash, verdict=found)


@dataclass(frozen=True, eq=False)
class JobAnalysis:
    """Everything known about a job, for what needs more than the summary: merged traces, scalars.

    ``sources`` are the files that the ranks were read from.
    """

    job: Job
    replay: JobReplay
    summary: Summary
    sources: dict[int, TraceSource]


@contextmanager
def job_analysis(
    path: str | Path,
    *,
    capture: int | None = None,
    executor: Executor | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Iterator[JobAnalysis]:
    """The analysis of the recording at ``path``, which may be a URL; its files can be read meanwhile.

    Arguments and errors are those of ``analyze``; a recording of step histories alone is UnusableInput.
    """
    from perfscope.analyzers.replay.job_replay import replay_job
    from perfscope.analyzers.summarize import summarize

    with remote.opened(path) as folder:
        job, ranks = read_ranks(open_main(folder, capture), executor, workers, progress)
        replay = replay_job(job, ranks)
        yield JobAnalysis(job, replay, summarize(job, ranks, replay=replay), ranks.sources)
