"""Every rank's used steps one by one, for rules about how they differ: loading, compute, FLOPs, garbage collection."""

from __future__ import annotations

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.blocks import us
from perfscope.analyzers.rank.host_activity import COLLECTING, COMPILING, LOADER_STARTING, SAVING
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.loop_phases import DDP_FORWARD
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.frozen import dataclass
from perfscope.recording.vocabulary import FORWARD
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Int64

COVERED = 0.5
"""Share of the matrix time whose FLOPs must be known to compare work."""


@dataclass(frozen=True)
class RankSteps:
    """One rank's used steps, in the order of the job's. Times in µs."""

    loading_us: tuple[float, ...]
    """The category idle_dataloader, but for the sampler's time in it."""
    sampling_us: tuple[float, ...]
    """A data loader's sampler draws indices, in idle_dataloader and, where workers start, in idle_host."""
    compute_us: tuple[float, ...]
    batches: tuple[int, ...]
    """Taken from data loaders."""
    starting_us: tuple[float, ...]
    """Data loaders that start or stop workers, in idle_host, but for the sampler's time in it."""
    compiling_us: tuple[float, ...]
    """``torch.compile`` compiling, in idle_host."""
    collecting_us: tuple[float, ...]
    """Garbage collection in idle_host."""
    saving_us: tuple[float, ...]
    """Saving checkpoints, where no device computes meanwhile."""
    pausing_us: tuple[float, ...]
    """Pauses of the host in idle_host: all of it where there is a device."""
    copied_beside_us: tuple[float, ...]
    """Copies between host and device on a stream beside that of the computation, exposed or not."""
    flops: tuple[float, ...] | None
    """Model FLOPs; None where too few shapes are known."""
    forward_us: tuple[float, ...] | None
    """Device work launched in the model's forward; None where nothing marks the forward, or without a device."""


def rank_steps(result: AlignedJob) -> dict[int, RankSteps]:
    """The steps of all ranks."""
    return {rank: _of_rank(result, rank, partial) for rank, partial in result.partials.items()}


def _of_rank(result: AlignedJob, rank: int, partial: RankPartial) -> RankSteps:
    used = partial.steps.indices_of(result.steps)
    totals = result.totals[rank]
    coverage = partial.flops.coverage(used)
    timeline, sampling = result.timelines[rank], partial.loading.sampling
    sampled = sampling.intersect(timeline.where(TimeCategory.DATALOADER)).within(*result.windows[rank])
    starting = _named(result, rank, LOADER_STARTING)
    return RankSteps(
        loading_us=us(totals[:, TimeCategory.DATALOADER] - sampled),
        sampling_us=us(sampled + sampling.intersect(starting).within(*result.windows[rank])),
        compute_us=us(totals[:, TimeCategory.COMPUTE]),
        batches=tuple(partial.loading.batches[used].tolist()),
        starting_us=us(starting.subtract(sampling).within(*result.windows[rank])),
        compiling_us=us(_named(result, rank, COMPILING).within(*result.windows[rank])),
        collecting_us=us(collecting(result, rank).within(*result.windows[rank])),
        saving_us=us(_saving(result, rank).within(*result.windows[rank])),
        pausing_us=us(pausing(result, rank).within(*result.windows[rank])),
        copied_beside_us=us(result.copied_beside_ns[rank]),
        flops=tuple(partial.flops.model[:, used].sum(axis=0).tolist()) if (coverage or 0.0) >= COVERED else None,
        forward_us=_forward(partial, used),
    )


def collecting(result: AlignedJob, rank: int) -> Intervals:
    """Garbage collection in one rank's idle_host."""
    return _named(result, rank, COLLECTING)


def _saving(result: AlignedJob, rank: int) -> Intervals:
    """When a rank saves checkpoints, operators in it included; beside a device, when that does not compute."""
    partial = result.partials[rank]
    named = partial.named_host.get(SAVING, Intervals.empty())
    return named.subtract(result.timelines[rank].where(TimeCategory.COMPUTE)) if partial.has_device_work else named


def _named(result: AlignedJob, rank: int, name: str) -> Intervals:
    named = result.partials[rank].named_host.get(name, Intervals.empty())
    return named.intersect(result.timelines[rank].where(TimeCategory.HOST)) if len(named) else named


def pausing(result: AlignedJob, rank: int) -> Intervals:
    """Pauses of one rank's host in idle_host. Without a device, idle_host is all time between operators."""
    host, partial = result.timelines[rank].where(TimeCategory.HOST), result.partials[rank]
    return host if partial.has_device_work else host.intersect(partial.pauses)


def _forward(partial: RankPartial, used: Int64) -> tuple[float, ...] | None:
    modules = partial.tables.modules
    line = next((modules.names.index(name) for name in (FORWARD, DDP_FORWARD) if name in modules.names), None)
    if line is None or not partial.has_device_work:
        return None
    return us(modules.device_ns[line, used])
