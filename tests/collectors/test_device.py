"""What is asked of a device and of its allocator."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from perfscope.collectors.device import DeviceProbe, device_types, devices, memory_counts
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


class Held:
    """A model with a parameter on each of these devices, without the devices."""

    def __init__(self, *names: str) -> None:
        import torch

        self._parameters = [SimpleNamespace(device=torch.device(name)) for name in names]

    def parameters(self) -> list[SimpleNamespace]:
        return self._parameters


@needs_torch
def test_the_probe_waits_for_the_rank_s_own_devices_and_for_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On its thread another device is current, as on every new thread."""
    import torch

    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index=0: waited.append(index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    assert devices([Held("cuda:3", "cuda:2", "cpu")]) == [("cuda", 2), ("cuda", 3)]
    assert DeviceProbe(devices([Held("cuda:3")])).idle()
    assert waited == [3]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert devices([Held("cpu")]) == [("cuda", 5)], "offloaded parameters"


@needs_torch
def test_a_type_with_one_device_is_waited_for_without_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    waited: list[str] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    assert DeviceProbe([("mps", None)]).idle()
    assert waited == ["mps"]
    assert DeviceProbe(devices([Held("cpu")])).idle()
