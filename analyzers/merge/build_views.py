"""Builds the view of each rank that is shown from the analysis of the whole job, without reading traces again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from perfscope.analyzers.job.system.samples import HostSamples, SampleTable, read_samples
from perfscope.analyzers.merge.choice import step_name
from perfscope.analyzers.merge.communication import Communications
from perfscope.analyzers.merge.pftrace import BYTES, COUNT, PER_CENT, CounterUnit
from perfscope.analyzers.merge.rank_view import Counter, RankView, Windows
from perfscope.recording.samples import LOADER, RANK
from perfscope.results.summary import Summary
from perfscope.text import duration
from perfscope.trace.clock import Clocks
from perfscope.trace.trace import Float64, Int64

if TYPE_CHECKING:
    from perfscope.analyzers.analyze import JobAnalysis

_AROUND_NS = 5 * 10**9
"""Read before and after the time shown: samples are seconds apart, so the values within it may be older."""

_DEVICE = (
    ("utilisation", "GPU utilisation", PER_CENT, 1.0),
    ("power_mw", "GPU power", CounterUnit(name="W"), 1e-3),
    ("sm_mhz", "GPU clock", CounterUnit(name="MHz"), 1.0),
    ("memory_used_bytes", "GPU memory used", BYTES, 1.0),
)
"""Counters of a device: column of the samples, name, unit and factor."""


def rank_views(
    analysis: JobAnalysis, ranks: Sequence[int], windows: Windows, lanes: frozenset[str], zero_ns: int
) -> list[RankView]:
    """The views of these ranks, in their order."""
    result = analysis.replay.result
    communications = Communications(result, ranks, windows, zero_ns)
    counters = _sampled_counters(analysis, windows, zero_ns) if "counters" in lanes else {}
    return [_view(analysis, rank, windows, lanes, zero_ns, communications, counters.get(rank, ())) for rank in ranks]


def _view(
    analysis: JobAnalysis,
    rank: int,
    windows: Windows,
    lanes: frozenset[str],
    zero_ns: int,
    communications: Communications,
    counters: tuple[Counter, ...],
) -> RankView:
    result = analysis.replay.result
    timeline, source = result.timelines[rank], analysis.sources[rank]
    clocks = _clock_of(result.clocks, rank)
    start, end = (clocks.to_common(rank, edge) - zero_ns for edge in result.windows[rank])
    shown = windows.shows(start, end)
    steps = {
        step_name(result, number): (begins, ends)
        for number, begins, ends in zip(
            result.steps[shown].tolist(), start[shown].tolist(), end[shown].tolist(), strict=True
        )
    }
    start, end = (clocks.to_common(rank, edge) - zero_ns for edge in (timeline.start_ns, timeline.ends_ns))
    shown = windows.shows(start, end)
    start, end = windows.clipped(start[shown], end[shown])
    return RankView(
        rank=rank,
        path=source.path,
        part=source.part,
        title=_rank_title(analysis, rank),
        summary=_rank_summary(analysis.summary, rank),
        windows=windows,
        clocks=clocks,
        zero_ns=zero_ns,
        lanes=lanes,
        steps=steps,
        breakdown_start_ns=start,
        breakdown_end_ns=end,
        breakdown_category=timeline.category[shown],
        communication=communications.of(rank),
        counters=counters,
    )


def _clock_of(clocks: Clocks, rank: int) -> Clocks:
    """The clock of one rank alone, which is all that its worker needs."""
    place = int(np.searchsorted(clocks.ranks, rank))
    one = slice(place, place + 1)
    columns = ("ranks", "offset_ns", "residual_ns", "aligned", "drift", "reference_ns")
    return replace(clocks, **{name: getattr(clocks, name)[one] for name in columns})


def _rank_title(analysis: JobAnalysis, rank: int) -> str:
    """Rank, host and device. Ranks have as many digits as the largest, so that titles sort in the order of ranks."""
    result = analysis.replay.result
    digits = len(str(max(result.partials)))
    devices = result.partials[rank].devices
    more = [result.hosts.names.get(rank, ""), devices[0].name if devices else ""]
    return ", ".join([f"rank {rank:0{digits}}", *(text for text in more if text)])


def _rank_summary(summary: Summary, rank: int) -> str:
    """Where a rank's step goes, the largest categories first."""
    row = next(row for row in summary.time_breakdown if row.rank == rank)
    parts = sorted(row.categories().items(), key=lambda part: -part[1])
    times = ", ".join(f"{name} {duration(us)}" for name, us in parts if us > 0.005 * row.step_time_us)
    return f"Step {duration(row.step_time_us)}: {times}."


def _sampled_counters(analysis: JobAnalysis, windows: Windows, zero_ns: int) -> dict[int, tuple[Counter, ...]]:
    """Rank -> counters of its device, its process and its loader workers; empty where the sampler did not run."""
    system, clocks = analysis.summary.system, analysis.replay.result.clocks
    if system is None:
        return {}
    counters: dict[int, list[Counter]] = {}
    ranks_of = {(row.host, row.index): row.ranks for row in system.devices}
    for samples, clock_of in _samples_around(analysis, windows, zero_ns):

        def shown(time_ns: Int64, rank: int = clock_of) -> Int64:
            return clocks.to_common(rank, time_ns) - zero_ns

        for table, device in zip(samples.devices, samples.header.devices, strict=False):
            for rank in ranks_of.get((samples.header.host, device.index), ()):
                for column, name, unit, factor in _DEVICE:
                    time, values = table.column(column)
                    counters.setdefault(rank, []).append(Counter(name, unit, shown(time), values * factor))
        for pid, process in samples.processes.items():
            title = {RANK: "process: cores used", LOADER: f"loader worker {pid}: cores used"}.get(
                process.described.kind
            )
            if title is not None:
                time, values = _rate(process.table, "cpu_ms")
                counters.setdefault(process.described.rank, []).append(Counter(title, COUNT, shown(time), values / 1e3))
    return {rank: tuple(of_rank) for rank, of_rank in counters.items()}


def _samples_around(analysis: JobAnalysis, windows: Windows, zero_ns: int) -> Iterator[tuple[HostSamples, int]]:
    """Each host's samples around the time shown, and a rank that reads the host's clock."""
    result, runs = analysis.replay.result, analysis.replay.runs
    by_host = {run.host: rank for rank, run in sorted(runs.items(), reverse=True) if rank in result.partials}
    if not by_host:
        return
    bounds = [result.clocks.to_own(rank, moment + zero_ns) for rank in by_host.values() for moment in windows.hull]
    for path in analysis.job.samples:
        try:
            hosts = read_samples(path, min(bounds) - _AROUND_NS, max(bounds) + _AROUND_NS)
        except OSError:
            continue
        yield from ((samples, by_host[samples.header.host]) for samples in hosts if samples.header.host in by_host)


def _rate(table: SampleTable, column: str) -> tuple[Int64, Float64]:
    """Growth of a counter per second, from each sample on until the next."""
    time, values = table.column(column)
    growth = np.diff(values) / np.maximum(np.diff(time), 1) * 1e9
    return time[:-1][growth >= 0], growth[growth >= 0]
