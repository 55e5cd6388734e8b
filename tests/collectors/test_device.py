"""What is asked of a device and of its allocator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from perfscope.collectors.device import device_types, memory_counts
from perfscope.recording.metadata import DeviceMetadata
from tests.collectors.harness import needs_torch

STATS = {
    "reserved_bytes.all.peak": 4096,
    "allocated_bytes.all.peak": 3072,
    "num_alloc_retries": 3,
    "num_ooms": 0,
}


def library(stats: dict[str, int]) -> SimpleNamespace:
    """Stands in for ``torch.cuda``."""
    return SimpleNamespace(memory_stats=lambda index: stats if index == 1 else {})


def test_the_allocator_s_counts_become_the_record_s_fields() -> None:
    counts = memory_counts(library(STATS), 1)
    assert counts == {"peak_bytes": 4096, "allocated_peak_bytes": 3072, "allocation_retries": 3}
    assert DeviceMetadata(type="cuda", **counts).allocation_retries == 3


def test_what_an_allocator_does_not_count_is_left_out() -> None:
    assert memory_counts(library(STATS), 0) == {}
    assert memory_counts(SimpleNamespace(), 0) == {}
    assert memory_counts(library({"num_alloc_retries": 0}), 1) == {"allocation_retries": 0}


def test_torch_counts_under_these_names() -> None:
    """The documented keys; the counts themselves need a device."""
    torch = pytest.importorskip("torch")
    documented = torch.cuda.memory_stats.__doc__
    for key in ("num_alloc_retries", "allocated_bytes.{all,large_pool,small_pool}", "reserved_bytes.{all,large_pool"):
        assert key in documented


@pytest.mark.gpu
def test_on_a_device() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    held = torch.ones(1 << 20, device="cuda")
    counts = memory_counts(torch.cuda, held.device.index)
    assert counts["peak_bytes"] >= counts["allocated_peak_bytes"] >= held.nbytes
    assert counts["allocation_retries"] >= 0


@needs_torch
def test_offloaded_parameters_are_on_the_devices_that_the_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    model = torch.nn.Linear(2, 2)
    assert device_types([model]) == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert device_types([model]) == ["cuda"]
