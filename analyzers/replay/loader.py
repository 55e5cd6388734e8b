"""Which stalls of the data loader end when the workers deliver, whatever the training does.

Workers that are always busy set the pace: W of them deliver W batches at about the same moment, then stay silent until
the next W are loaded. The training takes the ones that are there without waiting and stalls at every W-th. Were it
quicker in between, it would stall that much longer. Any other stall (a slow sample now and then, the loader's own cost
in every step) begins when the training asks, and moves with it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.intervals import Intervals
from perfscope.analyzers.rank import RankPartial
from perfscope.analyzers.timeline import Row

_STALL: Final = 0.05
"""Share of the mean step from which time in the loader is a stall."""

_MOST_WORKERS: Final = 16
"""Stalls further apart than this many batches are not workers' turns."""

_REGULAR: Final = 0.05
"""Relative spread of the deliveries' intervals up to which they are regular."""


def deliveries(partial: RankPartial) -> Intervals:
    """The stalls of one rank that end with a delivery of busy workers, on its own clock; none where its stalls are not
    of that kind. Fewer than three of them are no evidence.
    """
    if partial.loading.single_process is not False or len(partial.steps) < 3:
        return Intervals.empty()
    loading = partial.progress.own.where(Row.DATALOADER)
    mean_step = (partial.steps.end_ns[-1] - partial.steps.start_ns[0]) / len(partial.steps)
    long = loading.end_ns - loading.start_ns >= _STALL * mean_step
    stalls = Intervals.of(loading.start_ns[long], loading.end_ns[long])
    step = partial.steps.of_device_time(stalls.start_ns)
    if len(stalls) < 3 or (step < 0).any():
        return Intervals.empty()
    every = np.diff(step)
    between = np.diff(stalls.end_ns)
    in_turns = (every == every[0]).all() and 2 <= every[0] <= _MOST_WORKERS
    regular = between.std() <= _REGULAR * between.mean()
    return stalls if in_turns and regular else Intervals.empty()
