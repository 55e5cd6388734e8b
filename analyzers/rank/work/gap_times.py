"""What the training threads of a rank without a device do between operators, phase by phase of the loop."""

from __future__ import annotations

import numpy as np

from perfscope.analyzers.rank.host_activity import HostActivity
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.loop_phases import split
from perfscope.analyzers.rank.steps import Steps
from perfscope.analyzers.rank.timeline import Progress
from perfscope.analyzers.rank.work.tables import GapTimes
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Category, Trace


def gap_times(trace: Trace, host: HostActivity, progress: Progress, steps: Steps, *, on_device: bool) -> GapTimes:
    """Add up each phase's time between operators; no line with ``on_device``."""
    if on_device or len(progress.own) == 0:
        nothing = np.empty((0, len(steps)), dtype=np.int64)
        return GapTimes((), nothing, nothing)
    begun = np.sort(trace.start_ns[trace.rows(Category.CPU_OP, threads=host.threads)])
    idle = progress.own.where(TimeCategory.HOST).subtract(host.operators)
    whole = Intervals.of(np.array([progress.own.start_ns[0]]), np.array([progress.own.end_ns]))
    names, count, host_ns = [], [], []
    for name, phase in split(trace, whole, host.threads).items():
        names.append(name)
        count.append(steps.count(steps.of_host_time(begun[phase.covers(begun)])))
        host_ns.append(idle.intersect(phase).within(steps.host_start_ns, steps.host_end_ns))
    return GapTimes(tuple(names), np.stack(count), np.stack(host_ns))
