"""From a folder of traces to a Summary: read and account every rank, then compare them."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from perfscope import remote
from perfscope.analyzers.gather import Progress, gather
from perfscope.analyzers.identify import Identified, identify
from perfscope.analyzers.parts import split
from perfscope.analyzers.summarize import summarize
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
) -> Summary:
    """Analyze a recording's folder, a folder of one job's traces, or one trace file; ``path`` may be a URL.

    ``executor`` runs the per-rank work: any ``concurrent.futures.Executor``, such as ``engine.cluster``'s; by default
    ``workers`` processes, or as many as cores and memory allow, or the caller's own process where the files are small.
    ``capture`` chooses among several captures.

    Raises UnusableInput, naming the path and the remedy, when no rank can be analyzed. A rank that fails costs only
    itself: it is in ``summary.job.failures``.
    """
    if remote.is_url(str(path)):
        with remote.opened(str(path)) as folder:
            return _analyze(folder, executor, workers, capture, progress)
    return _analyze(Path(path), executor, workers, capture, progress)


def _analyze(
    path: Path, executor: Executor | None, workers: int | None, capture: int | None, progress: Progress | None
) -> Summary:
    job = open_job(path, capture)
    sources, unreadable = split(job.sources)
    job = replace(job, sources=sources)
    found = identify(job, [*unreadable, *gather(sources, executor, workers, progress)])
    if not found.partials:
        raise UnusableInput(_why_nothing(job, found))
    return summarize(job, found)


def _why_nothing(job: Job, found: Identified) -> str:
    told = "; ".join(f"{failure.path}: {failure.error}" for failure in found.failures[:5])
    more = f" (and {len(found.failures) - 5} more)" if len(found.failures) > 5 else ""
    return f"{job.path}: no trace can be analyzed. {told}{more}"
