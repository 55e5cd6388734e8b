"""The cores that collectives between CPUs take, and give back where less is sent.

Threads of gloo's copy and sum what is sent. Where there are no more cores than training threads, they take them from
these, and each rank recorded how long its training thread waited for a core. No trace shows who had the core: threads
of the same process, whose CPU time is recorded too, or others of the machine. So where a change takes out a share of
what transfers take, up to that share of the waits may go with it; half of that is predicted.

Example: the training thread of a rank waits 10 ms of each step for a core, and the other threads of its process compute
for 12 ms. Without three quarters of the transfers the step is 0 to 7.5 ms shorter than the replay has it.

What ranks compute, whatever else changes, a step takes at least, however uncertain a prediction is. Example: without
its pauses a step of 46 ms is predicted to take 12, and by its range nothing, since it is not known what the profiler
slowed down. Its ranks compute for 6 ms of it, so it takes 6 or more.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose

from perfscope.analyzers.whatif.change import Context
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.recording.metadata import RunMetadata
from perfscope.results.categories import TimeCategory


def transfers_ns(context: Context, schedules: EditableSchedules) -> dict[int, float]:
    """Rank -> what all its transfers take together, ns; empty where they take no cores that can be freed."""
    if context.on_devices or context.events_cost_all:  # what events cost includes the waits for cores
        return {}
    taken = dict.fromkeys(schedules.ops, 0.0)
    for rank_op in schedules.issued():
        taken[rank_op.rank] += rank_op.transfer_ns
    return taken


def freed_ns(context: Context, before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """By how much a step may become shorter where training threads wait less for cores, in the replay's time; 0 where
    nothing shows it. ``before`` and ``after``: the ranks' ``transfers_ns``.
    """
    if not before:
        return 0.0
    freed = []
    for rank, taken in before.items():
        run = context.runs.get(rank)
        less = max(1 - after[rank] / taken, 0.0) if taken else 0.0
        freed.append(less * _taken_by_transfers_ns(run) if run is not None else 0.0)
    # A rank that waits for another is no quicker for cores of its own.
    pace = context.recorded.step_time_ns(context.replayed_unchanged) / context.result.step_ns
    return min(freed, default=0.0) * pace


def _taken_by_transfers_ns(run: RunMetadata) -> float:
    """Of a rank's wait for cores in a step, what threads that send can have caused, ns: no more than they compute."""
    cpu = run.cpu
    if cpu is None or not cpu.steps or cpu.waited_ns is None or (run.cpu_threads or 1) > 1:
        return 0.0  # threads of operators compute for the training, and wait for each other
    return min(cpu.waited_ns, max(cpu.process_ns - cpu.thread_ns, 0)) / cpu.steps


def computed_ns(schedules: EditableSchedules) -> dict[int, float]:
    """Rank -> what it computes in all recorded steps, ns."""
    return {rank: sum(float(op.own_ns[TimeCategory.COMPUTE]) for op in ops) for rank, ops in schedules.ops.items()}


def least_computed_ns(
    before: Mapping[int, float], after: Mapping[int, float], context: Context, freed_ns: float
) -> float:
    """The most that a rank computes per step whose computing (``computed_ns``) a change leaves as it was; 0 where it
    changes all ranks'. Where the change frees cores (``freed_ns``), it need not wait for one meanwhile.
    """
    same = (
        ns * (_running(context.runs.get(rank)) if freed_ns else 1.0)
        for rank, ns in after.items()
        if isclose(ns, before[rank], rel_tol=1e-6)
    )
    return max(same, default=0.0) / max(len(context.result.steps), 1)


def _running(run: RunMetadata | None) -> float:
    """Share of its training thread's time in which it ran, of that in which it wanted to; 1 where that is not known."""
    cpu = run.cpu if run is not None else None
    if cpu is None or cpu.waited_ns is None or not cpu.thread_ns:
        return 1.0
    return cpu.thread_ns / (cpu.thread_ns + cpu.waited_ns)
