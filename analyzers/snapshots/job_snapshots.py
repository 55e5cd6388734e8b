"""The memory snapshots of a job: every file read by itself, on several processes where they are large."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perfscope.analyzers.readers import snapshot as reader
from perfscope.analyzers.readers.snapshot import Snapshot
from perfscope.analyzers.snapshots.growth import growth, step_begins
from perfscope.analyzers.snapshots.holders import allocations, holders, timeline
from perfscope.analyzers.snapshots.out_of_memory import out_of_memory
from perfscope.analyzers.snapshots.sites import sites
from perfscope.analyzers.snapshots.space import device_row
from perfscope.execution import engine
from perfscope.execution.outcome import Outcome
from perfscope.frozen import dataclass
from perfscope.recording.job import Job
from perfscope.results.memory.snapshots import MemorySnapshots
from perfscope.results.rows import Failure

if TYPE_CHECKING:
    from concurrent.futures import Executor

TIMELINES: Final = 4
_WORKER_BYTES: Final = 100 << 20
_MEMORY_PER_BYTE: Final = 12
"""Peak memory per byte of a snapshot: an action has some 100 bytes in the file, and a dictionary in memory."""


@dataclass(frozen=True)
class _File:
    """One file to read. ``capacity`` is the device's memory in bytes, where the recording has it."""

    path: Path
    rank: int | None
    capacity: int | None


def job_snapshots(
    job: Job, executor: Executor | None = None, workers: int | None = None
) -> tuple[MemorySnapshots | None, tuple[Failure, ...]]:
    """(what the snapshots show; None where there is none that can be read, files that cannot be read)."""
    files = [_File(source.path, source.named_rank, _capacity(job, source.named_rank)) for source in job.snapshots]
    if not files:
        return None, ()
    found, failures = [], []
    for outcome in _analyze_all(files, executor, workers):
        if outcome.result is None:
            failures.append(
                Failure(rank=outcome.item.rank, path=str(outcome.item.path), error=outcome.error or "no result")
            )
        else:
            found.append(outcome.result)
    return _together(found), tuple(failures)


def of_snapshot(snapshot: Snapshot, rank: int | None = None, capacity: int | None = None) -> MemorySnapshots:
    """What one snapshot shows."""
    made = MemorySnapshots(devices=(), holders=())
    of_stack = sites(snapshot.stacks)
    for device in snapshot.devices:
        found = allocations(snapshot, device, of_stack)
        begins = step_begins(snapshot, found)
        failed, curve = out_of_memory(found, rank, capacity), timeline(found, rank)
        made = MemorySnapshots(
            devices=(*made.devices, device_row(snapshot, found, rank, len(begins))),
            holders=(*made.holders, *holders(found, rank)),
            growth=(*made.growth, *growth(found, begins, rank)),
            ooms=(*made.ooms, *([failed] if failed else [])),
            timelines=(*made.timelines, *([curve] if curve else [])),
        )
    return made


def _analyze(file: _File) -> MemorySnapshots:
    return of_snapshot(reader.read(file.path), file.rank, file.capacity)


def _analyze_all(
    files: Sequence[_File], executor: Executor | None, workers: int | None
) -> list[Outcome[_File, MemorySnapshots]]:
    if executor is not None:
        return list(engine.map_items(_analyze, files, executor))
    sizes = [file.path.stat().st_size for file in files]
    memory = [_WORKER_BYTES + _MEMORY_PER_BYTE * size for size in sizes]
    with engine.local_executor(memory, _MEMORY_PER_BYTE * sum(sizes), workers) as own:
        return list(engine.map_items(_analyze, files, own))


def _together(found: Sequence[MemorySnapshots]) -> MemorySnapshots | None:
    """Those of all files, by rank; None where no device has anything."""
    by_rank = partial(sorted, key=lambda row: (row.rank is None, row.rank, row.device))
    devices = tuple(by_rank(row for each in found for row in each.devices))
    if not devices:
        return None
    peaks = {(row.rank, row.device): row.peak_bytes for row in devices}
    curves = sorted(
        (curve for each in found for curve in each.timelines), key=lambda curve: -peaks[curve.rank, curve.device]
    )
    return MemorySnapshots(
        devices=devices,
        holders=tuple(by_rank(row for each in found for row in each.holders)),
        growth=tuple(sorted((row for each in found for row in each.growth), key=lambda row: -row.bytes_per_step)),
        ooms=tuple(by_rank(row for each in found for row in each.ooms)),
        timelines=tuple(by_rank(curves[:TIMELINES])),
    )


def _capacity(job: Job, rank: int | None) -> int | None:
    run = job.runs.get(rank) if rank is not None else None
    return run.device.capacity_bytes if run is not None else None
