"""Which kernels are worth a look, and why, in a phrase. The thresholds are in ``docs/metrics.md`` too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from perfscope.analyzers.work.kernel_classes import COPY, PRODUCTS, class_of_kernel
from perfscope.hardware import DevicePeaks
from perfscope.summary_tables import KernelRow

LOW_PEAK: Final = 0.3
"""Products below this share of the peak: large ones reach 0.6 to 0.8, memory-bound ones less."""
LOW_PEAK_SHARE: Final = 0.05
"""Share of the device's work from which a low share of the peak matters."""
NO_TENSOR_CORES_SHARE: Final = 0.02
NO_TENSOR_CORES_GAIN: Final = 1.5
"""TF32's peak over single precision's, from which it is worth to mention."""
SHORT_US: Final = 5.0
SHORT_COUNT: Final = 100
SHORT_SHARE: Final = 0.01
"""Launches hardly longer than a launch call, at least so many a step, with at least this share of the work."""
SLOW_RANK: Final = 1.15
SLOW_RANK_SHARE: Final = 0.02
"""A rank's mean over the median of the ranks' means, for a kernel with at least this share of the work."""
COPY_SHARE: Final = 0.03
PAGEABLE_SHARE: Final = 0.01


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
        yield f"{row.count_per_step:.0f} launches a step of {row.mean_us:.1f} µs each: fusing or CUDA graphs would help"
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
