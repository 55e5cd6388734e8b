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
