"""The time in which training threads sleep: what slows down a machine does not make it longer.

A profiler, or another program on the same cores, slows down what computes. A loader that waits for a disk, or a pause,
takes as long as before. Each rank recorded the CPU time of its training thread in the captured steps, how long that
waited for a core, and the CPU time of loading. What is left of a step without its communication was slept.

Example: a step of 100 ms, 10 of them exposed communication. The thread computes for 50 ms and waits 5 for a core: it is
blocked for 45, and of that sleeps for 35. Of 30 ms in the loader 6 are CPU time, so 24 of the 35 are slept there, and
the other 11 between operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Final

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.recording.metadata import DataLoaderMetadata, RunMetadata
from perfscope.results.categories import TimeCategory

_COMMUNICATION: Final = [TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER]

_COMPUTED: Final = 0.5
"""Share of transfers that is CPU time from which threads make them slow."""

_WOKEN: Final = 0.5
"""Share of a thread's waits for a core that comes at the end of communication, where it is woken: its communication
then takes longer than it is blocked. Nothing records how much of it; a thread that computes is put off as well."""

AsleepShares = dict[TimeCategory, float]
"""Category -> the share of its time in a rank's steps that is slept, 0 to 1. Categories without any are left out, but
for loading where the training process does it: 0 where it computes."""


def asleep_shares(result: AlignedJob, runs: Mapping[int, RunMetadata]) -> dict[int, AsleepShares]:
    """Rank -> its shares. Left out are ranks that slept nothing or did not record it, those with a device, which sleep
    while it works, and those whose operators have several threads, which wait for one another.
    """
    shares = {rank: _shares(result, rank, run) for rank, run in _telling(result, runs)}
    return {rank: found for rank, found in shares.items() if found}


def slept_between_ns(result: AlignedJob, runs: Mapping[int, RunMetadata]) -> dict[int, float]:
    """Rank -> for how long its training thread slept per used step outside communication and loading, at least: steps
    that are not used may have been slept from begin to end. Left out are the ranks that ``asleep_shares`` leaves out.
    """
    slept = {}
    for rank, run in _telling(result, runs):
        _, left_ns = _asleep(result, rank, run, likely=False)
        totals = result.totals[rank]
        unused_ns = max(run.cpu.wall_ns - float(totals.sum()), 0.0) / len(totals) if run.cpu is not None else 0.0
        slept[rank] = min(left_ns - unused_ns, float(totals[:, TimeCategory.HOST].mean()))
    return {rank: ns for rank, ns in slept.items() if ns > 0}


def waits_for_network(runs: Mapping[int, RunMetadata], transfers_ns: Mapping[int, float]) -> bool:
    """Do transfers mostly wait for the network, and not for the threads that send and sum? Known where ranks recorded
    the CPU time of their threads: all but the training thread's is taken for that of transfers, which take
    ``transfers_ns`` per step of each rank, exposed or not.
    """
    shares = [
        (cpu.process_ns - cpu.thread_ns) / cpu.steps / transfers_ns[rank]
        for rank, run in runs.items()
        if (cpu := run.cpu) is not None and cpu.steps and (run.cpu_threads or 1) == 1 and transfers_ns.get(rank)
    ]
    return bool(shares) and median(shares) < _COMPUTED


def _telling(result: AlignedJob, runs: Mapping[int, RunMetadata]) -> Iterator[tuple[int, RunMetadata]]:
    """The ranks whose CPU time tells what their training threads sleep."""
    for rank, partial in result.partials.items():
        run = runs.get(rank)
        if run is not None and not partial.has_device_work and (run.cpu_threads or 1) == 1:
            yield rank, run


def _shares(result: AlignedJob, rank: int, run: RunMetadata) -> AsleepShares:
    shares, left_ns = _asleep(result, rank, run, likely=True)
    # Between operators, then in those that call Python, as a function of autograd's may.
    for category in (TimeCategory.HOST, TimeCategory.COMPUTE):
        spent = float(result.totals[rank][:, category].mean())
        if left_ns > 0 and spent > 0:
            shares[category] = min(left_ns / spent, 1.0)
        left_ns -= spent
    return shares


def _asleep(result: AlignedJob, rank: int, run: RunMetadata, *, likely: bool) -> tuple[AsleepShares, float]:
    """The share of loading, and what is slept per step of captures elsewhere than in it and in communication: what is
    ``likely``, else at least.
    """
    cpu, loader = run.cpu, run.dataloaders[0] if run.dataloaders else None
    if cpu is None or cpu.waited_ns is None:
        return {}, 0.0
    spent = result.totals[rank].mean(axis=0)
    left_ns = cpu.blocked_ns - float(spent[_COMMUNICATION].sum())
    if likely and cpu.steps:
        left_ns += _WOKEN * cpu.waited_ns / cpu.steps
    shares: AsleepShares = {}
    loading = float(spent[TimeCategory.DATALOADER])
    if loader is not None and loader.num_workers:
        left_ns -= loading  # workers compute meanwhile, or not
    elif loader is not None:
        asleep_ns = min(_share_of_loading(loader) * loading, left_ns)
        left_ns -= asleep_ns
        if loading > 0:
            shares[TimeCategory.DATALOADER] = max(asleep_ns, 0.0) / loading
    return shares, left_ns


def _share_of_loading(loader: DataLoaderMetadata) -> float:
    return max(1 - loader.load_cpu_ns / loader.load_ns, 0.0) if loader.load_ns else 0.0
