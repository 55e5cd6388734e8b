"""Gradient accumulation, detected from the order of backwards and optimizer steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from perfscope.collectors.ranges.accumulation import Accumulation, exchanges_gradients


def settings_of(events: str) -> dict[str, object]:
    """``B``: a backward begins; ``f``, ``F``: DDP's forward without and with exchange; ``(`` ``)``: an optimizer."""
    accumulation = Accumulation()
    for event in events:
        if event == "B":
            accumulation.backward_begins()
        elif event in "fF":
            accumulation.forward_begins(SimpleNamespace(require_backward_grad_sync=event == "F"))
        elif event == "(":
            accumulation.optimizer_begins()
        elif event == ")":
            accumulation.optimizer_ends()
    return accumulation.settings()


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param("B()" * 5, {}, id="plain"),
        pytest.param("BBBB()" * 5, {"backwards_per_step": 4}, id="single process"),
        pytest.param("fBfBfBFB()" * 5, {"backwards_per_step": 4, "no_sync": True}, id="without exchanging"),
        pytest.param("FBFB()" * 5, {"backwards_per_step": 2, "no_sync": False}, id="exchanging each time"),
        pytest.param("BB()()" * 5, {"backwards_per_step": 2}, id="two optimizers, one after the other"),
        pytest.param("B()B()" * 5, {}, id="two optimizers in turn"),
        pytest.param("(BB)(BBB)" * 5, {}, id="closures"),
        pytest.param("B()()()" * 5, {}, id="optimizers within the backward"),
        pytest.param("BBBB()" * 5 + "BB()", {"backwards_per_step": 4}, id="a last, shorter step"),
        pytest.param("BBBB", {}, id="no optimizer"),
        pytest.param("", {}, id="nothing"),
    ],
)
def test_accumulation_is_backwards_in_a_row(events: str, expected: dict[str, object]) -> None:
    assert settings_of(events) == expected


def test_a_wrapper_whose_module_has_no_length_or_none_is_looked_into() -> None:
    class Wrapped(SimpleNamespace):
        def __len__(self) -> int:
            raise TypeError("has no length")

    inner = Wrapped(require_backward_grad_sync=False)
    assert exchanges_gradients(SimpleNamespace(_modules={"_forward_module": inner})) is False
