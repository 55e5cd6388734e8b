"""Notices gradient accumulation: several backwards before an optimizer steps, with or without exchanging gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Accumulation:
    """Counts backwards between optimizer steps. Those inside an optimizer's step (closures) are none of it.

    ::

        B B B B O  B B B B O      4 in a row: accumulation over 4
        B D B G  B D B G          1 in a row: two optimizers in turn
        O(B B B)  O(B B)          none: the optimizer calls its closure
    """

    def __init__(self) -> None:
        self._runs: Counter[int] = Counter()
        self._run = 0
        self._optimizers = 0
        self._exchanging: Counter[bool] = Counter()

    def backward_begins(self) -> None:
        """An outermost backward begins."""
        if not self._optimizers:
            self._run += 1

    def optimizer_begins(self) -> None:
        """An outermost optimizer step begins."""
        self._optimizers += 1
        if self._run:
            self._runs[self._run] += 1
        self._run = 0

    def optimizer_ends(self) -> None:
        """It has ended."""
        self._optimizers -= 1

    def forward_begins(self, module: Any) -> None:
        """The model's forward begins: will the backward that follows exchange gradients?"""
        exchanges = exchanges_gradients(module)
        if exchanges is not None and not self._optimizers:
            self._exchanging[exchanges] += 1

    def settings(self) -> dict[str, Any]:
        """Backwards in a row (the commonest number) and whether some exchange nothing; empty without accumulation."""
        if not self._runs:
            return {}
        in_a_row = max(self._runs, key=lambda run: (self._runs[run], run))
        if in_a_row == 1:
            return {}
        settings: dict[str, Any] = {"backwards_per_step": in_a_row}
        if self._exchanging:
            settings["no_sync"] = self._exchanging[False] > 0
        return settings


def exchanges_gradients(module: Any) -> bool | None:
    """Will this wrapper's next backward exchange gradients? None where ``module`` is no data-parallel wrapper."""
    wrapped = getattr(module, "_modules", {}).get("_forward_module")  # what Lightning's Fabric wraps
    module = module if wrapped is None else wrapped
    held = vars(module)
    for name in ("require_backward_grad_sync", "_sync_gradients"):  # DDP; FSDP1
        if name in held:
            return bool(held[name])
    if not hasattr(type(module), "_get_fsdp_state"):
        return None
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return bool(groups[0].reduce_grads) if groups[0] is not None else None
