"""The step time that a replay of changed schedules predicts: of what-ifs and of stragglers alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np

from perfscope.analyzers.replay.engine import ReplayResult
from perfscope.trace.trace import Bool, Float64, Int64

if TYPE_CHECKING:
    from perfscope.analyzers.replay.schedules import RecordedSchedules

TRUSTED: Final = 0.05
"""Error of the unchanged replay above which nothing is predicted (``docs/metrics.md``)."""

_AS_LONG: Final = 0.1
"""Share of a step's time by which another one may differ that took as long."""

_FEW_STEPS: Final = 2
"""Of no more recorded steps, each counts as it is replayed."""


def replay_error(recorded: RecordedSchedules, unchanged: ReplayResult, measured_ns: float) -> float:
    """By which share the ``unchanged`` replay misses the measured step."""
    return abs(recorded.step_time_ns(unchanged) / measured_ns - 1)


def is_trusted(recorded: RecordedSchedules, unchanged: ReplayResult, measured_ns: float) -> bool:
    """Does the ``unchanged`` replay come to its end, and to the measured step?"""
    return unchanged.complete and replay_error(recorded, unchanged, measured_ns) <= TRUSTED


def predicted_step_ns(
    recorded: RecordedSchedules, replayed: ReplayResult, unchanged: ReplayResult, *, settling: int, steps_alike: bool,
    lifted: bool, floors_ns: Iterable[float], sooner: bool = False, assumed_ns: Int64 | None = None,
) -> float:  # fmt: skip
    """The job's step time in a replay of changed schedules. It misses of the measured step what the replay of the
    ``unchanged`` steps misses: that is taken out.

    ``settling``: steps until ranks have found a new rhythm; ``steps_alike``: the change is the same in all steps;
    ``sooner``: hosts come sooner to the first than they were recorded to, and ``assumed_ns`` is then what is assumed of
    begins; ``lifted``: no rank waits for the loader workers that held it up; none of ``floors_ns`` is undercut.
    """
    recorded_ns = recorded.steps_ns(unchanged).astype(np.float64)
    changed_ns = recorded.steps_ns(replayed, assumed_ns).astype(np.float64)
    if replayed.host_mark_ns is not None and steps_alike and recorded.used[0]:
        alike_ns = _as_the_others(changed_ns, recorded_ns)
        changed_ns = _begun_sooner(np.minimum(alike_ns, changed_ns)) if sooner else alike_ns
        # Else a long wait among the others would count for more steps.
        if lifted and _as_long(recorded_ns[1:], recorded_ns[0]).any():
            settling = 0
    settled = slice(min(settling, len(changed_ns) - 1), None)
    predicted = float(changed_ns[settled].mean())
    if not lifted:  # else the recorded steps wait in turn for workers, and these do not
        predicted *= float(recorded_ns.mean() / recorded_ns[settled].mean())
    return max([predicted, _host_paced_ns(recorded, replayed, unchanged, changed_ns, recorded_ns), *floors_ns])


def _host_paced_ns(
    recorded: RecordedSchedules, replayed: ReplayResult, unchanged: ReplayResult, changed_ns: Float64,
    recorded_ns: Float64,
) -> float:  # fmt: skip
    """What a step takes the slowest host that never waits, less what its device, or the job, was quicker before the
    change. A device that has come behind its host is quicker than its host only until it has caught up; and ranks that
    begin apart end the first step sooner than the host that is behind makes the others.
    """
    host, _ = _paces_ns(recorded, replayed, changed_ns)
    before, device = _paces_ns(recorded, unchanged, recorded_ns)
    return host - max(before - device, before - recorded.step_time_ns(unchanged), 0.0)


def _paces_ns(recorded: RecordedSchedules, replayed: ReplayResult, steps_ns: Float64) -> tuple[float, float]:
    """(the slowest host's time from one used step to the next step, the slowest device's); 0 without hosts. Steps that
    are left out, as with an evaluation, count for neither. Paces are known up to the begin of the last recorded step:
    where one of the others holds a long pause, the mean of all ``steps_ns`` is less than that of these, and so are
    the paces.
    """
    followed = recorded.used[:-1]
    steps = int(followed.sum())
    if replayed.host_mark_ns is None or not steps:
        return 0.0, 0.0
    share = min(float(steps_ns.mean() / steps_ns[:steps].mean()), 1.0)
    marks = (replayed.host_mark_ns, replayed.mark_ns)
    passed = (np.diff(mark_ns[recorded.begin], axis=1)[:, followed].sum(axis=1) for mark_ns in marks)
    host, device = (share * float(each.max()) / steps for each in passed)
    return host, device


def _begun_sooner(steps_ns: Float64) -> Float64:
    """The steps with the first one no quicker than all others: the recording does not show how much sooner hosts may
    come to it, and what keeps them near their devices (FSDP's limit on gathers) is replayed in those after it.
    """
    least = steps_ns[1:].min() if len(steps_ns) > 1 else 0.0
    return np.append(max(steps_ns[0], least), steps_ns[1:])


def _as_the_others(changed_ns: Float64, recorded_ns: Float64) -> Float64:
    """The steps with the first and the last one changed as those between them are that took as long: of steps of which
    every other one pauses a change may make only those shorter. How far hosts are ahead of their devices where the
    first begins is recorded, not replayed: where the change makes that more or less, it does so in this step. What of
    the last one would go on beside the next is seen of the others alone. Where none took as long, the first changes as
    all others do, and the last stays.
    """
    if len(changed_ns) <= _FEW_STEPS:
        return changed_ns
    times, inner = changed_ns / recorded_ns, slice(1, -1)
    alike, alike_last = (times[inner][_as_long(recorded_ns[inner], recorded_ns[edge])] for edge in (0, -1))
    changed_ns = changed_ns.copy()
    changed_ns[0] = recorded_ns[0] * np.median(alike if len(alike) else times[1:])
    if len(alike_last):
        changed_ns[-1] = recorded_ns[-1] * np.median(alike_last)
    return changed_ns


def _as_long(steps_ns: Float64, other_ns: float) -> Bool:
    """Which of the steps took as long as another one."""
    return np.asarray(np.abs(steps_ns / other_ns - 1) <= _AS_LONG, dtype=np.bool_)
