"""Changes of the threads that operators on the CPU are spread over: OMP_NUM_THREADS.

Threads that fit the cores share the work of large operators: one of n threads takes a part, small operators and Python
stay as they are (Amdahl). With more threads than cores they wait for each other and for cores, spinning or asleep, and
little of what was recorded is work. What is work then is taken from the quickest call of each operator on inputs of
each size (``perfscope.analyzers.work.quickest``), when all its threads had a core. It cannot exceed the CPU time that
the process used.

Example: 2 ranks of 2 threads on 2 cores. The quickest calls of a step's operators add up to 20 ms, on 2 cores 40 ms of
work; on busy cores, whose caches and units are shared, half as much again: 57 ms a rank with 1 thread. Recorded were
300 ms in which the training thread ran half of the time: one thread a rank has a core of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Final

from perfscope.analyzers.cores import cores_of
from perfscope.analyzers.timeline import Row
from perfscope.analyzers.whatif.change import FULL, BadSetting, CannotReplay, Context, Setting, Uncertainty
from perfscope.analyzers.whatif.script import Script
from perfscope.metadata import CpuRecord

_BUSY: Final = 2.0
"""How much longer at most an operator takes while all cores are busy than its quickest call: hyper-threads, caches and
memory are shared. The middle is the geometric mean of that and 1."""
_SPREAD: Final = 1.5
"""Factor by which the work may be more or less than estimated."""
_OTHERS: Final = 0.8
"""Share of the cores that a rank wants, below which it finds other processes on them."""
_DIMINISHING: Final = 0.85
"""Each thread more brings a little less than the one before, because they share memory and meet at every operator's
end: twice as many threads take 0.55 of the time, not 0.5."""
_ALONE: Final = Uncertainty(less=0.15, more=0.10)
_CROWDED: Final = Uncertainty(less=0.50, more=0.10)


@dataclass(frozen=True)
class _Pace:
    """What a rank's time is multiplied by: its operators' time, likewise at least and at most, and all else."""

    operators: float
    least: float
    most: float
    rest: float
    sure: Uncertainty


def _threads(script: Script, context: Context, name: str, value: str) -> Uncertainty:
    asked = int(value) if value.isdecimal() else 0
    if asked < 1:
        raise BadSetting(f"{name}={value}: write a number of threads, 1 or more")
    if any(context.result.partials[rank].has_device_work for rank in script.lines):
        raise CannotReplay(f"{name}: the job computes on devices, which the host's threads only feed")
    paces = {rank: _pace(context, rank, name, asked) for rank in script.lines}
    compute_ns = {rank: float(context.result.totals[rank][:, Row.COMPUTE].mean()) for rank in paces}
    for rank, pace in paces.items():
        for line in script.lines[rank]:
            operators = line.own_ns[Row.COMPUTE] * pace.operators
            line.own_ns = line.own_ns * pace.rest
            line.own_ns[Row.COMPUTE] = operators
    for meeting, parts in script.meetings().items():
        # The last to arrive copies the bytes, as quickly as it gets a core.
        rest = max((paces[part.rank].rest for part in parts), default=1.0)
        for part in parts if meeting.size > 1 else ():
            part.transfer_ns *= rest
    every = paces.values()
    return Uncertainty(
        less=max(pace.sure.less for pace in every),
        more=max(pace.sure.more for pace in every),
        slower_ns=max((pace.most - pace.operators) * compute_ns[rank] for rank, pace in paces.items()),
        faster_ns=max((pace.operators - pace.least) * compute_ns[rank] for rank, pace in paces.items()),
    )


def _pace(context: Context, rank: int, name: str, asked: int) -> _Pace:
    run = context.runs.get(rank)
    cores = cores_of(context.runs, rank) if run is not None else None
    if run is None or run.cpu is None or not run.cpu.steps or not run.cpu_threads or cores is None:
        raise CannotReplay(
            f"{name}: rank {rank}'s threads and CPU time are not recorded; record it again with perfscope run"
        )
    if asked == run.cpu_threads:
        return _Pace(1.0, 1.0, 1.0, 1.0, FULL)
    if asked > max(cores, 1):
        raise CannotReplay(
            f"{name}={asked}: {asked} threads a rank would compete for {cores:g} core{'' if cores == 1 else 's'} that "
            f"each has on {run.host}, and what that costs does not show in the recording"
        )
    given = _given(run.cpu)
    if asked > run.cpu_threads and given < _OTHERS:
        raise CannotReplay(
            f"{name}={asked}: rank {rank}'s training thread waited for a core {1 - given:.0%} of the time that it "
            f"wanted one, so other processes are on the cores of {run.host}, and more threads would wait for each other"
        )
    partial = context.result.partials[rank]
    used = partial.steps.indices_of(context.result.steps)
    quickest = partial.tables.quickest
    spread, alone = float(quickest.spread_ns[used].mean()), float(quickest.alone_ns[used].mean())
    recorded = float(context.result.totals[rank][:, Row.COMPUTE].mean())
    if spread + alone <= 0 or recorded <= 0:
        raise CannotReplay(
            f"{name}: which operators are spread over threads does not show; record with shapes (perfscope run does "
            "unless told otherwise)"
        )
    if run.cpu_threads > cores:
        # The quickest call found all cores that its threads may run on idle: other ranks wait now and then.
        work = spread * min(run.cpu_threads, run.cpu_count or 1)
        return _relieved(run.cpu, cores, asked, work, spread, alone, recorded)
    return _shared(spread / (spread + alone), run.cpu_threads, asked)


def _shared(parallel: float, before: int, after: int) -> _Pace:
    """Threads that fit the cores before and after: Amdahl. More of them may bring nothing, fewer cost nothing."""
    perfect = 1 - parallel + parallel * before / after
    mid = 1 - parallel + parallel * (before / after) ** _DIMINISHING
    return _Pace(mid, min(perfect, 1.0), max(perfect, 1.0), 1.0, Uncertainty(less=0.10, more=0.10))


def _relieved(
    cpu: CpuRecord, cores: float, after: int, work_ns: float, spread_ns: float, alone_ns: float, recorded_ns: float
) -> _Pace:
    """More threads than cores before, threads that fit after. Of one rank with its part of the ``cores``; ``work_ns``
    is what the spread operators, which took ``spread_ns`` when they were quickest, then took of all cores together.
    """
    work = min(work_ns * sqrt(_BUSY), max(cpu.process_ns / cpu.steps, spread_ns))
    given = _given(cpu)
    # Cores that the rank got while it wanted some. Schedulers share them out among jobs (sessions, control groups):
    # what other processes took they take again; what the rank's own threads took from each other stays its own.
    got = min(given * cpu.process_ns / cpu.thread_ns, cores) if cpu.thread_ns else cores
    crowded = got < _OTHERS * cores
    gets = min((got if crowded else cores) / after, 1.0)

    def pace(ns: float) -> float:
        return (alone_ns + ns / after) / gets / recorded_ns

    sure = _CROWDED if crowded else _ALONE
    return _Pace(pace(work), pace(work / _SPREAD), pace(work * _SPREAD), min(given / gets, 1.0), sure)


def _given(cpu: CpuRecord) -> float:
    """Share of the time for which the training thread wanted a core in which it had one."""
    wanted_ns = cpu.thread_ns + (cpu.waited_ns or 0)
    return cpu.thread_ns / wanted_ns if wanted_ns else 1.0


SETTINGS = (
    Setting(
        "env.OMP_NUM_THREADS", "N", "threads that operators on the CPU are spread over (jobs on CPUs)", _threads, 0
    ),
)
