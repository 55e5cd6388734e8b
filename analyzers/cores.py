"""What a job asks of its hosts' cores: how many each rank has, what its training takes of them, and what loading does.

The ranks recorded the CPU time of their steps and of loading (``CpuRecord``, ``DataLoaderRecord``). A step cannot be
shorter than the CPU time that it needs, all ranks of a host together, over the host's cores: workers that compute help
only where a core is left for them. Example: training takes 70 ms of a core and loading 30. Without workers the step
takes 100 ms; with one worker 70 where the rank has two cores, and still 100 where it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perfscope.metadata import DataLoaderRecord, RunMetadata


@dataclass(frozen=True)
class Demand:
    """CPU time of one rank, ns."""

    cores: float
    """That the rank has to itself: those that it may run on, divided among the ranks that may."""
    sharing: frozenset[int]
    """The recorded ranks that may run on the same cores, itself among them."""
    threads: int
    """That one operator is spread over, at most as many as cores."""
    training_ns: float
    """Of a step, without loading."""
    batch_ns: float
    """To load one batch."""
    batch_most_ns: float
    """The same with the time of all threads that ran meanwhile: some may have helped, others spun."""
    stretch: float
    """How much longer than its CPU time the training's work took, because it waited for a core: 1 where it never did.
    Other processes of the host have that effect, too."""


def demands(runs: Mapping[int, RunMetadata], batches: Mapping[int, float]) -> dict[int, Demand]:
    """Rank -> what it asks of its cores; ranks that did not record it are left out. ``batches`` are those of a step."""
    found = {}
    for rank, run in runs.items():
        loader = _loader(run)
        if run.cpu is None or not run.cpu.steps or loader is None or (part := cores_of(runs, rank)) is None:
            continue
        batch_ns = loader.load_cpu_ns / loader.timed_batches
        meanwhile_ns = loader.load_process_cpu_ns / loader.timed_batches
        threads = run.cpu_threads or 1
        # A thread that waits for its next operator spins: only the training thread's time is surely needed.
        trained_ns = (run.cpu.process_ns if threads == 1 else run.cpu.thread_ns) / run.cpu.steps
        in_process = not loader.num_workers
        found[rank] = Demand(
            cores=part,
            sharing=_sharing(runs, rank),
            threads=max(min(threads, round(part)), 1),
            training_ns=max(trained_ns - (batch_ns * batches.get(rank, 1.0) if in_process else 0.0), 0.0),
            batch_ns=batch_ns,
            batch_most_ns=max(meanwhile_ns, batch_ns) if in_process and threads > 1 else batch_ns,
            stretch=1 + (run.cpu.waited_ns or 0) / run.cpu.thread_ns if run.cpu.thread_ns else 1.0,
        )
    return found


def cores_of(runs: Mapping[int, RunMetadata], rank: int) -> float | None:
    """Cores that a rank has to itself; None where not known.

    Ranks of a host that may all run on the same cores share them, those that are not in the recording as well; ranks
    that are bound to cores of their own do not. A control group's quota is the whole host's.
    """
    run = runs[rank]
    if not run.cpu_count:
        return None
    local = max(run.local_world_size, 1)
    on_host = [other for other in runs.values() if other.host == run.host]
    sharing = _sharing(runs, rank)
    part = run.cpu_count / (local if len(sharing) == len(on_host) else len(sharing))
    quota = run.cpu.quota if run.cpu is not None else None
    return part if quota is None else min(part, quota / local)


def needed_ns(needs: Mapping[int, Demand], rank: int, batches: Mapping[int, float]) -> float:
    """CPU time of a step over cores, training and loading: what the ranks that share cores with this one take of them,
    for each rank's part. No step is shorter.
    """
    mine = needs[rank]
    sharing = [other for other in mine.sharing if other in needs]
    taken = sum(needs[other].training_ns + needs[other].batch_ns * batches.get(other, 1.0) for other in sharing)
    return taken / len(sharing) / mine.cores


def _sharing(runs: Mapping[int, RunMetadata], rank: int) -> frozenset[int]:
    def place(run: RunMetadata) -> tuple[str, str]:
        return run.host, run.cpu.cores if run.cpu is not None else ""

    return frozenset(other for other, run in runs.items() if place(run) == place(runs[rank]))


def _loader(run: RunMetadata) -> DataLoaderRecord | None:
    """The loader that the recorded steps drew from, where its batches' CPU time is known."""
    loader = run.dataloaders[0] if run.dataloaders else None
    return loader if loader is not None and loader.timed_batches else None
