"""What one rank reports for the tables of kernels, operators, modules, launches and blocking calls."""

from __future__ import annotations

from dataclasses import dataclass

from perfscope.analyzers.attribution import Attribution
from perfscope.analyzers.host_activity import HostActivity
from perfscope.analyzers.launches import DeviceWork
from perfscope.analyzers.steps import Steps
from perfscope.analyzers.timeline import Timeline
from perfscope.analyzers.work.kernel_times import KernelTimes, classed_work, kernel_times
from perfscope.analyzers.work.launch_times import LaunchTimes, launch_times
from perfscope.analyzers.work.module_times import ModuleTimes, module_times
from perfscope.analyzers.work.operator_times import OperatorTimes, operator_times
from perfscope.analyzers.work.quickest import QuickestTimes, quickest_times
from perfscope.analyzers.work.sync_times import SyncTimes, sync_times
from perfscope.trace import Trace


@dataclass(frozen=True, eq=False)
class RankTables:
    """Sums per name and step of one rank; the job's used steps are chosen when the ranks are compared."""

    kernels: KernelTimes
    operators: OperatorTimes
    modules: ModuleTimes
    launches: LaunchTimes
    syncs: SyncTimes
    quickest: QuickestTimes


def rank_tables(
    trace: Trace, work: DeviceWork, steps: Steps, found: Attribution, host: HostActivity, timeline: Timeline
) -> RankTables:
    """Ask one rank for its part of every table. ``timeline`` is its account before the ranks are compared."""
    done = classed_work(trace, work, found)
    return RankTables(
        kernels=kernel_times(trace, work, steps, found, done),
        operators=operator_times(trace, work, steps, found, done),
        modules=module_times(trace, work, steps),
        launches=launch_times(trace, work, steps),
        syncs=sync_times(trace, steps, host, timeline, found),
        quickest=quickest_times(trace, found.operators, steps, host.loading, on_device=len(work) > 0),
    )
