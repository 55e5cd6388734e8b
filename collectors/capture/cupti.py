"""CUPTI after the last capture.

Kineto leaves CUPTI attached to the process when a profiler stops, and every call that launches work stays slower, in
steps that nobody profiles. With ``TEARDOWN_CUPTI=1`` in the environment Kineto detaches CUPTI at the next CUDA call
after a profiler's stop, and attaches it again as the next one starts (Kineto's CuptiActivityApi.cpp).
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Final

VARIABLE: Final = "TEARDOWN_CUPTI"
"""Kineto's own. Set by the user or by torch, to 0 or 1, it stays as it is."""
_SAFE: Final = (12, 6)
"""CUDA version from which CUPTI can be attached again in a process with CUDA graphs (pytorch#146604)."""


def detach_at_stop() -> None:
    """Have CUPTI detached when the profiler that runs now stops. For the last planned capture: a profiler that starts
    before the next CUDA call would wait for a detaching that never comes (kineto#1554).

    Nothing is done without a CUDA device in use, with CUDA before 12.6, and where the variable is set.
    """
    torch: Any = importlib.import_module("torch")
    if VARIABLE not in os.environ and torch.cuda.is_initialized() and _version(torch.version.cuda) >= _SAFE:
        os.environ[VARIABLE] = "1"  # it stays: Kineto reads it again to attach CUPTI


def _version(text: str | None) -> tuple[int, ...]:
    """``12.6`` as (12, 6); empty where torch is not built for CUDA."""
    return tuple(int(part) for part in (text or "").split(".") if part.isdecimal())
