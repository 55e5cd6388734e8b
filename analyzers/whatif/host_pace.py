"""What a step takes at least: its host's own work, where that is not what changes."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.script import Script

_FULL_QUEUE_NS: Final = 1_000_000
"""A device this far behind its host may hold it back: launches return at once until a thousand of them are queued, and
those take longer than this. What the host then spends in launches is waiting."""


def keep_host_pace(script: Script, context: Context, times: float = 1.0) -> None:
    """The step gets no shorter than ``times`` what its host does in it; ranks at their peers' pace apart."""
    for rank in script.lines:
        if rank not in context.cured:
            floor = times * _host_busy_ns(context.result, rank)
            script.floor_step_ns[rank] = max(script.floor_step_ns.get(rank, 0.0), floor)


def _host_busy_ns(result: Comparison, rank: int) -> float:
    """Mean host time of one rank's step outside the loader and blocking calls; 0 where the device may hold it back, and
    on CPUs, whose own work is what the replay plays.
    """
    partial = result.partials[rank]
    if not partial.has_device_work:
        return 0.0
    chosen = partial.steps.indices_of(result.steps)
    progress = partial.progress
    behind = partial.steps.start_ns[chosen] - partial.steps.host_start_ns[chosen] - progress.lead_ns[chosen]
    return float(progress.host_busy_ns[chosen].mean()) if np.median(behind) < _FULL_QUEUE_NS else 0.0
