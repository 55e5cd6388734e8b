"""How a job scales: work per second and device over numbers of devices, and which row of the account took the rest.

With the work of a device in a step w times that of the smallest run, a step would ideally take w times as long.
Efficiency = w x T(smallest) / T; the loss T - w x T(smallest) splits into rows by the same rule, and they add up to it.
Weak scaling (Gustafson 1988) keeps w at 1, strong scaling (Amdahl 1967) keeps w x devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from perfscope.analyzers.difference.metrics import samples_per_rank
from perfscope.analyzers.difference.noise import rows_of
from perfscope.comparison import Scaling, ScalingRow
from perfscope.summary import Summary

_SAME: Final = 0.02
"""Works that differ by less are the same."""

_COVERED: Final = 0.95
"""Share of the matrix operators whose shapes must be known for FLOPs to measure the work."""


def scaling(summaries: Sequence[Summary]) -> Scaling | None:
    """None where all runs have as many devices, or where some do not tell."""
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
    """Ranks of the job; 0 where that is not known. Traces of a job on one device do not say that it is alone."""
    if summary.job.world_size:
        return summary.job.world_size
    return len(summary.job.ranks) if not summary.collectives or len(summary.job.ranks) > 1 else 0


def _row(index: int, summary: Summary, smallest: Summary, ratio: float, is_base: bool) -> ScalingRow:
    step, base = summary.job.step_time_us, smallest.job.step_time_us
    devices, fewest = _devices(summary), _devices(smallest)
    first, second = rows_of(smallest), rows_of(summary)
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
    """Work of one device in a step, by any measure that all runs have."""
    flops = [_flops_per_device(summary) for summary in summaries]
    if all(flops):
        return flops, "model FLOPs"
    samples = [samples_per_rank(summary) for summary in summaries]
    if all(samples):
        return samples, "batch"
    return [1.0] * len(summaries), "assumed equal"


def _flops_per_device(summary: Summary) -> float:
    used = summary.utilisation
    if used.model_flops_per_step is None or (used.flops_coverage or 0.0) < _COVERED or not summary.job.ranks:
        return 0.0
    return used.model_flops_per_step / len(summary.job.ranks)
