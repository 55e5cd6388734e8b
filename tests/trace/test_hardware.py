"""Peak FLOPS by device name."""

from __future__ import annotations

import pytest

from perfscope.trace.hardware import DEVICES, peaks_of


@pytest.mark.parametrize(
    ("name", "model", "bfloat16"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100", 312.0),
        ("NVIDIA A100-PG509-200", "A100", 312.0),
        ("NVIDIA A10", "A10", 125.0),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.4),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", "H100 NVL", 835.5),
        ("NVIDIA GH200 480GB", "H100 SXM", 989.4),
        ("NVIDIA H200", "H200 SXM", 989.4),
        ("NVIDIA H200 NVL", "H200 NVL", 835.5),
        ("NVIDIA H20", "H20", 148.0),
        ("NVIDIA L4", "L4", 121.0),
        ("NVIDIA L40", "L40", 181.0),
        ("NVIDIA L40S", "L40S", 362.0),
        ("NVIDIA B200", "B200", 2250.0),
        ("NVIDIA GB200", "GB200", 2500.0),
        ("NVIDIA A800-SXM4-80GB", "A100", 312.0),
        ("NVIDIA A30", "A30", 165.0),
        ("NVIDIA A40", "A40", 149.7),
        ("NVIDIA RTX A6000", "RTX A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 364.2),
        ("AMD Instinct MI300X", "MI300X", 1307.4),
        ("AMD Instinct MI210", "MI210", 181.0),
        ("AMD Instinct MI250", "MI250 (one GCD)", 181.0),
        ("AMD Instinct MI250X", "MI250X (one GCD)", 191.5),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 165.2),
    ],
)
def test_names_as_drivers_give_them(name, model, bfloat16):
    peaks = peaks_of(name)
    assert peaks is not None
    assert (peaks.model, peaks.tflops["bfloat16"]) == (model, bfloat16)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "CPU",
        "NVIDIA A10G",
        "NVIDIA A100X",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "GRID A100D-20C",
        "NVIDIA L40G",
        "AMD Instinct MI200",
        "NVIDIA GeForce RTX 4090 D",
    ],
)
def test_no_device_gets_another_one_s_peak(name):
    assert peaks_of(name) is None


def test_v100_has_no_bfloat16_and_every_peak_has_a_source():
    peaks = peaks_of("Tesla V100-SXM2-16GB")
    assert peaks is not None
    assert not {"bfloat16", "tf32"} & peaks.tflops.keys()
    assert all(device.source and all(value > 0 for value in device.tflops.values()) for device in DEVICES)
