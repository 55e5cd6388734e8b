"""Analyze every trace of a job, from the cache, on this machine or on a cluster, and identify the ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy.ma  # noqa: F401  # numpy.isin and others import it: here, and not in each worker that is forked

from perfscope.analyzers import cached, readers
from perfscope.analyzers.job.identify import IdentifiedRanks, identify
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.errors import TooLittleMemory, TraceError, UnusableInput
from perfscope.execution import engine, machine
from perfscope.execution.cache import Cache
from perfscope.execution.forked import Forked
from perfscope.execution.outcome import Outcome
from perfscope.recording import remote
from perfscope.recording.job import TRACE_SUFFIXES, Job, TraceSource
from perfscope.trace.custom_flops import CustomFlops

if TYPE_CHECKING:
    from concurrent.futures import Executor

RankOutcome = Outcome[TraceSource, RankPartial]
Progress = Callable[[int, int], None]
"""Called with (files done, files in all) after each."""

_WORKER_BYTES: Final = 100 << 20
"""Resident memory of a worker that has read nothing."""
_MEMORY_PER_BYTE: Final = 0.6
"""Peak memory per byte of unpacked trace; 0.35 to 0.5 was measured."""
_PACKED: Final = (".gz", ".zip", ".zst", ".nsys-rep", ".qdrep")
_PACKING: Final = 25
"""Times that a packed trace grows when unpacked; 14 to 21 was measured."""


def read_ranks(
    job: Job,
    executor: Executor | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    flops: CustomFlops | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> tuple[Job, IdentifiedRanks]:
    """Read every trace of a job and identify its ranks. Raises UnusableInput when none can be analyzed.

    ``meanwhile`` is called once, in this process, while others read, where others do.

    The job comes back with one source for each rank, where one file holds several, and with the unprofiled steps of
    ranks that were killed.
    """
    if not job.sources:
        raise UnusableInput(f"{job.path}: {_without_traces(job)}")
    sources, unreadable = _split(job.sources)
    job = _with_unprofiled_steps(replace(job, sources=sources))
    ranks = identify(job, [*unreadable, *_analyze_all(sources, executor, workers, progress, flops, meanwhile)])
    if not ranks.partials:
        reasons = "; ".join(
            failure.reason if failure.path == str(job.path) else f"{failure.path}: {failure.reason}"
            for failure in ranks.failures[:5]
        )
        more = f" (and {len(ranks.failures) - 5} more)" if len(ranks.failures) > 5 else ""
        raise UnusableInput(f"{job.path}: no trace can be analyzed: {reasons}{more}")
    return job, ranks


def _with_unprofiled_steps(job: Job) -> Job:
    """With those of ranks that were killed. No other job needs what reads histories."""
    if not any(run.outcome == "running" and rank in job.histories for rank, run in job.runs.items()):
        return job
    from perfscope.analyzers.history.killed import with_unprofiled_steps

    return with_unprofiled_steps(job)


def _without_traces(job: Job) -> str:
    """What a job without traces holds, and how to get one."""
    if job.histories:
        return (
            "holds how long each step took, but no trace; record one: perfscope run without --steps-only, or perfscope "
            "trigger while the job runs"
        )
    held = {
        "dumps of a job that stands still": job.stuck,
        "memory snapshots": job.snapshots,
        "logs of NCCL Inspector": job.inspector,
    }
    what = " and ".join(name for name, files in held.items() if files)
    return f"holds {what}, but no trace: perfscope analyze reads it; for this, record one: perfscope run -- COMMAND"


def _split(sources: Sequence[TraceSource]) -> tuple[tuple[TraceSource, ...], list[RankOutcome]]:
    """(sources of one rank each, failures of files that cannot be opened).

    A Chrome trace is one rank, and is not looked into. A report may hold several ranks and may have to be exported
    first, by a program of its own: that is done for several reports at once.
    """
    reports = [source for source in sources if not source.path.name.lower().endswith(TRACE_SUFFIXES)]
    if not reports:
        return tuple(sources), []
    from concurrent.futures import ThreadPoolExecutor

    parts: dict[TraceSource, list[TraceSource]] = {}
    failures: list[RankOutcome] = []
    with ThreadPoolExecutor(min(len(reports), machine.available_cores())) as pool:
        for outcome in engine.map_items(_parts_of, reports, pool):
            if outcome.result is None:
                failures.append(Outcome(outcome.item, None, outcome.error))
            parts[outcome.item] = outcome.result or []
    return tuple(part for source in sources for part in parts.get(source, [source])), failures


def _parts_of(source: TraceSource) -> list[TraceSource]:
    if remote.is_remote(source.path):
        raise TraceError(f"{source.path}: Nsight Systems' files are read from disk only; copy it here first")
    parts = readers.parts(source.path)
    # The file's name can only mean a rank where the file holds one.
    named_rank = source.named_rank if len(parts) == 1 else None
    return [replace(source, part=part, named_rank=named_rank) for part in parts]


def _analyze_all(
    sources: Sequence[TraceSource],
    executor: Executor | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    flops: CustomFlops | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> list[RankOutcome]:
    """Analyze every source on ``executor``, or on ``workers`` of this machine (None: as many as cores and memory hold).

    ``flops`` are the user's own formulas. What the cache knows is not sent to workers. Exactly one outcome for each
    source, in any order.
    """
    use_cache = Cache.from_environment() is not None
    outcomes: list[RankOutcome] = []
    unknown: list[TraceSource] = []
    for source in sources:
        known = cached.recall(source.path, source.part, flops) if use_cache and source.execution is None else None
        if known is None:
            unknown.append(source)
        else:
            outcomes.append(Outcome(source, known, None))
            _report(progress, len(outcomes), len(sources))
    if not unknown:
        return outcomes
    with executor_for(unknown, executor, workers, helped=True) as chosen:
        work = functools.partial(_analyze, use_cache=use_cache, flops=flops)
        for outcome in _on_any_machine(work, unknown, chosen, meanwhile):
            outcomes.append(outcome)
            _report(progress, len(outcomes), len(sources))
    if use_cache:
        cached.trim()
    return outcomes


def _report(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)


@contextmanager
def executor_for(
    sources: Sequence[TraceSource],
    executor: Executor | None = None,
    workers: int | None = None,
    *,
    helped: bool = False,
) -> Iterator[Executor | Forked]:
    """``executor``, else ``workers`` processes of this machine, or as many as cores and memory allow.

    Where ``helped``, this process may be one of them.
    """
    if executor is not None:
        yield executor
        return
    sizes = [_size(source.path) for source in sources]
    memory = [_memory_needed(source.path, size) for source, size in zip(sources, sizes, strict=True)]
    with engine.local_executor(memory, sum(sizes), workers, helped=helped) as own:
        yield own


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # reading it reports why
        return 0


def _memory_needed(path: Path, size: int) -> int:
    unpacked = size * (_PACKING if path.name.lower().endswith(_PACKED) else 1)
    return _WORKER_BYTES + int(unpacked * _MEMORY_PER_BYTE)


def _on_any_machine(
    work: Callable[[TraceSource], RankPartial],
    sources: Sequence[TraceSource],
    executor: Executor | Forked,
    meanwhile: Callable[[], None] | None,
) -> Iterator[RankOutcome]:
    """Map over sources by absolute path, which means the same in every worker; outcomes name the caller's own path."""
    given = {_absolute(source): source for source in sources}
    for outcome in engine.map_items(work, list(given), executor, meanwhile):
        source = given[outcome.item]
        absolute, own = str(outcome.item.path), str(source.path)
        result = outcome.result
        if result is not None and absolute != own:
            result = replace(result, source=result.source.replace(absolute, own))
        error = outcome.error.replace(absolute, own) if outcome.error is not None else None
        yield Outcome(source, result, error)


def _absolute(source: TraceSource) -> TraceSource:
    if remote.is_remote(source.path):
        return source
    execution = source.execution.absolute() if source.execution is not None else None
    return replace(source, path=source.path.absolute(), execution=execution)


def _analyze(source: TraceSource, *, use_cache: bool, flops: CustomFlops | None) -> RankPartial:
    try:
        return cached.analyze_file(
            source.path, source.part, use_cache=use_cache, flops=flops, execution=source.execution
        )
    except MemoryError:
        raise TooLittleMemory(
            f"{source.path}: needs more memory than this process may take; allow it more (ulimit -v), analyze the file "
            "on a larger machine, or record fewer steps (perfscope run --active 3)"
        ) from None
