"""The hang of a job from what its folder holds: every rank's dump and stack read, on several processes where large."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perfscope.errors import TraceError
from perfscope.execution import engine
from perfscope.execution.outcome import Outcome
from perfscope.recording import paths
from perfscope.recording.job import Job
from perfscope.results.hang import Hang
from perfscope.results.rows import Failure

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from perfscope.analyzers.readers import flight

_WORKER_BYTES: Final = 100 << 20
_MEMORY_PER_BYTE: Final = 20
"""Peak memory per byte of a dump, whose few texts are named again and again."""


def job_hang(
    job: Job, executor: Executor | None = None, workers: int | None = None
) -> tuple[Hang | None, tuple[Failure, ...]]:
    """(the answer; None where the job did not hang or left nothing to tell, files that cannot be read)."""
    if not job.stuck:
        return None, ()
    # Few jobs stand still: others do not wait for these.
    from perfscope.analyzers.hang.answer import find_hang
    from perfscope.analyzers.readers import stacks

    failures: list[Failure] = []
    dumps = {}
    ranks = {path: rank for rank, path in job.stuck.flights.items()}
    for outcome in _read_all(list(ranks), executor, workers):
        if outcome.result is None:
            failures.append(
                Failure(rank=ranks[outcome.item], path=str(outcome.item), error=outcome.error or "no result")
            )
        else:
            dumps[ranks[outcome.item]] = outcome.result
    threads = {}
    for rank, path in job.stuck.stacks.items():
        try:
            threads[rank] = stacks.read(path)
        except TraceError as error:
            failures.append(Failure(rank=rank, path=str(path), error=str(error)))
    files = (*job.stuck.flights.values(), *job.stuck.stacks.values())
    own = any(
        paths.rank_of_flight_file(path) is not None or paths.rank_of_stacks_file(path) is not None for path in files
    )
    size = max((run.world_size for run in job.runs.values()), default=None)
    return find_hang(dict(sorted(dumps.items())), threads, size, stands=own), tuple(failures)


def _read_all(
    files: Sequence[Path], executor: Executor | None, workers: int | None
) -> list[Outcome[Path, flight.FlightDump]]:
    from perfscope.analyzers.readers import flight

    if executor is not None:
        return list(engine.map_items(flight.read, files, executor))
    sizes = [path.stat().st_size for path in files]
    memory = [_WORKER_BYTES + _MEMORY_PER_BYTE * size for size in sizes]
    with engine.local_executor(memory, _MEMORY_PER_BYTE * sum(sizes), workers) as own:
        return list(engine.map_items(flight.read, files, own))
