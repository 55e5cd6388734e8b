"""Peaks of devices, each with its source. An unknown device has no peak, never somebody else's."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from perfscope.frozen import dataclass


@dataclass(frozen=True)
class DevicePeaks:
    """Dense peak throughput of one device (no sparsity), TFLOP/s by dtype as torch names it; ``tf32`` beside them."""

    pattern: str
    """Regular expression that must match the whole of the device's name, as ``_plain`` writes it."""
    model: str
    tflops: dict[str, float]
    source: str


def _peaks(half: float, **others: float) -> dict[str, float]:
    return {"float16": half, "bfloat16": half, **others}


_FP8: Final = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def _with_fp8(half: float, fp8: float, **others: float) -> dict[str, float]:
    return {**_peaks(half, **others), **dict.fromkeys(_FP8, fp8), "int8": fp8}


DEVICES: Final = (
    DevicePeaks(
        r"V100 (SXM[23]|DGXS)",
        "V100 SXM",
        {"float16": 125.0, "float32": 15.7, "float64": 7.8},
        "NVIDIA V100 datasheet (2020); DGX Station and DGX-2 datasheets: 500 and 2000 TFLOPS of 4 and 16",
    ),
    DevicePeaks(
        r"V100S PCIE",
        "V100S PCIe",
        {"float16": 130.0, "float32": 16.4, "float64": 8.2},
        "NVIDIA V100 datasheet (2020)",
    ),
    DevicePeaks(
        r"V100 PCIE",
        "V100 PCIe",
        {"float16": 112.0, "float32": 14.0, "float64": 7.0},
        "NVIDIA V100 datasheet (2020)",
    ),
    DevicePeaks(r"T4", "T4", {"float16": 65.0, "float32": 8.1, "int8": 130.0}, "NVIDIA T4 datasheet"),
    DevicePeaks(r"A10", "A10", _peaks(125.0, tf32=62.5, float32=31.2, int8=250.0), "NVIDIA A10 datasheet"),
    DevicePeaks(r"A30", "A30", _peaks(165.0, tf32=82.0, float32=10.3, int8=330.0), "NVIDIA A30 datasheet"),
    DevicePeaks(r"A40", "A40", _peaks(149.7, tf32=74.8, float32=37.4, int8=299.3), "NVIDIA A40 datasheet"),
    DevicePeaks(
        # A100-SXM-64GB, without the 4, was made for one supercomputer, with more multiprocessors.
        r"A[18]00( SXM4| PCIE| PG509 200)?",
        "A100",
        _peaks(312.0, tf32=156.0, float32=19.5, float64=19.5, int8=624.0),
        "NVIDIA A100 datasheet; the A800 differs in its links",
    ),
    DevicePeaks(
        r"RTX A6000", "RTX A6000", _peaks(154.8, tf32=77.4, float32=38.7, int8=309.7), "NVIDIA RTX A6000 datasheet"
    ),
    DevicePeaks(
        r"RTX 6000 ADA( GENERATION)?",
        "RTX 6000 Ada",
        _with_fp8(364.2, 728.5, tf32=182.1, float32=91.1),
        "NVIDIA RTX 6000 Ada datasheet",
    ),
    DevicePeaks(r"L4", "L4", _with_fp8(121.0, 242.0, tf32=60.0, float32=30.3), "NVIDIA L4 datasheet"),
    DevicePeaks(r"L40", "L40", _with_fp8(181.0, 362.0, tf32=90.5, float32=90.5), "NVIDIA L40 datasheet"),
    DevicePeaks(r"L40S", "L40S", _with_fp8(362.0, 733.0, tf32=183.0, float32=91.6), "NVIDIA L40S datasheet"),
    DevicePeaks(
        r"H[18]00 PCIE", "H100 PCIe", _with_fp8(756.0, 1513.0, tf32=378.0, float32=51.0), "NVIDIA H100 datasheet"
    ),
    DevicePeaks(
        r"H[18]00 NVL", "H100 NVL", _with_fp8(835.5, 1671.0, tf32=417.5, float32=60.0), "NVIDIA H100 NVL datasheet"
    ),
    DevicePeaks(
        # "H100" alone may be any of its forms; the H800 with NVLink has no other name.
        r"H[18]00( SXM5?| HBM3)+|H800|GH200( HBM3E?)?",
        "H100 SXM",
        _with_fp8(989.4, 1979.0, tf32=494.7, float32=67.0, float64=67.0),
        "NVIDIA H100 datasheet; GH200 carries the same GPU, the H800 differs in its links",
    ),
    DevicePeaks(r"H200 NVL", "H200 NVL", _with_fp8(835.5, 1671.0, tf32=417.5, float32=60.0), "NVIDIA H200 datasheet"),
    DevicePeaks(
        r"H200( SXM5?| HBM3E)*", "H200 SXM", _with_fp8(989.4, 1979.0, tf32=494.7, float32=67.0), "NVIDIA H200 datasheet"
    ),
    DevicePeaks(
        r"H20( 3E| HBM3E?)?", "H20", _with_fp8(148.0, 296.0, tf32=74.0), "published by resellers; no NVIDIA datasheet"
    ),
    DevicePeaks(
        r"GB200", "GB200", _with_fp8(2500.0, 5000.0, tf32=1250.0, float32=80.0), "NVIDIA GB200 NVL72 datasheet"
    ),
    DevicePeaks(
        r"B200( SXM6?)?", "B200", _with_fp8(2250.0, 4500.0, tf32=1125.0, float32=75.0), "NVIDIA Blackwell datasheet"
    ),
    DevicePeaks(
        r"B300( SXM6)?( AC)?", "B300", _with_fp8(2250.0, 4500.0, tf32=1125.0, float32=75.0), "NVIDIA HGX B300 datasheet"
    ),
    DevicePeaks(
        r"MI100",
        "MI100",
        {"float16": 184.6, "bfloat16": 92.3, "float32": 46.1, "int8": 184.6},
        "AMD Instinct MI100 datasheet; float32 by its matrix cores",
    ),
    DevicePeaks(r"MI210", "MI210", _peaks(181.0, float32=45.3, int8=181.0), "AMD Instinct MI210 datasheet"),
    DevicePeaks(
        r"MI250",
        "MI250 (one GCD)",
        _peaks(181.0, float32=45.3, int8=181.0),
        "AMD Instinct MI250 datasheet, per GCD; float32 by its matrix cores",
    ),
    DevicePeaks(
        r"MI250X",
        "MI250X (one GCD)",
        _peaks(191.5, float32=47.9, int8=191.5),
        "AMD Instinct MI250X datasheet, per GCD; float32 by its matrix cores",
    ),
    DevicePeaks(
        # VF: the whole device, as a virtual machine sees it.
        r"(MI300X|MI325X?)( OAM| VF)?",
        "MI300X",
        _with_fp8(1307.4, 2614.9, tf32=653.7, float32=163.4),
        "AMD datasheets",
    ),
    DevicePeaks(
        r"MI300A", "MI300A", _with_fp8(980.6, 1961.2, tf32=490.3, float32=122.6), "AMD Instinct MI300A datasheet"
    ),
    DevicePeaks(r"MI350X?( OAM| VF)?", "MI350X", _with_fp8(2300.0, 4600.0), "AMD Instinct MI350X datasheet"),
    DevicePeaks(r"MI355X?( OAM| VF)?", "MI355X", _with_fp8(2500.0, 5000.0), "AMD Instinct MI355X datasheet"),
    DevicePeaks(
        r"RTX 3090",
        "RTX 3090",
        _peaks(71.0, tf32=35.6, float32=35.6),
        "NVIDIA GA102 whitepaper, fp32 accumulate",
    ),
    DevicePeaks(
        r"RTX 5090",
        "RTX 5090",
        _with_fp8(209.5, 419.0, tf32=104.8, float32=104.8),
        "NVIDIA RTX Blackwell whitepaper, fp32 accumulate",
    ),
    DevicePeaks(
        r"RTX 4090",
        "RTX 4090",
        _with_fp8(165.2, 330.3, tf32=82.6, float32=82.6),
        "NVIDIA Ada whitepaper, fp32 accumulate",
    ),
)


_MAKERS: Final = re.compile(r"\b(NVIDIA|TESLA|GEFORCE|AMD|INSTINCT)\b")
_MEMORY: Final = re.compile(r"\b\d+ ?GB?\b|\bLC\b")
"""Words that change no peak: the memory's size (its kind may name the form), liquid cooling."""

_SLICES: Final = re.compile(r" MIG (\d)G \d+GB(\+ME)?$")
_SLICE_OF: Final = {"A100": 14 / 108, "A30": 14 / 56}
"""Share of the multiprocessors in one compute slice of a MIG instance (NVIDIA MIG user guide; nvidia-smi mig -lgip).
The slices of other devices differ in size."""


def peaks_of(device_name: str) -> DevicePeaks | None:
    """The peaks of a device by the name its driver gives it; None when it is not in the table.

    Every word of the name must be known: a ``Laptop GPU``, a ``D``, a part of a device (vGPU) is another device. A MIG
    instance has its slices' share of the peaks.
    """
    text = " ".join(re.sub(r"[-_./]", " ", device_name.upper()).split())
    instance = _SLICES.search(text)
    words = _plain(_SLICES.sub("", text))
    whole = next((device for device in DEVICES if re.fullmatch(device.pattern, words)), None)
    if whole is None or instance is None:
        return whole
    if whole.model not in _SLICE_OF:
        return None
    share = int(instance[1]) * _SLICE_OF[whole.model]
    return replace(
        whole,
        model=f"{whole.model} (MIG {instance[1]}g)",
        tflops={dtype: share * peak for dtype, peak in whole.tflops.items()},
    )


def _plain(name: str) -> str:
    """``NVIDIA A100-SXM4-80GB`` as ``A100 SXM4``."""
    return " ".join(_MEMORY.sub("", _MAKERS.sub("", name)).split())
