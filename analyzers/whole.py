"""A job read, compared and summarised in one go, for what needs more than the summary: merged traces, scalars."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perfscope import remote
from perfscope.analyzers.analyze import read_ranks
from perfscope.analyzers.compared import Compared, compare_job
from perfscope.analyzers.gather import Progress
from perfscope.analyzers.summarize import summarize
from perfscope.job import Job, TraceSource, open_job
from perfscope.summary import Summary


@dataclass(frozen=True, eq=False)
class Whole:
    """``sources`` are the files that the ranks were read from."""

    job: Job
    compared: Compared
    summary: Summary
    sources: dict[int, TraceSource]


@contextmanager
def read_whole(
    path: str | Path,
    *,
    capture: int | None = None,
    executor: Executor | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Whole]:
    """Read, compare and summarise the recording at ``path``, which may be a URL; its files can be read meanwhile.

    Arguments and errors are those of ``perfscope.analyze``; a recording of step histories alone is UnusableInput.
    """
    if remote.is_url(str(path)):
        with remote.opened(str(path)) as folder:
            yield _read(folder, capture, executor, workers, progress)
    else:
        yield _read(Path(path), capture, executor, workers, progress)


def _read(
    path: Path, capture: int | None, executor: Executor | None, workers: int | None, progress: Progress | None
) -> Whole:
    job = open_job(path, capture)
    job, found = read_ranks(job, executor, workers, progress)
    compared = compare_job(job, found)
    return Whole(job, compared, summarize(job, found, compared=compared), found.sources)
