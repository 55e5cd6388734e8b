"""The step time that a replay of edited schedules predicts."""

from __future__ import annotations

from typing import Final

import numpy as np

from perfscope.analyzers.replay.engine import ReplayResult
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.trace.trace import Float64

_FEW_STEPS: Final = 2
"""Of no more recorded steps, each counts as it is replayed."""


def step_ns(schedules: EditableSchedules, replayed: ReplayResult, unchanged: ReplayResult) -> float:
    """The job's step time in a replay of these schedules. It misses of the measured step what the replay of the
    ``unchanged`` steps misses: that is taken out.
    """
    recorded = schedules.recorded
    measured = float(recorded.slowest_ns(unchanged).mean())
    recorded_ns = recorded.windows_ns(unchanged).astype(np.float64)
    changed_ns = _as_the_others(schedules, recorded.windows_ns(replayed).astype(np.float64), recorded_ns)
    predicted = _settled_ns(schedules, changed_ns)
    if not schedules.lifted:  # else the recorded steps wait in turn for workers, and these do not
        predicted *= measured / _settled_ns(schedules, recorded_ns)
    predicted = max(predicted, _host_paced_ns(schedules, replayed, unchanged))
    return max([predicted, *schedules.floor_step_ns.values(), *schedules.loading_step_ns.values()])


def _host_paced_ns(schedules: EditableSchedules, replayed: ReplayResult, unchanged: ReplayResult) -> float:
    """What a step takes the slowest host that never waits, less what its device was quicker before the change. A
    device that has come behind its host is quicker than its host only until it has caught up.
    """
    (host, _), (before, device) = _paces_ns(schedules, replayed), _paces_ns(schedules, unchanged)
    return host - max(before - device, 0.0)


def _paces_ns(schedules: EditableSchedules, replayed: ReplayResult) -> tuple[float, float]:
    """(the slowest host's time from one step to the next, the slowest device's); 0 without hosts."""
    begin = schedules.recorded.begin[:, schedules.recorded.used]
    if replayed.host_mark_ns is None or begin.shape[1] < 2:
        return 0.0, 0.0
    steps = begin.shape[1] - 1
    marks = (replayed.host_mark_ns, replayed.mark_ns)
    host, device = (float((mark_ns[begin[:, -1]] - mark_ns[begin[:, 0]]).max()) / steps for mark_ns in marks)
    return host, device


def _as_the_others(schedules: EditableSchedules, changed_ns: Float64, recorded_ns: Float64) -> Float64:
    """The windows with the first step changed as the others are. How far hosts are ahead of their devices where it
    begins is recorded, not replayed: where the change makes that more or less, it does so in this step.
    """
    first = schedules.recorded.used[0] and changed_ns.shape[1] > _FEW_STEPS
    if not (schedules.hosts and schedules.steps_alike and first):
        return changed_ns
    changed_ns = changed_ns.copy()
    changed_ns[:, 0] = recorded_ns[:, 0] * np.median(changed_ns[:, 1:] / recorded_ns[:, 1:], axis=1)
    return changed_ns


def _settled_ns(schedules: EditableSchedules, windows_ns: Float64) -> float:
    """Mean step of the slowest rank, without the steps in which ranks still settle."""
    settled = windows_ns[:, min(schedules.settling, windows_ns.shape[1] - 1) :]
    return float(settled.mean(axis=1).max())
