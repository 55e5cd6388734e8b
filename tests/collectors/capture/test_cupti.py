"""CUPTI is detached after the last capture, where Kineto can attach it again, and never between two."""

from __future__ import annotations

import os

import pytest

from perfscope.collectors.capture.cupti import VARIABLE, stopping


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that uses a device, with CUDA 12.6, and no variable of the user's."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(VARIABLE)
    return monkeypatch


def seen(*, last: bool) -> tuple[str | None, str | None]:
    """What Kineto finds while the profiler stops, and what the training finds after it."""
    with stopping(last=last):
        inside = os.environ.get(VARIABLE)
    return inside, os.environ.get(VARIABLE)


@pytest.mark.parametrize("version", ["12.6", "12.10", "13.0"])
def test_it_is_detached_after_the_last_capture(on_cuda: pytest.MonkeyPatch, version: str) -> None:
    """The variable stays: with it Kineto attaches CUPTI again for a capture that somebody asks for."""
    on_cuda.setattr("torch.version.cuda", version)
    assert seen(last=True) == ("1", "1")


@pytest.mark.parametrize("version", ["11.8", "12.5", None])
def test_an_older_cuda_keeps_it(on_cuda: pytest.MonkeyPatch, version: str | None) -> None:
    on_cuda.setattr("torch.version.cuda", version)
    assert seen(last=True) == (None, None)


@pytest.mark.parametrize("chosen", [None, "0", "1"])
def test_it_is_kept_between_two_captures(on_cuda: pytest.MonkeyPatch, chosen: str | None) -> None:
    """The next one begins at once, before any call of CUDA."""
    if chosen is not None:
        on_cuda.setenv(VARIABLE, chosen)
    assert seen(last=False) == ("0", chosen)


def test_captures_that_are_asked_for_follow_the_same_rule(on_cuda: pytest.MonkeyPatch) -> None:
    assert seen(last=True) == ("1", "1")
    assert seen(last=False) == ("0", "1")
    assert seen(last=True) == ("1", "1")


@pytest.mark.parametrize("last", [True, False])
def test_a_process_without_a_device_is_left_alone(on_cuda: pytest.MonkeyPatch, last: bool) -> None:
    on_cuda.setattr("torch.cuda.is_initialized", lambda: False)
    assert seen(last=last) == (None, None)


@pytest.mark.parametrize("chosen", ["0", "1"])
def test_what_the_user_or_torch_has_chosen_holds_after_the_last(on_cuda: pytest.MonkeyPatch, chosen: str) -> None:
    on_cuda.setenv(VARIABLE, chosen)
    assert seen(last=True) == (chosen, chosen)


def test_an_error_while_it_stops_leaves_the_variable_as_it_was(on_cuda: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError), stopping(last=False):
        raise RuntimeError
    assert VARIABLE not in os.environ
