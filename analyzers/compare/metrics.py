"""Single numbers of a whole job, for comparisons and budgets, and how they scale with the number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Final

from perfscope.analyzers.compare.noise import beyond_noise, categories_differ
from perfscope.analyzers.compare.sample import breakdown_of
from perfscope.analyzers.compare.stages import stage_changes, stage_share
from perfscope.frozen import dataclass
from perfscope.results.categories import CATEGORIES, EXPOSED_COMMUNICATION, IDLE
from perfscope.results.comparison import MetricChange, Scaling, ScalingRow, StepChange
from perfscope.results.summary import Summary


@dataclass(frozen=True)
class Metric:
    """One number of a job; ``value`` is None where the recording lacks it."""

    name: str
    unit: str
    """``us``, ``share``, ``bytes`` or ``per_second``."""
    better: str
    """``higher`` or ``lower``."""
    value: Callable[[Summary], float | None]
    meaning: str
    why_absent: str
    categories: tuple[str, ...] = ()
    """Categories of the time breakdown whose share it is; empty for other numbers."""
    follows_step: bool = False
    """It changes with the step time, and is as noisy."""


def samples_per_second(summary: Summary) -> float | None:
    """Samples per second of all ranks; the step time is that of unprofiled steps where it is known.

    None where ranks share samples (tensor, pipeline), or where the batch is not known.
    """
    job = summary.job
    return job.samples_per_step / job.step_us * 1e6 if job.samples_per_step and job.step_us > 0 else None


def _step_time(summary: Summary) -> float | None:
    return summary.job.step_time_us or None


def _memory_peak(summary: Summary) -> float | None:
    return max((row.peak_bytes or row.allocated_peak_bytes or 0 for row in summary.memory), default=0) or None


def _memory_share(summary: Summary) -> float | None:
    shares = [row.peak_bytes / row.capacity_bytes for row in summary.memory if row.peak_bytes and row.capacity_bytes]
    return max(shares, default=None)


def _straggler_cost(summary: Summary) -> float | None:
    if summary.time_breakdown:
        return max((row.lost_us for row in summary.stragglers), default=0.0)
    history = summary.history
    return max((row.cost_us for row in history.stragglers), default=0.0) if history and history.compared else None


def _share_of(names: Iterable[str]) -> Callable[[Summary], float | None]:
    """These categories' share of the step, mean over ranks."""
    chosen = tuple(names)

    def value(summary: Summary) -> float | None:
        rows = summary.time_breakdown
        total = sum(row.step_time_us for row in rows)
        return sum(row.categories()[name] for row in rows for name in chosen) / total if total > 0 else None

    return value


def _data_loading(summary: Summary) -> float | None:
    """Of the time breakdown; without a trace of the host's stages."""
    return _share_of(_LOADING)(summary) if summary.time_breakdown else stage_share(summary, "dataloader")


def _overlapped_share(summary: Summary) -> float | None:
    communication = sum(row.comm_us for row in summary.time_breakdown)
    return sum(row.hidden_comm_us for row in summary.time_breakdown) / communication if communication > 0 else None


def _loader_batch(summary: Summary) -> float | None:
    known = [row.batch_us for row in summary.dataloader if row.batch_us is not None]
    return fmean(known) if known else None


_NO_RANK = "no rank has a time breakdown"
_LOADING = ("idle_dataloader",)

METRICS: Final[tuple[Metric, ...]] = (
    Metric("step_time", "us", "lower", _step_time, "step time", _NO_RANK, follows_step=True),
    Metric(
        "samples_per_second", "per_second", "higher", samples_per_second, "samples/s, all ranks",
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
        "exposed_communication", "share", "lower", _share_of(EXPOSED_COMMUNICATION),
        "exposed communication, share of all ranks' time", _NO_RANK, EXPOSED_COMMUNICATION,
    ),
    Metric("idle", "share", "lower", _share_of(IDLE), "idle devices, share of all ranks' time", _NO_RANK, IDLE),
    Metric(
        "dataloader", "share", "lower", _data_loading, "data loading, share of all ranks' time",
        _NO_RANK, _LOADING,
    ),
    Metric(
        "overlapped_communication", "share", "higher", _overlapped_share, "overlapped share of the communication",
        "there is no communication",
    ),
    Metric(
        "straggler_cost", "us", "lower", _straggler_cost, "cost of the worst straggler, time per step", _NO_RANK
    ),
    Metric(
        "memory_peak", "bytes", "lower", _memory_peak, "peak memory of the fullest rank",
        "no rank's memory was recorded",
    ),
    Metric(
        "memory_share", "share", "lower", _memory_share, "peak memory / capacity of the fullest rank",
        "memory or capacity are not known",
    ),
    Metric(
        "batch_load_time", "us", "lower", _loader_batch, "time for one worker to load one batch",
        "the loader's batches were not recorded",
    ),
)  # fmt: skip
"""In the order of the page."""

CATEGORY_METRICS: Final[tuple[Metric, ...]] = tuple(
    Metric(
        name, "share", "higher" if name == "compute" else "lower", _share_of((name,)),
        f"category {name} of the time breakdown, share of all ranks' time", _NO_RANK, (name,),
    )
    for name in CATEGORIES
)  # fmt: skip
"""Each category of the time breakdown, for budgets."""


def metric_changes(baseline: Summary, candidate: Summary, step: StepChange) -> tuple[MetricChange, ...]:
    """Every number that at least one of the jobs has."""
    changes = []
    for metric in METRICS:
        first, second = metric.value(baseline), metric.value(candidate)
        if first is None and second is None:
            continue
        delta = second - first if first is not None and second is not None else None
        changes.append(
            MetricChange(
                name=metric.name,
                unit=metric.unit,
                better=metric.better,
                baseline=first,
                candidate=second,
                delta=delta,
                significant=is_significant(metric, baseline, candidate, step) if delta is not None else None,
            )
        )
    return tuple(changes)


def is_significant(metric: Metric, baseline: Summary, candidate: Summary, step: StepChange) -> bool | None:
    """Has this number changed significantly? None where that cannot be judged."""
    if metric.follows_step:
        return None if step.verdict == "unknown" else step.verdict != "same"
    if metric.categories:
        if metric.categories == _LOADING and not baseline.time_breakdown and not candidate.time_breakdown:
            stages = {row.name: row.significant for row in stage_changes(baseline, candidate, step)}
            return stages.get("dataloader")
        return categories_differ(baseline, candidate, metric.categories, step)
    first, second = metric.value(baseline), metric.value(candidate)
    if first is None or second is None:
        return None
    # The cost of a straggler is a part of the step; memory does not vary from step to step.
    return beyond_noise(second - first, step) if metric.name == "straggler_cost" else first != second


_SAME: Final = 0.02
"""Amounts of work that differ by less are equal."""

_COVERED: Final = 0.95
"""Share of the matrix operators with known shapes from which FLOPs measure the work."""


def scaling(summaries: Sequence[Summary]) -> Scaling | None:
    """How the job scales, from work per second and device over numbers of devices.

    With the work of a device per step w times that of the smallest run, the ideal step time is w times as long.
    Efficiency = w x T(smallest) / T; the loss T - w x T(smallest) splits into categories by the same rule, and they add
    up to it. Weak scaling (Gustafson 1988) keeps w at 1, strong scaling (Amdahl 1967) keeps w x devices.

    None where all runs have the same number of devices, or where a number is not known.
    """
    devices = [_devices(summary) for summary in summaries]
    if len(set(devices)) < 2 or 0 in devices:
        return None
    order = sorted(range(len(summaries)), key=devices.__getitem__)
    work, work_from = _work(summaries)
    smallest = order[0]
    rows = [
        _row(index, summaries[index], summaries[smallest], work[index] / work[smallest], index == smallest)
        for index in order
    ]
    return Scaling(rows=tuple(rows), work_from=work_from)


def _devices(summary: Summary) -> int:
    """Number of ranks; 0 where it is not known: one rank's trace with collectives may be one of many."""
    if summary.job.world_size:
        return summary.job.world_size
    return len(summary.job.ranks) if not summary.collectives or len(summary.job.ranks) > 1 else 0


def _row(index: int, summary: Summary, smallest: Summary, ratio: float, is_base: bool) -> ScalingRow:
    step, base = summary.job.step_time_us, smallest.job.step_time_us
    devices, fewest = _devices(summary), _devices(smallest)
    first, second = breakdown_of(smallest), breakdown_of(summary)
    ideal = ratio * base
    efficiency = ideal / step if step > 0 else 0.0
    return ScalingRow(
        run=index,
        devices=devices,
        step_time_us=step,
        work_ratio=ratio,
        kind="base" if is_base else _kind(ratio, devices / fewest),
        speedup=efficiency * devices / fewest,
        efficiency=efficiency,
        ideal_step_us=ideal,
        lost_us={name: second[name] - ratio * first[name] for name in second} if first and second else {},
    )


def _kind(ratio: float, devices: float) -> str:
    if devices == 1:
        return "same"
    if math.isclose(ratio, 1.0, rel_tol=_SAME):
        return "weak"
    return "strong" if math.isclose(ratio * devices, 1.0, rel_tol=_SAME) else "mixed"


def _work(summaries: Sequence[Summary]) -> tuple[list[float], str]:
    """Work of one device per step, by the first measure that all runs have, and the name of that measure."""
    flops = [_flops_per_device(summary) for summary in summaries]
    if all(flops):
        return flops, "model FLOPs"
    samples = [summary.job.samples_per_rank or 0.0 for summary in summaries]
    if all(samples):
        return samples, "batch"
    return [1.0] * len(summaries), "assumed equal"


def _flops_per_device(summary: Summary) -> float:
    used = summary.utilisation
    if used.model_flops_per_step is None or (used.flops_coverage or 0.0) < _COVERED or not summary.job.ranks:
        return 0.0
    return used.model_flops_per_step / len(summary.job.ranks)
