"""The simulator's FSDP made worse or better by hand: patches to simulate under."""

from __future__ import annotations

from typing import Any

import pytest

from tests.generator.fsdp import FullyShardedDataParallel as Fsdp


def gathers_late(patch: pytest.MonkeyPatch) -> None:
    """Each layer's parameters are gathered when it needs them."""

    def forward(self: Any, layer: int) -> Any:
        if layer:
            self.gather(layer)
        yield from self.gathered(layer)
        yield from self.forward_layer()

    def backward(self: Any, layer: int, *, reduce: bool) -> Any:
        self.gather(layer)
        yield from self.gathered(layer)
        yield from self.backward_layer()
        if reduce:
            self._reduce()

    patch.setattr(Fsdp, "forward", forward)
    patch.setattr(Fsdp, "backward", backward)


def _last_stays(gathered_ahead: int) -> Any:
    """A backward that gathers each layer, but for the last, so many layers ahead."""

    def backward(self: Any, layer: int, *, reduce: bool) -> Any:
        if layer - gathered_ahead != self.layers - 1:
            self.gather(layer - gathered_ahead)
        yield from self.gathered(layer)
        yield from self.backward_layer()
        if reduce:
            self._reduce()

    return backward


def keeps_the_last(patch: pytest.MonkeyPatch) -> None:
    """FSDP2's default: the last layer's parameters stay for its backward."""
    patch.setattr(Fsdp, "backward", _last_stays(1))


def gathers_late_but_the_last(patch: pytest.MonkeyPatch) -> None:
    """The same with each layer gathered when it needs its parameters."""
    gathers_late(patch)
    patch.setattr(Fsdp, "backward", _last_stays(0))


def keeps_parameters(patch: pytest.MonkeyPatch) -> None:
    """``reshard_after_forward=False``."""

    def backward(self: Any, _layer: int, *, reduce: bool) -> Any:
        yield from self.backward_layer()
        if reduce:
            self._reduce()

    patch.setattr(Fsdp, "backward", backward)


def waits_for_reductions(patch: pytest.MonkeyPatch) -> None:
    """Nothing is computed while gradients are reduced."""
    before = Fsdp.backward

    def backward(self: Any, layer: int, *, reduce: bool) -> Any:
        yield from before(self, layer, reduce=reduce)
        yield from self.after_microbatch()

    patch.setattr(Fsdp, "backward", backward)
