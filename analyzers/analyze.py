"""From a folder of traces to a Summary: read and account every rank, then compare them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

from perfscope import remote
from perfscope.analyzers.gather import Progress, gather
from perfscope.analyzers.history.of_job import job_history
from perfscope.analyzers.history.steps_only import summarize_steps
from perfscope.analyzers.identify import Identified, identify
from perfscope.analyzers.parts import split
from perfscope.analyzers.summarize import summarize
from perfscope.analyzers.work.ncu import Measured, read_export
from perfscope.custom_flops import CustomFlops
from perfscope.errors import UnusableInput
from perfscope.job import Job, open_job
from perfscope.summary import Summary


def analyze(
    path: str | Path,
    *,
    executor: Executor | None = None,
    workers: int | None = None,
    capture: int | None = None,
    progress: Progress | None = None,
    flops: str | Path | None = None,
    ncu: Sequence[str | Path] = (),
) -> Summary:
    """Analyze a recording's folder, a folder of one job's traces, or one trace file; ``path`` may be a URL.

    ``executor`` runs the per-rank work: any ``concurrent.futures.Executor``, such as ``engine.cluster``'s; by default
    ``workers`` processes, or as many as cores and memory allow, or the caller's own process where the files are small.
    ``capture`` chooses among several captures. ``flops`` is a file of formulas for operators of the user's own
    (``perfscope.custom_flops``); ``ncu`` are CSV exports of Nsight Compute.

    Raises UnusableInput, naming the path and the remedy, when no rank can be analyzed. A rank that fails costs only
    itself: it is in ``summary.job.failures``. Raises PerfscopeError where ``flops`` or ``ncu`` cannot be used.
    """
    asked = _Asked(
        executor=executor,
        workers=workers,
        capture=capture,
        progress=progress,
        flops=CustomFlops.read(flops) if flops is not None else None,
        measured=tuple(kernel for export in ncu for kernel in read_export(Path(export))),
    )
    if remote.is_url(str(path)):
        with remote.opened(str(path)) as folder:
            return _analyze(folder, asked)
    return _analyze(Path(path), asked)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What ``analyze`` was asked for."""

    executor: Executor | None
    workers: int | None
    capture: int | None
    progress: Progress | None
    flops: CustomFlops | None
    measured: tuple[Measured, ...]


def _analyze(path: Path, asked: _Asked) -> Summary:
    job = open_job(path, asked.capture)
    history, lost = job_history(job, asked.executor, asked.workers)
    if not job.sources and history is not None:
        return summarize_steps(job, history, lost)
    job, found = read_ranks(job, asked.executor, asked.workers, asked.progress, asked.flops)
    found.failures += lost
    return replace(summarize(job, found, asked.measured), history=history)


def read_ranks(
    job: Job,
    executor: Executor | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    flops: CustomFlops | None = None,
) -> tuple[Job, Identified]:
    """Read every trace of a job and tell the ranks apart. Raises UnusableInput when none can be analyzed."""
    if not job.sources:
        raise UnusableInput(
            f"{job.path}: holds how long each step took, but no trace; record one: perfscope run without --steps-only, "
            "or perfscope trigger while the job runs"
        )
    sources, unreadable = split(job.sources)
    job = replace(job, sources=sources)
    found = identify(job, [*unreadable, *gather(sources, executor, workers, progress, flops)])
    if not found.partials:
        raise UnusableInput(_why_nothing(job, found))
    return job, found


def _why_nothing(job: Job, found: Identified) -> str:
    told = "; ".join(
        failure.reason if failure.path == str(job.path) else f"{failure.path}: {failure.reason}"
        for failure in found.failures[:5]
    )
    more = f" (and {len(found.failures) - 5} more)" if len(found.failures) > 5 else ""
    return f"{job.path}: no trace can be analyzed: {told}{more}"
