"""Setting of the threads over which operators on the CPU are spread: OMP_NUM_THREADS.

Threads that fit the cores share the work of large operators: each of n threads takes a part, small operators and Python
stay as they are (Amdahl). With more threads than cores they wait for each other and for cores, spinning or asleep, and
little of the recorded time is work. The work is then estimated from the quickest call of each operator on inputs of
each size (``perfscope.analyzers.rank.work.quickest``), when all its threads had a core. It cannot exceed the CPU time
that the process used.

Example: 2 ranks of 2 threads on 2 cores. The quickest calls of a step's operators add up to 20 ms, on 2 cores 40 ms of
work; on busy cores, whose caches and units are shared, 1.4 times as much: 57 ms per rank with 1 thread. 300 ms were
recorded, in which the training thread ran half of the time: with one thread per rank it has a core of its own.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Final

from perfscope.analyzers.job.cores import cores_of
from perfscope.analyzers.whatif.change import FULL, CannotReplay, Context, Setting, Uncertainty, whole_number
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.frozen import dataclass
from perfscope.recording.metadata import CpuMetadata
from perfscope.results.categories import TimeCategory

NAME: Final = "env.OMP_NUM_THREADS"

_BUSY: Final = 2.0
"""At most so many times as long as its quickest call an operator takes while all cores are busy, because hyper-threads,
caches and memory are shared. The middle is the geometric mean of that and 1."""
_SPREAD: Final = 1.5
"""Factor by which the work may be more or less than estimated."""
_OTHERS: Final = 0.8
"""Where a rank gets less than this share of the time that it wants a core, other processes are on its cores."""
_DIMINISHING: Final = 0.85
"""Exponent of the speedup: each more thread brings a little less, because threads share memory and wait for each other
at every operator's end. Twice as many threads take 0.55 of the time, not 0.5."""
_ALONE: Final = Uncertainty(less=0.15, more=0.10)
_CROWDED: Final = Uncertainty(less=0.50, more=0.10)


@dataclass(frozen=True)
class _ThreadsFactor:
    """Factors of a rank's time: of its operators' (also at least and at most), and of the rest."""

    operators: float
    least: float
    most: float
    rest: float
    sure: Uncertainty


def _threads(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    asked = whole_number(name, value, "a number of threads")
    if context.on_devices:
        raise CannotReplay(f"{name}: the job computes on devices; the host's threads only launch work there")
    paces = {rank: _pace(context, rank, name, asked) for rank in schedules.ops}
    compute_ns = {rank: float(context.result.totals[rank][:, TimeCategory.COMPUTE].mean()) for rank in paces}
    for rank, pace in paces.items():
        schedules.at_least(rank, pace.least * compute_ns[rank])
        for op in schedules.ops[rank]:
            operators = op.own_ns[TimeCategory.COMPUTE] * pace.operators
            op.own_ns = op.own_ns * pace.rest
            op.own_ns[TimeCategory.COMPUTE] = operators
    for collective, rank_ops in schedules.collectives().items():
        # The last arrival copies the bytes, as quickly as it gets a core.
        rest = max((paces[rank_op.rank].rest for rank_op in rank_ops), default=1.0)
        for rank_op in rank_ops if collective.size > 1 else ():
            rank_op.transfer_ns *= rest
    return Uncertainty.worst(
        replace(
            pace.sure,
            slower_ns=(pace.most - pace.operators) * compute_ns[rank],
            faster_ns=(pace.operators - pace.least) * compute_ns[rank],
        )
        for rank, pace in paces.items()
    )


def least_ns(schedules: EditableSchedules) -> float:
    """The least that a rank computes in a step with other threads: the time in which they wait for one another is no
    work, so what was recorded does not tell.
    """
    return max(schedules.floor_step_ns.values(), default=0.0)


def _pace(context: Context, rank: int, name: str, asked: int) -> _ThreadsFactor:
    run = context.runs.get(rank)
    cores = cores_of(context.runs, rank) if run is not None else None
    if run is None or run.cpu is None or not run.cpu.steps or not run.cpu_threads or cores is None:
        raise CannotReplay(
            f"{name}: rank {rank}'s threads and CPU time are not recorded; record it again with perfscope run"
        )
    if asked == run.cpu_threads:
        return _ThreadsFactor(1.0, 1.0, 1.0, 1.0, FULL)
    if asked > max(cores, 1):
        raise CannotReplay(
            f"{name}={asked}: {asked} threads per rank would compete for the {cores:g} core{'' if cores == 1 else 's'} "
            f"that each rank has on {run.host}, and the recording does not show what that costs"
        )
    given = _given(run.cpu)
    if asked > run.cpu_threads and given < _OTHERS:
        raise CannotReplay(
            f"{name}={asked}: rank {rank}'s training thread waited for a core {1 - given:.0%} of the time that it "
            f"wanted one, so other processes use the cores of {run.host}, and more threads would wait for each other"
        )
    partial = context.result.partials[rank]
    used = partial.steps.indices_of(context.result.steps)
    quickest = partial.tables.quickest
    spread, alone = float(quickest.spread_ns[used].mean()), float(quickest.alone_ns[used].mean())
    recorded = float(context.result.totals[rank][:, TimeCategory.COMPUTE].mean())
    if spread + alone <= 0 or recorded <= 0:
        raise CannotReplay(
            f"{name}: it is not recorded which operators are spread over threads; record with shapes (the default of "
            "perfscope run)"
        )
    if run.cpu_threads > cores:
        # The quickest call found all cores that its threads may run on idle: other ranks wait now and then.
        work = spread * min(run.cpu_threads, run.cpu_count or 1)
        return _relieved(run.cpu, cores, run.cpu_threads, asked, work, spread, alone, recorded)
    return _shared(spread / (spread + alone), run.cpu_threads, asked)


def _shared(parallel: float, before: int, after: int) -> _ThreadsFactor:
    """Threads that fit the cores before and after: Amdahl's law. At worst more of them bring nothing, at best fewer
    cost nothing.
    """
    perfect = 1 - parallel + parallel * before / after
    mid = 1 - parallel + parallel * (before / after) ** _DIMINISHING
    return _ThreadsFactor(mid, min(perfect, 1.0), max(perfect, 1.0), 1.0, Uncertainty(less=0.10, more=0.10))


def _relieved(
    cpu: CpuMetadata, cores: float, before: int, after: int, work_ns: float, spread_ns: float, alone_ns: float,
    recorded_ns: float,
) -> _ThreadsFactor:  # fmt: skip
    """More threads than cores before, threads that fit after. For one rank with its part of the ``cores``. ``work_ns``
    is the time of all cores together that the spread operators took when they were quickest and took ``spread_ns``.

    Of small operators even the quickest call may be mostly its threads waiting for one another. So the more threads
    share a core, the less of it may be work, and the less is sure.
    """
    shared = before / cores
    work = min(work_ns * sqrt(_BUSY), max(cpu.process_ns / cpu.steps, spread_ns)) / sqrt(max(shared / _BUSY, 1.0))
    given = _given(cpu)
    # Cores that the rank got while it wanted some. Schedulers divide cores among jobs (sessions, control groups): other
    # processes take again what they took; what the rank's own threads took from each other stays its own.
    got = min(given * cpu.process_ns / cpu.thread_ns, cores) if cpu.thread_ns else cores
    crowded = got < _OTHERS * cores
    gets = min((got if crowded else cores) / after, 1.0)

    def pace(ns: float) -> float:
        return (alone_ns + ns / after) / gets / recorded_ns

    sure = _CROWDED if crowded else _ALONE
    if shared > _BUSY:
        sure = replace(sure, less=0.0)  # how much less it may be follows from that already
    least = pace(work / max(_SPREAD, shared))
    return _ThreadsFactor(pace(work), least, pace(work * _SPREAD), min(given / gets, 1.0), sure)


def _given(cpu: CpuMetadata) -> float:
    """Share of the time for which the training thread wanted a core in which it had one."""
    wanted_ns = cpu.thread_ns + (cpu.waited_ns or 0)
    return cpu.thread_ns / wanted_ns if wanted_ns else 1.0


SETTINGS = (Setting(NAME, "N", "threads that operators on the CPU are spread over (jobs on CPUs)", _threads, 0),)
