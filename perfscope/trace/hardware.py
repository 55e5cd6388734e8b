"""Peaks of devices, each with its source. An unknown device has no peak, never somebody else's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class DevicePeaks:
    """Dense peak throughput of one device (no sparsity), TFLOP/s by dtype as torch names it; ``tf32`` beside them."""

    pattern: str
    """Regular expression searched in the device's name; first match in ``DEVICES`` wins."""
    model: str
    tflops: dict[str, float]
    source: str


def _peaks(half: float, **others: float) -> dict[str, float]:
    return {"float16": half, "bfloat16": half, **others}


_FP8: Final = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def _with_fp8(half: float, fp8: float, **others: float) -> dict[str, float]:
    return {**_peaks(half, **others), **dict.fromkeys(_FP8, fp8), "int8": fp8}


DEVICES: Final = (
    # Within a family the special form stands before the general one: names are matched in this order.
    DevicePeaks(
        r"\bV100\b.*SXM|\bV100-SXM",
        "V100 SXM",
        {"float16": 125.0, "float32": 15.7, "float64": 7.8},
        "NVIDIA V100 datasheet (2020)",
    ),
    DevicePeaks(
        r"\bV100\b.*PCI",
        "V100 PCIe",
        {"float16": 112.0, "float32": 14.0, "float64": 7.0},
        "NVIDIA V100 datasheet (2020)",
    ),
    DevicePeaks(r"\bT4\b", "T4", {"float16": 65.0, "float32": 8.1, "int8": 130.0}, "NVIDIA T4 datasheet"),
    DevicePeaks(r"\bA10\b", "A10", _peaks(125.0, tf32=62.5, float32=31.2, int8=250.0), "NVIDIA A10 datasheet"),
    DevicePeaks(r"\bA30\b", "A30", _peaks(165.0, tf32=82.0, float32=10.3, int8=330.0), "NVIDIA A30 datasheet"),
    DevicePeaks(r"\bA40\b", "A40", _peaks(149.7, tf32=74.8, float32=37.4, int8=299.3), "NVIDIA A40 datasheet"),
    DevicePeaks(
        # The A100 with 64 GB was made for one supercomputer, with more multiprocessors.
        r"\bA(100|800)\b(?!.*64GB)",
        "A100",
        _peaks(312.0, tf32=156.0, float32=19.5, float64=19.5, int8=624.0),
        "NVIDIA A100 datasheet; the A800 differs in its links",
    ),
    DevicePeaks(
        r"\bRTX A6000\b", "RTX A6000", _peaks(154.8, tf32=77.4, float32=38.7, int8=309.7), "NVIDIA RTX A6000 datasheet"
    ),
    DevicePeaks(
        r"\bRTX 6000 Ada\b",
        "RTX 6000 Ada",
        _with_fp8(364.2, 728.5, tf32=182.1, float32=91.1),
        "NVIDIA RTX 6000 Ada datasheet",
    ),
    DevicePeaks(r"\bL4\b", "L4", _with_fp8(121.0, 242.0, tf32=60.0, float32=30.3), "NVIDIA L4 datasheet"),
    DevicePeaks(r"\bL40\b", "L40", _with_fp8(181.0, 362.0, tf32=90.5, float32=90.5), "NVIDIA L40 datasheet"),
    DevicePeaks(r"\bL40S\b", "L40S", _with_fp8(362.0, 733.0, tf32=183.0, float32=91.6), "NVIDIA L40S datasheet"),
    DevicePeaks(
        r"\bH100\b.*PCI", "H100 PCIe", _with_fp8(756.0, 1513.0, tf32=378.0, float32=51.0), "NVIDIA H100 datasheet"
    ),
    DevicePeaks(
        r"\bH100\b.*NVL", "H100 NVL", _with_fp8(835.5, 1671.0, tf32=417.5, float32=60.0), "NVIDIA H100 NVL datasheet"
    ),
    DevicePeaks(
        r"\bH[18]00\b.*HBM3|\bH[18]00\b.*SXM|\bGH200\b",
        "H100 SXM",
        _with_fp8(989.4, 1979.0, tf32=494.7, float32=67.0, float64=67.0),
        "NVIDIA H100 datasheet; GH200 carries the same GPU, the H800 differs in its links",
    ),
    DevicePeaks(
        r"\bH200\b.*NVL", "H200 NVL", _with_fp8(835.5, 1671.0, tf32=417.5, float32=60.0), "NVIDIA H200 datasheet"
    ),
    DevicePeaks(r"\bH200\b", "H200 SXM", _with_fp8(989.4, 1979.0, tf32=494.7, float32=67.0), "NVIDIA H200 datasheet"),
    DevicePeaks(r"\bH20\b", "H20", _with_fp8(148.0, 296.0, tf32=74.0), "published by resellers; no NVIDIA datasheet"),
    DevicePeaks(
        r"\bGB200\b", "GB200", _with_fp8(2500.0, 5000.0, tf32=1250.0, float32=80.0), "NVIDIA GB200 NVL72 datasheet"
    ),
    DevicePeaks(
        r"\bB200\b", "B200", _with_fp8(2250.0, 4500.0, tf32=1125.0, float32=75.0), "NVIDIA Blackwell datasheet"
    ),
    DevicePeaks(r"\bMI210\b", "MI210", _peaks(181.0, float32=45.3, int8=181.0), "AMD Instinct MI210 datasheet"),
    DevicePeaks(
        r"\bMI250\b",
        "MI250 (one GCD)",
        _peaks(181.0, float32=45.3, int8=181.0),
        "AMD Instinct MI250 datasheet, per GCD; float32 by its matrix cores",
    ),
    DevicePeaks(
        r"\bMI250X\b",
        "MI250X (one GCD)",
        _peaks(191.5, float32=47.9, int8=191.5),
        "AMD Instinct MI250X datasheet, per GCD; float32 by its matrix cores",
    ),
    DevicePeaks(
        r"\bMI300X\b|\bMI325X\b", "MI300X", _with_fp8(1307.4, 2614.9, tf32=653.7, float32=163.4), "AMD datasheets"
    ),
    DevicePeaks(r"\bMI350X\b", "MI350X", _with_fp8(2300.0, 4600.0), "AMD Instinct MI350X datasheet"),
    DevicePeaks(r"\bMI355X\b", "MI355X", _with_fp8(2500.0, 5000.0), "AMD Instinct MI355X datasheet"),
    DevicePeaks(
        r"\bRTX 3090\b(?! Ti)",
        "RTX 3090",
        _peaks(71.0, tf32=35.6, float32=35.6),
        "NVIDIA GA102 whitepaper, fp32 accumulate",
    ),
    DevicePeaks(
        r"\bRTX 4090\b(?! D)",
        "RTX 4090",
        _with_fp8(165.2, 330.3, tf32=82.6, float32=82.6),
        "NVIDIA Ada whitepaper, fp32 accumulate",
    ),
)


_PART: Final = re.compile(r"\bMIG\b|\bvGPU\b|\bGRID\b")
"""Names of parts of a device, whose peak is a part of its."""


def peaks_of(device_name: str) -> DevicePeaks | None:
    """The peaks of a device by the name its driver gives it; None when it is not in the table."""
    if _PART.search(device_name):
        return None
    for device in DEVICES:
        if re.search(device.pattern, device_name):
            return device
    return None
