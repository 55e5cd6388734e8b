"""What compiling took of this process: torch's own timers, read."""

from __future__ import annotations

import sys
from typing import Any, Final

from perfscope.recording.compiled import CompileCost

_WHOLE: Final = ("_compile.compile_inner", "backward._backward_impl")
"""A frame with its forward; a backward that is compiled when it is first called."""
_INDUCTOR: Final = "compile_fx_inner"


def compile_cost() -> CompileCost | None:
    """Sums of the timers; None where this torch has none, or nothing was compiled."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    timers: dict[str, list[float]] = dict(getattr(utils, "compilation_time_metrics", {}))
    inductor = timers.get(_INDUCTOR, [])
    if not inductor:
        return None
    whole = sum(sum(timers.get(name, ())) for name in _WHOLE)
    return CompileCost(whole_s=float(whole), inductor_s=float(sum(inductor)), graphs=len(inductor))
