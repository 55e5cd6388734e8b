"""Published dense peaks of devices, TFLOP/s, from the makers' data sheets, apart from the product's table."""

from __future__ import annotations

from typing import Final

PUBLISHED: Final[dict[str, dict[str, float]]] = {
    # Part of the device's name: precision -> TFLOP/s without sparsity. The first part that matches counts.
    "B200": {"bf16": 2250.0, "tf32": 1125.0, "fp32": 75.0},
    "H100 PCIe": {"bf16": 756.5, "tf32": 378.0, "fp32": 51.2},
    "H100 NVL": {"bf16": 835.5, "tf32": 417.5, "fp32": 60.0},
    "H100": {"bf16": 989.5, "tf32": 494.7, "fp32": 66.9},
    "H200": {"bf16": 989.5, "tf32": 494.7, "fp32": 66.9},
    "A100": {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5},
    "L40S": {"bf16": 362.0, "tf32": 183.0, "fp32": 91.6},
    "L4": {"bf16": 121.0, "tf32": 60.0, "fp32": 30.3},
    "RTX 4090": {"bf16": 165.2, "tf32": 82.6, "fp32": 82.6},
}


def published(device: str, precision: str) -> float | None:
    """TFLOP/s of the device, None where it is not in the table."""
    for name, peaks in PUBLISHED.items():
        if name in device:
            return peaks[precision]
    return None
