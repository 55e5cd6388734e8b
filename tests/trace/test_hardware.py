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
        # As the drivers' own tables and the file names of vLLM's and SGLang's tuned kernels write them.
        ("NVIDIA A100-PCIe-40GB", "A100", 312.0),
        ("NVIDIA A100 80GB PCIe", "A100", 312.0),
        ("NVIDIA A800 80GB PCIe LC", "A100", 312.0),
        ("NVIDIA_H100_80GB_HBM3", "H100 SXM", 989.4),
        ("NVIDIA H800", "H100 SXM", 989.4),
        ("NVIDIA H800 PCIe", "H100 PCIe", 756.0),
        ("NVIDIA GH200 144G HBM3e", "H100 SXM", 989.4),
        ("NVIDIA H20-3e", "H20", 148.0),
        ("AMD Instinct MI300X VF", "MI300X", 1307.4),
        ("AMD Instinct MI325X", "MI300X", 1307.4),
        ("AMD Instinct MI325 OAM", "MI300X", 1307.4),
        ("AMD Instinct MI300A", "MI300A", 980.6),
        ("AMD Instinct MI350X", "MI350X", 2300.0),
        ("NVIDIA A30 MIG 1g.6gb", "A30 (MIG 1g)", 165.0 / 4),
    ],
)
def test_names_as_drivers_give_them(name, model, bfloat16):
    peaks = peaks_of(name)
    assert peaks is not None
    assert (peaks.model, peaks.tflops["bfloat16"]) == (model, pytest.approx(bfloat16))


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("Tesla V100-SXM2-16GB", 125.0),
        ("Tesla V100-SXM3-32GB", 125.0),
        ("Tesla V100-DGXS-32GB", 125.0),
        ("Tesla V100-PCIE-32GB", 112.0),
        ("Tesla V100S-PCIE-32GB", 130.0),
        ("Tesla T4", 65.0),
    ],
)
def test_suffixes_of_older_devices(name: str, half: float) -> None:
    peaks = peaks_of(name)
    assert peaks is not None
    assert peaks.tflops["float16"] == half


@pytest.mark.parametrize(
    ("profile", "multiprocessors"), [("1g.5gb", 14), ("2g.10gb", 28), ("3g.20gb", 42), ("7g.40gb", 98)]
)
def test_a_mig_instance_has_the_peak_of_its_multiprocessors(profile: str, multiprocessors: int) -> None:
    peaks = peaks_of(f"NVIDIA A100-SXM4-40GB MIG {profile}")
    assert peaks is not None
    assert peaks.tflops["bfloat16"] == pytest.approx(312.0 * multiprocessors / 108)
    assert "MIG" in peaks.model


@pytest.mark.parametrize(
    "name",
    [
        "",
        "CPU",
        "NVIDIA A10G",
        "NVIDIA A100X",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA H100",
        "NVIDIA H100 64GB HBM2",
        "NVIDIA A800 40GB Active",
        "NVIDIA V100",
        "Tesla V100-SXM2-16GB-LS",
        "Tesla V100-SXM3-32GB-H",
        "NVIDIA L20",
        "NVIDIA B100",
        "NVIDIA GB10",
        "AMD Radeon Graphics",
        "AMD Instinct MI308X",
        "Quadro RTX 6000",
        "Intel(R) Arc(TM) Pro B60 Graphics",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
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
