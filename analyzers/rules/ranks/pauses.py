"""Whether ranks pause together or in turn: what all do in the same steps is no turn, whoever takes longest."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np

from perfscope.analyzers.rules.context import RuleContext
from perfscope.trace.trace import Float64

_AS_LONG: Final = 0.5
"""Part of the longest pause of a step from which another rank pauses in it, too."""
_TOGETHER: Final = 0.5
"""Share of the ranks above which they pause together, not in turn: the mean over the steps, by their longest pauses."""


_NEARLY_ALL: Final = 0.9
"""Share of the pauses that lies in a few steps, from which these are named."""
_FEW: Final = 0.5
"""Share of the steps below which they are few."""


def pausing_steps(job: RuleContext, ranks: Collection[int]) -> int | None:
    """In how many of the steps these ranks pause, where that is in few of them; None where it is in most, or not known.

    Example: a checkpoint of 60 ms in 2 of 12 steps beside pauses of 0.1 ms in all.
    """
    pauses = _pauses_us(job, ranks)
    if not pauses.any():
        return None
    longest = np.sort(pauses.max(axis=0))[::-1]
    few = int(np.searchsorted(np.cumsum(longest), _NEARLY_ALL * longest.sum())) + 1
    return few if few < _FEW * len(longest) else None


def pause_together(job: RuleContext, ranks: Collection[int]) -> bool:
    """Do most of these ranks pause in the same steps? Not where it is not known when they pause."""
    pauses = _pauses_us(job, ranks)
    if len(pauses) < 2 or not pauses.any():
        return False
    longest = pauses.max(axis=0)
    pausing = (pauses >= _AS_LONG * longest).mean(axis=0)
    return float(np.average(pausing, weights=longest)) > _TOGETHER


def _pauses_us(job: RuleContext, ranks: Collection[int]) -> Float64:
    """Pauses of these ranks (lines) in each step, µs; empty where it is not known when they pause."""
    return np.array([job.per_step[rank].pausing_us for rank in ranks if rank in job.per_step])
