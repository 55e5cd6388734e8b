"""What the system sampler saw of a rank's device, process and loader workers, as counters beside its trace."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.merging.pftrace import BYTES, COUNT, PER_CENT, Unit
from perfscope.analyzers.merging.view import Counter, Windows
from perfscope.analyzers.system.samples import HostSamples, Table, read_samples
from perfscope.job import Job
from perfscope.metadata import RunMetadata
from perfscope.samples import LOADER, RANK
from perfscope.summary_system import System
from perfscope.trace import Float64, Int64

_AROUND_NS = 5 * 10**9
"""Before and after the time shown: samples are seconds apart, and what holds in it was sampled outside."""

_DEVICE = (
    ("utilisation", "GPU utilisation", PER_CENT, 1.0),
    ("power_mw", "GPU power", Unit(name="W"), 1e-3),
    ("sm_mhz", "GPU clock", Unit(name="MHz"), 1.0),
    ("memory_used_bytes", "GPU memory used", BYTES, 1.0),
)
"""Column, name, unit and factor of what is shown of a device."""


def sampled_counters(
    job: Job, result: Comparison, runs: dict[int, RunMetadata], system: System | None, windows: Windows, zero_ns: int
) -> dict[int, tuple[Counter, ...]]:
    """Rank -> its counters; empty where nothing was sampled."""
    if system is None:
        return {}
    counters: dict[int, list[Counter]] = {}
    ranks_of = {(row.host, row.index): row.ranks for row in system.devices}
    for samples, clock_of in _sampled(job, result, runs, windows, zero_ns):

        def shown(time_ns: Int64, rank: int = clock_of) -> Int64:
            return result.clocks.to_common(rank, time_ns) - zero_ns

        for table, known in zip(samples.devices, samples.header.get("devices", ()), strict=False):
            for rank in ranks_of.get((samples.host, int(known.get("index", 0))), ()):
                for column, name, unit, factor in _DEVICE:
                    time, values = table.column(column)
                    counters.setdefault(rank, []).append(Counter(name, unit, shown(time), values * factor))
        for pid, process in samples.processes.items():
            told = {RANK: "process: cores used", LOADER: f"loader worker {pid}: cores used"}.get(process.kind)
            if told is not None:
                time, values = _rate(process.table, "cpu_ms")
                counters.setdefault(process.rank, []).append(Counter(told, COUNT, shown(time), values / 1e3))
    return {rank: tuple(found) for rank, found in counters.items()}


def _sampled(
    job: Job, result: Comparison, runs: dict[int, RunMetadata], windows: Windows, zero_ns: int
) -> Iterator[tuple[HostSamples, int]]:
    """Each host's samples around the time shown, and a rank that reads the host's clock."""
    by_host = {run.host: rank for rank, run in sorted(runs.items(), reverse=True) if rank in result.partials}
    if not by_host:
        return
    bounds = [result.clocks.to_own(rank, moment + zero_ns) for rank in by_host.values() for moment in windows.hull]
    for path in job.samples:
        try:
            found = read_samples(path, min(bounds) - _AROUND_NS, max(bounds) + _AROUND_NS)
        except OSError:
            continue
        yield from ((samples, by_host[samples.host]) for samples in found if samples.host in by_host)


def _rate(table: Table, column: str) -> tuple[Int64, Float64]:
    """Growth of a counter per second, from each sample on until the next."""
    time, values = table.column(column)
    grown = np.diff(values) / np.maximum(np.diff(time), 1) * 1e9
    return time[:-1][grown >= 0], grown[grown >= 0]
