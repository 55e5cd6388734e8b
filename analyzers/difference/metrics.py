"""Single numbers of a whole job: what a comparison tabulates and a budget may limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from perfscope.analyzers.difference.noise import beyond_noise, rows_differ
from perfscope.comparison import MetricChange, StepChange
from perfscope.summary import ROWS, Summary

_COMMUNICATION: Final = ("exposed_comm_wait", "exposed_comm_transfer")
_IDLE: Final = tuple(name for name in ROWS if name.startswith("idle_"))
_DATA_PARALLEL: Final = {"single", "ddp", "fsdp", "zero1", "zero2", "zero3"}
"""Strategies under which every rank trains on samples of its own."""


@dataclass(frozen=True)
class Metric:
    """One number of a job; ``value`` is None where the recording does not tell it."""

    name: str
    unit: str
    """``us``, ``share``, ``bytes`` or ``per_second``."""
    better: str
    """``higher`` or ``lower``."""
    value: Callable[[Summary], float | None]
    meaning: str
    why_absent: str
    rows: tuple[str, ...] = ()
    """Rows of the account whose share of the time it is; empty for other numbers."""
    follows_step: bool = False
    """It changes as the step time does, and is as noisy."""


def samples_per_second(summary: Summary) -> float | None:
    """Samples that all ranks train on a second: the recorded batch x batches a step x ranks / step time.

    The step is the unprofiled one where the recording knows how long those take. None where ranks share samples
    (tensor, pipeline), or where the batch is not known.
    """
    job = summary.job
    strategies = {job.strategy} if isinstance(job.strategy, str) else set(job.strategy)
    samples, step = samples_per_rank(summary), job.unprofiled_step_us or job.step_time_us
    if not samples or not step > 0 or not strategies <= _DATA_PARALLEL:
        return None
    return samples * (job.world_size or len(job.ranks)) / step * 1e6


def samples_per_rank(summary: Summary) -> float:
    """Samples of one rank's step, accumulated batches included; 0 where the batch is not known."""
    job = summary.job
    return float(job.batch_shape[0] * job.batches_per_step) if job.batch_shape and job.batches_per_step else 0.0


def _step_time(summary: Summary) -> float | None:
    return summary.job.step_time_us or None


def _memory_peak(summary: Summary) -> float | None:
    return max((row.peak_bytes or row.allocated_peak_bytes or 0 for row in summary.memory), default=0) or None


def _memory_share(summary: Summary) -> float | None:
    shares = [row.peak_bytes / row.capacity_bytes for row in summary.memory if row.peak_bytes and row.capacity_bytes]
    return max(shares, default=None)


def _straggler_lost(summary: Summary) -> float | None:
    return max((row.lost_us for row in summary.stragglers), default=0.0) if summary.accounting else None


def _share_of(names: Iterable[str]) -> Callable[[Summary], float | None]:
    """Mean over ranks of what the rows take of the step."""
    chosen = tuple(names)

    def value(summary: Summary) -> float | None:
        rows = summary.accounting
        total = sum(row.step_time_us for row in rows)
        return sum(row.rows()[name] for row in rows for name in chosen) / total if total > 0 else None

    return value


def _hidden_share(summary: Summary) -> float | None:
    communication = sum(row.comm_us for row in summary.accounting)
    return sum(row.hidden_comm_us for row in summary.accounting) / communication if communication > 0 else None


def _loader_batch(summary: Summary) -> float | None:
    known = [row.batch_us for row in summary.dataloader if row.batch_us is not None]
    return fmean(known) if known else None


_NO_RANK = "no rank was accounted"

METRICS: Final[tuple[Metric, ...]] = (
    Metric("step_time", "us", "lower", _step_time, "step time", _NO_RANK, follows_step=True),
    Metric(
        "samples_per_second", "per_second", "higher", samples_per_second, "samples a second, all ranks",
        "the batch is not recorded, or ranks share batches", follows_step=True,
    ),
    Metric(
        "mfu", "share", "higher", lambda summary: summary.utilisation.mfu, "model FLOPs utilisation",
        "the recording has no MFU", follows_step=True,
    ),
    Metric(
        "hfu", "share", "higher", lambda summary: summary.utilisation.hfu, "hardware FLOPs utilisation",
        "the recording has no HFU", follows_step=True,
    ),
    Metric(
        "exposed_communication", "share", "lower", _share_of(_COMMUNICATION),
        "communication that nothing hides, share of all ranks' time", _NO_RANK, _COMMUNICATION,
    ),
    Metric("idle", "share", "lower", _share_of(_IDLE), "idle device, share of all ranks' time", _NO_RANK, _IDLE),
    Metric(
        "dataloader", "share", "lower", _share_of(("idle_dataloader",)), "waiting for data, share of all ranks' time",
        _NO_RANK, ("idle_dataloader",),
    ),
    Metric(
        "hidden_communication", "share", "higher", _hidden_share, "share of the communication that compute hides",
        "there is no communication",
    ),
    Metric(
        "straggler_lost", "us", "lower", _straggler_lost, "step time lost to the worst straggler", _NO_RANK
    ),
    Metric(
        "memory_peak", "bytes", "lower", _memory_peak, "peak memory of the fullest rank",
        "no rank's memory was recorded",
    ),
    Metric(
        "memory_share", "share", "lower", _memory_share, "peak memory over capacity, fullest rank",
        "memory or capacity are not known",
    ),
    Metric(
        "batch_load_time", "us", "lower", _loader_batch, "time to load one batch on one worker",
        "the loader's batches were not recorded",
    ),
)  # fmt: skip
"""In the order in which one asks."""

ROW_METRICS: Final[tuple[Metric, ...]] = tuple(
    Metric(
        name, "share", "higher" if name == "compute" else "lower", _share_of((name,)),
        f"account's row {name}, share of all ranks' time", _NO_RANK, (name,),
    )
    for name in ROWS
)  # fmt: skip
"""Each row of the account, for budgets."""


def metric_changes(before: Summary, after: Summary, step: StepChange) -> tuple[MetricChange, ...]:
    """Every number that either job has."""
    changes = []
    for metric in METRICS:
        first, second = metric.value(before), metric.value(after)
        if first is None and second is None:
            continue
        delta = second - first if first is not None and second is not None else None
        changes.append(
            MetricChange(
                name=metric.name,
                unit=metric.unit,
                better=metric.better,
                before=first,
                after=second,
                delta=delta,
                real=is_real(metric, before, after, step) if delta is not None else None,
            )
        )
    return tuple(changes)


def is_real(metric: Metric, before: Summary, after: Summary, step: StepChange) -> bool | None:
    """Has this number of both jobs changed beyond the noise? None where that cannot be judged."""
    if metric.follows_step:
        return None if step.verdict == "unknown" else step.verdict != "same"
    if metric.rows:
        return rows_differ(before, after, metric.rows, step)
    first, second = metric.value(before), metric.value(after)
    if first is None or second is None:
        return None
    # A straggler's loss is a part of the step; memory does not vary from step to step.
    return beyond_noise(second - first, step) if metric.name == "straggler_lost" else first != second
