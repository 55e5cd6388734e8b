"""The table of kernels: every rank's device work by name, merged, and which kernels are worth a look, and why.

The thresholds are in ``docs/metrics.md`` too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.utilisation import resolved_type
from perfscope.analyzers.rank.kernel_classes import COPY, OTHER, PRODUCTS, class_of_kernel, precision
from perfscope.analyzers.rank.work.tables import OTHER_KERNELS, SINGLE_OR_TF32, KernelTimes, OperatorTimes
from perfscope.frozen import dataclass
from perfscope.results.tables import KernelRow
from perfscope.trace.hardware import DevicePeaks
from perfscope.trace.trace import Float64, Int64

LISTED: Final = 100
"""Kernels in the table; the cheaper ones are added up in one row for each category."""

Key = tuple[str, str]
"""Name and category."""

LOW_PEAK: Final = 0.3
"""Products below this share of the peak: large ones reach 0.6 to 0.8, memory-bound ones less."""
LOW_PEAK_SHARE: Final = 0.05
"""Share of the device's work from which a low share of the peak matters."""
NO_TENSOR_CORES_SHARE: Final = 0.02
NO_TENSOR_CORES_GAIN: Final = 1.5
"""TF32's peak over single precision's, from which TF32 is worth a mention."""
SHORT_US: Final = 5.0
SHORT_COUNT: Final = 100
SHORT_SHARE: Final = 0.01
"""Launches hardly longer than a launch call, at least so many per step, with at least this share of the work."""
SLOW_RANK: Final = 1.15
SLOW_RANK_SHARE: Final = 0.02
"""A rank's mean over the median of the ranks' means, for a kernel with at least this share of the work."""
COPY_SHARE: Final = 0.03
PAGEABLE_SHARE: Final = 0.01


@dataclass
class _KernelTotal:
    """One kernel over all ranks and used steps."""

    count: int = 0
    total_ns: int = 0
    shortest_ns: int = np.iinfo(np.int64).max
    longest_ns: int = 0
    flops: float = 0.0
    flops_ns: float = 0.0
    leading_ns: int = 0
    """Time on the rank that has most of it; operator, class and type are that rank's."""
    operator: str | None = None
    operator_class: str = OTHER
    dtype: str | None = None
    means_ns: dict[int, float] = field(default_factory=dict)
    """Rank -> mean of one launch."""

    def add(self, count: int, total_ns: int, shortest_ns: int, longest_ns: int) -> None:
        """Add another rank's launches, or another kernel's, to be listed together."""
        self.count += count
        self.total_ns += total_ns
        self.shortest_ns, self.longest_ns = min(self.shortest_ns, shortest_ns), max(self.longest_ns, longest_ns)


def kernel_rows(result: AlignedJob, peaks: DevicePeaks | None) -> tuple[KernelRow, ...]:
    """One row per kernel, the costliest first. ``peaks`` are those of the devices, where all are of one kind."""
    totals: dict[Key, _KernelTotal] = {}
    for rank, partial in result.partials.items():
        used = partial.steps.indices_of(result.steps)
        _add_rank(totals, rank, partial.tables.kernels, used)
    listed = _listed({key: total for key, total in totals.items() if total.count})
    whole = sum(total.total_ns for total in listed.values())
    shares = len(result.partials) * len(result.steps)
    rows = [_row(key, total, shares, whole, peaks) for key, total in listed.items()]
    # Waiting for other ranks is not work of this device: shares are of the rest.
    work_us = sum(row.us_per_step for row in rows if row.category != "communication")
    return tuple(
        replace(row, worth_a_look=worth_a_look(row, row.us_per_step / work_us if work_us else 0.0, peaks))
        for row in sorted(rows, key=lambda row: (-row.us_per_step, row.name))
    )


def _add_rank(totals: dict[Key, _KernelTotal], rank: int, times: KernelTimes, used: Int64) -> None:
    count, total = times.count[:, used].sum(axis=1), times.total_ns[:, used].sum(axis=1)
    shortest, longest = times.shortest_ns[:, used].min(axis=1), times.longest_ns[:, used].max(axis=1)
    columns = (column.tolist() for column in (count, total, shortest, longest, *flop_sums(times, used)))
    for line, (number, ns, low, high, done, done_ns) in enumerate(zip(*columns, strict=True)):
        if number == 0:
            continue
        entry = totals.setdefault((times.names[line], times.category[line]), _KernelTotal())
        entry.add(number, ns, low, high)
        entry.flops += done
        entry.flops_ns += done_ns
        entry.means_ns[rank] = ns / number
        if ns >= entry.leading_ns:
            entry.leading_ns = ns
            entry.operator, entry.operator_class = times.operator[line], times.operator_class[line]
            entry.dtype = times.dtype[line]


def flop_sums(times: KernelTimes | OperatorTimes, used: Int64) -> tuple[Float64, Float64]:
    """(FLOPs, ns of the calls that do them) of each line in the used steps."""
    flops, flops_ns = np.zeros(len(times.names)), np.zeros(len(times.names))
    flops[times.flops_line] = times.flops[:, used].sum(axis=1)
    flops_ns[times.flops_line] = times.flops_ns[:, used].sum(axis=1)
    return flops, flops_ns


def _listed(totals: dict[Key, _KernelTotal]) -> dict[Key, _KernelTotal]:
    """The costliest kernels, and one more entry for the rest of each category."""
    ordered = sorted(totals, key=lambda key: (key[0] == OTHER_KERNELS, -totals[key].total_ns, key))
    listed = {key: totals[key] for key in ordered[:LISTED] if key[0] != OTHER_KERNELS}
    for name, category in ordered:
        if (name, category) not in listed or name == OTHER_KERNELS:
            each = totals[name, category]
            rest = listed.setdefault((OTHER_KERNELS, category), _KernelTotal())
            rest.add(each.count, each.total_ns, each.shortest_ns, each.longest_ns)
    return listed


def _row(key: Key, total: _KernelTotal, shares: int, whole_ns: int, peaks: DevicePeaks | None) -> KernelRow:
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


def worth_a_look(row: KernelRow, share: float, peaks: DevicePeaks | None) -> str | None:
    """Why this kernel is worth a look; None where it is not. ``share`` is its share of all but communication."""
    if row.category == "compute":
        reasons = list(_of_compute(row, share, peaks))
    elif row.category == "copy" and "Pageable" in row.name and share >= PAGEABLE_SHARE:
        reasons = [f"{share:.0%} of the device's work copies from or to pageable memory: pinned memory is faster"]
    else:
        reasons = []
    return "; ".join(reasons) or None


def _of_compute(row: KernelRow, share: float, peaks: DevicePeaks | None) -> Iterator[str]:
    if row.share_of_peak is not None and row.share_of_peak < LOW_PEAK and share >= LOW_PEAK_SHARE:
        yield f"{share:.0%} of the device's work at {row.share_of_peak:.0%} of the {row.dtype} peak"
    gain = _tensor_core_gain(row, peaks)
    if gain is not None and share >= NO_TENSOR_CORES_SHARE:
        yield f"multiplies in float32 without tensor cores: TF32 has {gain:.0f} times the peak here, bfloat16 more"
    if row.mean_us < SHORT_US and row.count_per_step >= SHORT_COUNT and share >= SHORT_SHARE:
        count = f"{row.count_per_step:.0f} launches per step of {row.mean_us:.1f} µs each"
        yield f"{count}: fusing them would help"
    if row.slowest_over_median is not None and row.slowest_over_median >= SLOW_RANK and share >= SLOW_RANK_SHARE:
        yield f"rank {row.slowest_rank} takes {row.slowest_over_median:.2f} times as long as the median rank"
    if COPY in (row.operator_class, class_of_kernel(row.name)) and share >= COPY_SHARE:
        yield f"{share:.0%} of the device's work moves tensors to another layout, type or place"


def _tensor_core_gain(row: KernelRow, peaks: DevicePeaks | None) -> float | None:
    """How much higher TF32's peak is, for a product of single precision that leaves tensor cores unused."""
    if row.operator_class not in PRODUCTS or row.dtype != "float32" or row.tensor_cores is not False or peaks is None:
        return None
    single, tf32 = peaks.tflops.get("float32"), peaks.tflops.get("tf32")
    if not single or not tf32:
        return None
    return tf32 / single if tf32 / single >= NO_TENSOR_CORES_GAIN else None
