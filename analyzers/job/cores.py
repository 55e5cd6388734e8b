"""The CPU demand of a job: how many cores each rank has, and the CPU time of its training and of its data loading.

The ranks recorded the CPU time of their steps and of loading (``CpuMetadata``, ``DataLoaderMetadata``). A step cannot
be shorter than the CPU time that it needs, all ranks of a host together, over the host's cores: more workers
help only where a core is free for them. Example: training takes 70 ms of a core and loading 30. Without workers the
step takes 100 ms; with one worker 70 where the rank has two cores, and still 100 where it has one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from statistics import median

from perfscope.frozen import dataclass
from perfscope.recording.metadata import RunMetadata
from perfscope.results.system import HostRow, System


@dataclass(frozen=True)
class CpuDemand:
    """CPU time of one rank, ns."""

    cores: float
    """Cores of this rank alone: those that it may run on, divided among the ranks that may."""
    sharing: frozenset[int]
    """The recorded ranks that may run on the same cores, itself among them."""
    threads: int
    """Threads that one operator uses, at most as many as cores."""
    training_ns: float
    """Per step, without loading."""
    batch_ns: float
    """Per loaded batch."""
    batch_most_ns: float
    """The same with the time of all threads that ran meanwhile, some of which may have helped and others spun."""
    slowdown: float
    """Duration of the training's work over its CPU time: above 1 where it waited for a core, also because of other
    processes on the host."""


def demands(runs: Mapping[int, RunMetadata], batches: Mapping[int, float]) -> dict[int, CpuDemand]:
    """Rank -> its CPU demand; ranks that did not record it are left out. ``batches`` are per step."""
    by_rank = {}
    for rank, run in runs.items():
        # The loader that the recorded steps drew from, where its batches' CPU time is known.
        loader = run.dataloaders[0] if run.dataloaders else None
        if loader is None or not loader.timed_batches or run.cpu is None or not run.cpu.steps:
            continue
        if (part := cores_of(runs, rank)) is None:
            continue
        batch_ns = loader.load_cpu_ns / loader.timed_batches
        meanwhile_ns = loader.load_process_cpu_ns / loader.timed_batches
        threads = run.cpu_threads or 1
        trained_ns = _cpu_ns(run) or 0.0
        in_process = not loader.num_workers
        by_rank[rank] = CpuDemand(
            cores=part,
            sharing=_sharing(runs, rank),
            threads=max(min(threads, round(part)), 1),
            training_ns=max(trained_ns - (batch_ns * batches.get(rank, 1.0) if in_process else 0.0), 0.0),
            batch_ns=batch_ns,
            batch_most_ns=max(meanwhile_ns, batch_ns) if in_process and threads > 1 else batch_ns,
            slowdown=_slowdown(run),
        )
    return by_rank


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


def needed_ns(needs: Mapping[int, CpuDemand], rank: int, batches: Mapping[int, float]) -> float:
    """CPU time per step over cores, training and loading, of the ranks that share cores with this one, for each rank's
    part of them. No step is shorter.
    """
    mine = needs[rank]
    sharing = [other for other in mine.sharing if other in needs]
    taken = sum(needs[other].training_ns + needs[other].batch_ns * batches.get(other, 1.0) for other in sharing)
    return taken / len(sharing) / mine.cores


@dataclass(frozen=True)
class CoresNeeded:
    """What the ranks that share cores need of these for a step."""

    least_ns: float
    """Their CPU time over the cores: no step is shorter."""
    contended_ns: float
    """The same where they all want them at once, beside what else wanted them when they were recorded."""


def cores_needed(runs: Mapping[int, RunMetadata], at_peers_pace: Collection[int] = ()) -> CoresNeeded:
    """By the ranks of the host that needs the most; zeros where no CPU time was recorded.

    A rank that sleeps leaves its core to the others. Once it does not, all may want the cores at once. Example: four
    ranks on two cores need 30 ms of CPU time each. Of 200 ms rank 1 sleeps 150, and the others wait for it. Without the
    sleep the step takes 60 ms, though each rank alone would take 30. Of ranks ``at_peers_pace`` the CPU time counts
    that the others usually need, where that is less.
    """
    needs = {rank: need for rank, run in runs.items() if (need := _cpu_ns(run)) is not None}
    most = CoresNeeded(0.0, 0.0)
    for sharing in {_sharing(runs, rank) for rank in needs}:
        cores = cores_of(runs, min(sharing))
        others = [needs[rank] for rank in sharing if rank in needs and rank not in at_peers_pace]
        if cores is None or not sharing <= needs.keys() or not others:
            continue
        usual = median(others)
        taken = sum(min(needs[rank], usual) if rank in at_peers_pace else needs[rank] for rank in sharing)
        at_once = (len(sharing) + _others_at_once(runs, sharing, cores * len(sharing))) / (cores * len(sharing))
        needed = CoresNeeded(taken / (cores * len(sharing)), taken / len(sharing) * max(at_once, 1.0))
        most = max(most, needed, key=lambda each: each.contended_ns)
    return most


@dataclass(frozen=True)
class SharedCores:
    """The cores of a host in the recorded steps, and who had them."""

    ranks: tuple[int, ...]
    cores: float
    """Cores that other programs left to the job."""
    idle: float
    """Cores of these that ran nothing."""

    def least_ns(self, step_ns: float, removed_ns: Mapping[int, float]) -> float:
        """What a step of ``step_ns`` takes at least without this CPU time of each rank, beside the same other programs.

        While a rank waits, others have its core: waits that end make those slower, and only cores that ran nothing make
        a step shorter. Example: of 2 cores others use 0.9, and 0.04 run nothing. Without its waits for others, which
        were 12 ms, a step of 100 ms takes 96.4 or more. Without 10 ms of CPU time of each of two ranks it takes 78.
        """
        removed = sum(removed_ns.get(rank, 0.0) for rank in self.ranks)
        return max(step_ns * (1 - self.idle / self.cores) - removed / self.cores, 0.0)


def shared_cores(system: System | None, runs: Mapping[int, RunMetadata]) -> tuple[SharedCores, ...]:
    """Of each host that was sampled, and whose ranks run where they compute: threads that wait for others do so without
    a core with gloo, and where operators have one thread.
    """
    return tuple(_shared(system, runs)) if system is not None else ()


def _shared(system: System, runs: Mapping[int, RunMetadata]) -> Iterator[SharedCores]:
    for row in system.hosts:
        asleep = all(
            rank in runs and runs[rank].backend == "gloo" and runs[rank].cpu_threads == 1 for rank in row.ranks
        )
        if asleep and (shared := _cores_of_job(row)) is not None:
            yield shared


def _cores_of_job(row: HostRow) -> SharedCores | None:
    """None where it is not known, or where the ranks may not use all cores of the host."""
    if row.other_cores is None or not row.cores or row.cpu_share is None or row.cores_usable not in (None, row.cores):
        return None
    cores = row.cores - row.other_cores
    return SharedCores(row.ranks, cores, (1 - row.cpu_share) * row.cores) if cores > 0 else None


def _others_at_once(runs: Mapping[int, RunMetadata], sharing: Collection[int], cores: float) -> float:
    """Threads besides those that train which wanted the cores when ``sharing`` did: of n that want c cores, each runs
    for c / n of the time. As the ranks tell it, the median.
    """
    wanted = {rank: _wants_a_core(runs[rank]) for rank in sharing}
    others = (_slowdown(runs[rank]) * cores - 1 - sum(wanted.values()) + wanted[rank] for rank in sharing)
    return max(median(others), 0.0) if any(_slowdown(runs[rank]) > 1 for rank in sharing) else 0.0


def _wants_a_core(run: RunMetadata) -> float:
    """Share of its steps in which a rank's training thread runs, or waits for a core."""
    cpu = run.cpu
    return min((cpu.thread_ns + (cpu.waited_ns or 0)) / cpu.wall_ns, 1.0) if cpu is not None and cpu.wall_ns else 0.0


def _cpu_ns(run: RunMetadata) -> float | None:
    """CPU time of a rank's step; None where it was not recorded. Threads of operators spin while they wait for the
    next: of several only the training thread's time is certainly needed.
    """
    if run.cpu is None or not run.cpu.steps:
        return None
    return (run.cpu.process_ns if (run.cpu_threads or 1) == 1 else run.cpu.thread_ns) / run.cpu.steps


def _slowdown(run: RunMetadata) -> float:
    """Duration of the training thread's work over its CPU time: above 1 where it waited for a core."""
    cpu = run.cpu
    return 1 + (cpu.waited_ns or 0) / cpu.thread_ns if cpu is not None and cpu.thread_ns else 1.0


def _sharing(runs: Mapping[int, RunMetadata], rank: int) -> frozenset[int]:
    def place(run: RunMetadata) -> tuple[str, str]:
        return run.host, run.cpu.cores if run.cpu is not None else ""

    return frozenset(other for other, run in runs.items() if place(run) == place(runs[rank]))
