"""Which stalls of the data loader end when the workers deliver, whatever the training does.

Workers that are always busy set the pace: W of them deliver W batches at about the same moment, then stay silent until
the next W are loaded. The training takes the ones that are there without waiting and stalls at every W-th. Were it
quicker in between, it would stall that much longer. Any other stall (a slow sample now and then, the loader's own cost
in every step) begins when the training asks, and moves with it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Int64

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
    loading = partial.progress.own.where(TimeCategory.DATALOADER)
    mean_step = (partial.steps.end_ns[-1] - partial.steps.start_ns[0]) / len(partial.steps)
    long = loading.end_ns - loading.start_ns >= _STALL * mean_step
    stalls = Intervals.of(loading.start_ns[long], loading.end_ns[long])
    step = partial.steps.of_device_time(stalls.start_ns)
    if len(stalls) < 3 or (step < 0).any():
        return Intervals.empty()
    return stalls if _in_turns(step, stalls.end_ns, at_least=2) else Intervals.empty()


def deliveries_under_work(partial: RankPartial) -> tuple[Int64, Int64]:
    """Waits for busy workers that the device does not notice, because the host runs ahead of it and the device has work
    left: (when the device begins the step that follows each, when the host could launch that step), own clock.

    A quicker device would catch up with the host there and wait. Example: a batch every 6 ms, steps of 7 ms on the
    device, so that the host launches step k at 6 k ms and the device begins it at 7 k: at its best it takes 6 ms.
    """
    nothing = np.empty(0, dtype=np.int64)
    steps, progress, waited = partial.steps, partial.progress, partial.loading.waited_ns
    if partial.loading.single_process is not False or len(steps) < 3 or not partial.has_device_work:
        return nothing, nothing
    least = _STALL * (steps.end_ns[-1] - steps.start_ns[0]) / len(steps)
    seen = progress.own.totals(steps.start_ns, steps.end_ns)[:, TimeCategory.DATALOADER]
    launched = steps.host_start_ns + progress.lead_ns
    hidden = (waited >= least) & (waited <= progress.lead_ns) & (seen < least) & (launched <= steps.start_ns)
    hidden &= ~progress.blocked.covers(steps.start_ns)
    index = np.flatnonzero(hidden)
    if len(index) < 3 or not _in_turns(index, launched[index], at_least=1):
        return nothing, nothing
    return steps.start_ns[index], launched[index]


def _in_turns(step: Int64, end_ns: Int64, at_least: int) -> bool:
    """Do waits in these steps end as regularly as busy workers deliver: every so many steps, after the same time?"""
    every, between = np.diff(step), np.diff(end_ns)
    in_turns = (every == every[0]).all() and at_least <= every[0] <= _MOST_WORKERS
    return bool(in_turns and between.std() <= _REGULAR * between.mean())
