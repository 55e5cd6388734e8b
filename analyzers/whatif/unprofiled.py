"""The recorded schedules as they would be without the profiler, which makes every event that it records longer.

What a step costs without the profiler is known where unprofiled steps were timed. The difference is divided among the
events that the training threads recorded. Own work on the host is that much shorter; kernels on a device are as long as
they were, and only its idle time that the host causes gets shorter. Example: a step of 12 ms on a CPU with 2000
operators, and 10 ms without the profiler: each operator cost 1 µs, and 500 of them between two collectives 0.5 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.replay.engine import ReplayResult, replay
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.analyzers.whatif.schedules import EditableSchedules, editable_schedules
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Float64

_ON_HOST: Final = np.array([TimeCategory.COMPUTE, TimeCategory.LAUNCH, TimeCategory.HOST, TimeCategory.UNKNOWN])
"""Own time that the profiler makes longer on a rank that computes on the CPU."""
_ON_DEVICE: Final = np.array([TimeCategory.LAUNCH, TimeCategory.HOST, TimeCategory.UNKNOWN])
"""The same on a rank with a device."""

_CLOSE: Final = 0.002
"""Relative error of the unprofiled step with which the cost of an event is found."""

_MOST_REPLAYS: Final = 5

_MOST_EACH_NS: Final = 20_000.0
"""No event costs more, with shapes, stacks and memory recorded. What is left of a difference has another cause."""


@dataclass(frozen=True, eq=False)
class ProfilerCost:
    """``event_ns``: what the profiler adds to each recorded event of a training thread. ``step_ns``: the job's measured
    step without the profiler. ``replayed``: the recorded schedules without that cost, replayed.
    """

    event_ns: float
    step_ns: float
    replayed: ReplayResult
    events: Mapping[int, Float64]

    def remove_from(self, schedules: EditableSchedules, result: AlignedJob) -> None:
        """Shorten the own time of every rank by what the events in it cost."""
        _remove(schedules, result, self.events, self.event_ns)
        step_ns = float(schedules.recorded.slowest_ns(self.replayed).mean())
        for rank, loading_ns in schedules.loading_step_ns.items():
            schedules.loading_step_ns[rank] = min(loading_ns, step_ns)

    def of_step(self, result: AlignedJob, rank: int) -> float:
        """What the profiler adds to the host's work in a step of one rank, ns."""
        return self.event_ns * _events_per_step(result, rank)


def profiler_cost(result: AlignedJob, recorded: RecordedSchedules, step_ns: float) -> ProfilerCost:
    """The cost of an event with which the recorded steps, replayed without it, take ``step_ns``; as close to that as
    can be: where unprofiled steps take longer than the recorded ones, or the profiler slows down what it does not
    record, a difference is left.
    """
    schedules = editable_schedules(result, recorded)
    events = {rank: _events_before(result, schedules, rank) for rank in schedules.ops}
    replays: dict[float, ReplayResult] = {}

    def step_at(event_ns: float) -> float:
        changed = editable_schedules(result, recorded)
        _remove(changed, result, events, event_ns)
        replays[event_ns] = replay(changed.compiled())
        return float(recorded.slowest_ns(replays[event_ns]).mean())

    per_step = max(_events_per_step(result, rank) for rank in schedules.ops)
    event_ns = _solve(step_at, step_ns, per_step)
    return ProfilerCost(event_ns, step_ns, replays[event_ns], events)


def _solve(step_at: Callable[[float], float], target_ns: float, per_step: float) -> float:
    """The argument at which ``step_at``, which falls, is ``target_ns``: by steps along its slope."""
    best, before = (0.0, step_at(0.0)), (0.0, 0.0)
    slope = per_step
    for _ in range(_MOST_REPLAYS):
        excess = best[1] - target_ns
        if excess <= _CLOSE * target_ns or slope <= 0:
            break
        before, cost = best, min(best[0] + excess / slope, _MOST_EACH_NS)
        if cost <= best[0]:
            break
        step = step_at(cost)
        if abs(step - target_ns) >= abs(excess):
            break
        best = (cost, step)
        slope = (before[1] - step) / (cost - before[0])
    return best[0]


def _events_per_step(result: AlignedJob, rank: int) -> float:
    partial = result.partials[rank]
    steps, chosen = partial.steps, partial.steps.indices_of(result.steps)
    start, end = int(steps.host_start_ns[chosen[0]]), int(steps.host_end_ns[chosen[-1]])
    return partial.host_events.within(start, end) / len(chosen)


def _events_before(result: AlignedJob, schedules: EditableSchedules, rank: int) -> Float64:
    """Events before each op of a rank since the one before; those while it is blocked cost nothing."""
    partial = result.partials[rank]
    own, blocked, at_ns = partial.progress.own, partial.progress.blocked, partial.host_events.at_ns
    if len(own) == 0:
        return np.zeros(len(schedules.ops[rank]))
    at_ns = at_ns[~blocked.covers(at_ns)]
    progress = at_ns - int(own.start_ns[0]) - blocked.before(at_ns)
    until = np.cumsum([op.own_ns.sum() for op in schedules.ops[rank]])
    bounds = np.concatenate(([0.0], until)) + schedules.recorded.first_progress_ns(result, rank)
    return np.asarray(np.diff(np.searchsorted(progress, bounds)) * partial.host_events.each, dtype=np.float64)


def _remove(schedules: EditableSchedules, result: AlignedJob, events: Mapping[int, Float64], event_ns: float) -> None:
    for rank, ops in schedules.ops.items():
        on_device = result.partials[rank].has_device_work
        columns = _ON_DEVICE if on_device else _ON_HOST
        left = 0.0
        for op, count in zip(ops, events[rank], strict=True):
            own = float(op.own_ns[columns].sum())
            left += event_ns * float(count)
            less = min(left, own)
            # What a busy device does not notice brings its host that much ahead, until the two meet.
            left = left - less if on_device and not op.own_ns[TimeCategory.SYNC] else 0.0
            if less:
                op.own_ns[columns] *= 1 - less / own
