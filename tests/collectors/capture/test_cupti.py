"""CUPTI is detached as the last capture stops, and only where Kineto can attach it again."""

from __future__ import annotations

import os

import pytest

from perfscope.collectors.capture import cupti


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that uses a device, with CUDA 12.6, and no variable of the user's."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setenv(cupti.VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(cupti.VARIABLE)
    return monkeypatch


@pytest.mark.parametrize("version", ["12.6", "12.10", "13.0"])
def test_kineto_is_asked_to_detach_cupti(on_cuda: pytest.MonkeyPatch, version: str) -> None:
    on_cuda.setattr("torch.version.cuda", version)
    cupti.detach_at_stop()
    assert os.environ[cupti.VARIABLE] == "1"


@pytest.mark.parametrize("version", ["11.8", "12.5", None])
def test_an_older_cuda_keeps_it(on_cuda: pytest.MonkeyPatch, version: str | None) -> None:
    on_cuda.setattr("torch.version.cuda", version)
    cupti.detach_at_stop()
    assert cupti.VARIABLE not in os.environ


def test_a_process_without_a_device_is_left_alone(on_cuda: pytest.MonkeyPatch) -> None:
    on_cuda.setattr("torch.cuda.is_initialized", lambda: False)
    cupti.detach_at_stop()
    assert cupti.VARIABLE not in os.environ


@pytest.mark.parametrize("chosen", ["0", "1"])
def test_what_the_user_or_torch_has_chosen_stays(on_cuda: pytest.MonkeyPatch, chosen: str) -> None:
    on_cuda.setenv(cupti.VARIABLE, chosen)
    cupti.detach_at_stop()
    assert os.environ[cupti.VARIABLE] == chosen
