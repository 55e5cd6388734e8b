"""The table of kernels: every rank's device work by name, merged, with what of it is worth a look."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.flops.of_rank import SINGLE_OR_TF32
from perfscope.analyzers.flops.utilisation import resolved_type
from perfscope.analyzers.work.kernel_classes import OTHER, precision
from perfscope.analyzers.work.kernel_times import OTHERS, KernelTimes
from perfscope.analyzers.work.worth_a_look import worth_a_look
from perfscope.hardware import DevicePeaks
from perfscope.summary_tables import KernelRow
from perfscope.trace import Float64, Int64

LISTED: Final = 100
"""Kernels in the table; the cheaper ones are added up in one row for each category."""

Key = tuple[str, str]
"""Name and category."""


@dataclass
class _Total:
    """One kernel over all ranks and used steps."""

    count: int = 0
    total_ns: int = 0
    shortest_ns: int = np.iinfo(np.int64).max
    longest_ns: int = 0
    flops: float = 0.0
    flops_ns: int = 0
    leading_ns: int = 0
    """Time on the rank that has most of it; operator, class and type are that rank's."""
    operator: str | None = None
    operator_class: str = OTHER
    dtype: str | None = None
    means_ns: dict[int, float] = field(default_factory=dict)
    """Rank -> mean of one launch."""

    def add(self, other: _Total) -> None:
        """Add another kernel's numbers, to be listed together."""
        self.count += other.count
        self.total_ns += other.total_ns
        self.shortest_ns = min(self.shortest_ns, other.shortest_ns)
        self.longest_ns = max(self.longest_ns, other.longest_ns)


def kernel_rows(result: Comparison, peaks: DevicePeaks | None) -> tuple[KernelRow, ...]:
    """One row a kernel, the costliest first. ``peaks`` are those of the devices, where all are of one kind."""
    totals: dict[Key, _Total] = {}
    for rank, partial in result.partials.items():
        used = partial.steps.indices_of(result.steps)
        _add_rank(totals, rank, partial.tables.kernels, used)
    listed = _listed({key: total for key, total in totals.items() if total.count})
    whole = sum(total.total_ns for total in listed.values())
    shares = len(result.partials) * len(result.steps)
    rows = [_row(key, total, shares, whole, peaks) for key, total in listed.items()]
    # Waiting for other ranks is not work of this device: what is worth a look is told from the rest.
    work_us = sum(row.us_per_step for row in rows if row.category != "communication")
    return tuple(
        replace(row, worth_a_look=worth_a_look(row, row.us_per_step / work_us if work_us else 0.0, peaks))
        for row in sorted(rows, key=lambda row: (-row.us_per_step, row.name))
    )


def _add_rank(totals: dict[Key, _Total], rank: int, times: KernelTimes, used: Int64) -> None:
    count, total = times.count[:, used].sum(axis=1), times.total_ns[:, used].sum(axis=1)
    shortest, longest = times.shortest_ns[:, used].min(axis=1), times.longest_ns[:, used].max(axis=1)
    flops, flops_ns = np.zeros(len(count)), np.zeros(len(count), dtype=np.int64)
    flops[times.flops_line] = times.flops[:, used].sum(axis=1)
    flops_ns[times.flops_line] = times.flops_ns[:, used].sum(axis=1)
    columns = (column.tolist() for column in (count, total, shortest, longest, flops, flops_ns))
    for line, (number, ns, low, high, done, done_ns) in enumerate(zip(*columns, strict=True)):
        if number == 0:
            continue
        entry = totals.setdefault((times.names[line], times.category[line]), _Total())
        entry.count += number
        entry.total_ns += ns
        entry.shortest_ns, entry.longest_ns = min(entry.shortest_ns, low), max(entry.longest_ns, high)
        entry.flops += done
        entry.flops_ns += done_ns
        entry.means_ns[rank] = ns / number
        if ns >= entry.leading_ns:
            entry.leading_ns = ns
            entry.operator, entry.operator_class = times.operator[line], times.operator_class[line]
            entry.dtype = times.dtype[line]


def _listed(totals: dict[Key, _Total]) -> dict[Key, _Total]:
    """The costliest kernels, and one more entry for the rest of each category."""
    ordered = sorted(totals, key=lambda key: (key[0] == OTHERS, -totals[key].total_ns, key))
    listed = {key: totals[key] for key in ordered[:LISTED] if key[0] != OTHERS}
    for name, category in ordered:
        if (name, category) not in listed or name == OTHERS:
            listed.setdefault((OTHERS, category), _Total()).add(totals[name, category])
    return listed


def _row(key: Key, total: _Total, shares: int, whole_ns: int, peaks: DevicePeaks | None) -> KernelRow:
    name, category = key
    dtype = resolved_type(total.dtype, peaks)
    tflops = total.flops / total.flops_ns / 1e3 if total.flops_ns else None
    slowest, ratio = _slowest(total.means_ns)
    return KernelRow(
        name=name,
        category=category,
        operator=total.operator,
        operator_class=total.operator_class,
        count_per_step=total.count / shares,
        us_per_step=total.total_ns / shares / 1e3,
        mean_us=total.total_ns / total.count / 1e3,
        min_us=total.shortest_ns / 1e3,
        max_us=total.longest_ns / 1e3,
        share=total.total_ns / whole_ns if whole_ns else 0.0,
        slowest_rank=slowest,
        slowest_over_median=ratio,
        dtype=dtype,
        tensor_cores=_uses_tensor_cores(name, dtype),
        tflops=tflops,
        share_of_peak=share_of_peak(tflops, dtype, peaks),
    )


def share_of_peak(tflops: float | None, dtype: str | None, peaks: DevicePeaks | None) -> float | None:
    """Share of the device's dense peak; None where either is unknown, and above 1, which cannot be."""
    if tflops is None or dtype is None or peaks is None or dtype not in peaks.tflops:
        return None
    share = tflops / peaks.tflops[dtype]
    return share if share <= 1 else None


def _uses_tensor_cores(name: str, dtype: str | None) -> bool | None:
    if dtype is None:
        return None
    return True if dtype == "tf32" else None if dtype == SINGLE_OR_TF32 else precision(name).tensor_cores


def _slowest(means_ns: dict[int, float]) -> tuple[int | None, float | None]:
    """(rank with the longest mean, its mean over the median of the ranks' means)."""
    if len(means_ns) < 2:
        return None, None
    means: Float64 = np.fromiter(means_ns.values(), dtype=np.float64)
    middle = float(np.median(means))
    slowest = max(means_ns, key=lambda rank: (means_ns[rank], -rank))
    return slowest, means_ns[slowest] / middle if middle else None
