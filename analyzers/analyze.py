"""From a folder of traces to a Summary: read and account every rank, then compare them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from perfscope import engine
from perfscope.analyzers.identify import Identified, identify
from perfscope.analyzers.rank import RankPartial, analyze_file
from perfscope.analyzers.summarize import summarize
from perfscope.errors import UnusableInput
from perfscope.job import Job, TraceSource, open_job
from perfscope.summary import Summary

Progress = Callable[[int, int], None]
"""Called with (files done, files in all) after each."""


def analyze(
    path: str | Path,
    *,
    executor: Executor | None = None,
    capture: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Analyze a recording's folder, a folder of one job's traces, or one trace file.

    ``executor`` runs the per-rank work: any ``concurrent.futures.Executor``; by default a process pool sized to the
    cores, or the caller's own process where the files are small. ``capture`` chooses among a recording's captures.

    Raises UnusableInput, naming the path and the remedy, when no rank can be analyzed. A rank that fails costs only
    itself: it is in ``summary.job.failures``.
    """
    job = open_job(Path(path), capture)
    found = identify(job, _map(job, executor, progress))
    if not found.partials:
        raise UnusableInput(_why_nothing(job, found))
    return summarize(job, found)


def _map(
    job: Job, executor: Executor | None, progress: Progress | None
) -> list[engine.Outcome[TraceSource, RankPartial]]:
    total = len(job.sources)
    own = executor or engine.default_executor(total, sum(source.path.stat().st_size for source in job.sources))
    outcomes = []
    try:
        for outcome in engine.map_items(_analyze_source, job.sources, own):
            outcomes.append(outcome)
            if progress is not None:
                progress(len(outcomes), total)
    finally:
        if executor is None:
            own.shutdown()
    return outcomes


def _analyze_source(source: TraceSource) -> RankPartial:
    return analyze_file(source.path)


def _why_nothing(job: Job, found: Identified) -> str:
    told = "; ".join(f"{failure.path}: {failure.error}" for failure in found.failures[:5])
    more = f" (and {len(found.failures) - 5} more)" if len(found.failures) > 5 else ""
    return f"{job.path}: no trace can be analyzed. {told}{more}"
