"""How far the step may be from the one that a replay predicts: low and high of a what-if.

Collectives between CPUs take cores, and give them back where less is sent. Threads of gloo's copy and sum what is sent.
Where there are no more cores than training threads, they take them from these, and each rank recorded how long its
training thread waited for a core. No trace shows who had the core: threads of the same process, whose CPU time is
recorded too, or others of the machine. So where a change takes out a share of what transfers take, up to that share of
the waits may go with it; half of that is predicted.

Example: the training thread of a rank waits 10 ms of each step for a core, and the other threads of its process compute
for 12 ms. Without three quarters of the transfers the step is 0 to 7.5 ms shorter than the replay has it.

What ranks compute, whatever else changes, a step takes at least, however uncertain a prediction is, and what their
training threads ran, as far as no change can have taken that. Example: without
its pauses a step of 46 ms is predicted to take 12, and by its range nothing, since it is not known what the profiler
slowed down. Its ranks compute for 6 ms of it, so it takes 6 or more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.job.cores import cores_needed
from perfscope.analyzers.replay.variation import most_below, of_odd_step, standard_error
from perfscope.analyzers.whatif import loader
from perfscope.analyzers.whatif.change import Context, Uncertainty
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.frozen import dataclass
from perfscope.recording.metadata import RunMetadata
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Float64, Int64

_SUREST: Final = 0.01
"""Share of the step time that a prediction may be off however little is changed: other things vary as much."""

_HOST_PACE: Final = 1.15
"""How much longer than what it does a host may take for a step that it limits."""

_FOR_HOST: Final = [TimeCategory.SYNC, TimeCategory.LAUNCH, TimeCategory.HOST]
"""A device's idle time for its host."""

_OF_DEVICE: Final = [TimeCategory.COMPUTE, TimeCategory.COPY]
"""A device's work."""

_EXPOSED: Final = [TimeCategory.COMM_WAIT, TimeCategory.COMM_TRANSFER]
"""A device's time for communication that no computation overlaps."""

_SAME_WORK: Final = ("rank.", "ranks.")
"""Settings that change who computes when, and not how much all of them compute."""

_ALONE: Final = 0.10
"""Share by which kernels may take longer beside communication than alone."""

_RUN_UNLIKE: Final = 0.10
"""Share by which a step may take less CPU time than the recorded ones on their mean, of which it is known together."""


@dataclass(frozen=True)
class ChangedStep:
    """What a step takes with settings changed, ns, how much less it may take as cores are freed, and each one as
    replayed; how sure that is, whether latencies are uncertain, or anything else is that makes a range (``doubtful``),
    and what was assumed.
    """

    step_ns: float
    busy_ns: float
    """What the busiest device computes and copies in a step, at least, or on CPUs what a rank computes whatever is
    changed; 0 where that is not asked for."""
    freed_ns: float
    alone_ns: float
    """By how much less it may take as fewer transfers run beside kernels; 0 where that is not asked for."""
    steps_ns: Int64
    shorter_ns: float
    """By how much fewer waits for loader workers may make it shorter; ``steps_ns`` are without any of them."""
    longest_pace_ns: float
    """What loader workers may make of it, by what batches take them; 0 where that is not known."""
    settling: int
    sure: Uncertainty
    unsure: bool
    doubtful: bool
    of_loading: bool
    """Waits for loader workers leave open whether these set the pace."""
    unheld: bool
    """They are taken not to."""
    assumed: tuple[str, ...]
    removed_ns: Mapping[int, float]
    """Rank -> CPU time that the change takes from a step, at most; empty on devices."""


def unsure_shares(
    context: Context, changed: ChangedStep, steps: Int64, error: float, *, of_ranks: bool
) -> tuple[tuple[float, float], float]:
    """(shares of a prediction by which it may be less and more whatever was changed, ns than which it is no less where
    loader workers may have been waited for too often): the recorded ``steps`` are few, and their replay has an error.
    ``of_ranks``: other ranks' pace is what changes.
    """
    mid, unseen = changed.step_ns * context.correction, loader.unseen_variation(context)
    varies = standard_error(steps, unseen)
    if of_ranks:  # what others did while they waited varies unseen
        varies = max(varies, standard_error(changed.steps_ns, unseen))
    share = _SUREST + error + 2 * varies + of_odd_step(changed.steps_ns)
    fall = min(share, _SUREST + error + most_below(changed.steps_ns, mid, context.correction))
    if not changed.shorter_ns or mid <= 0:
        return (fall, share), -math.inf
    # Without any wait for workers steps take what they do else.
    others = changed.steps_ns[min(changed.settling, len(changed.steps_ns) - 1) :]
    their = _SUREST + error + 2 * standard_error(others, unseen)
    least = float(others.mean()) * context.correction * (1 - their)
    return (max(min(fall + changed.shorter_ns * context.correction / mid, 1 - least / mid), their), share), least


def by_hosts(context: Context, measured: float, mid: float, *, of_host_work: bool) -> tuple[float, float]:
    """(least, most) that the hosts' pace may make of a prediction, ns.

    A host that limits a faster step may take longer for it than the work that is known of it. And while a device waits
    for its host, it could do more in the same time: a change for the worse may cost nothing. Where the host's own work
    is what changes (``of_host_work``), the recorded work says neither.
    """
    if not context.on_devices or of_host_work:
        return mid, mid
    ranks = list(context.result.partials)
    if mid <= measured:
        busy = max(context.host_busy_ns(rank) for rank in ranks)
        return mid, max(mid, min(measured, _HOST_PACE * busy))
    idle = max(float(context.result.totals[rank][:, _FOR_HOST].sum(axis=1).mean()) for rank in ranks)
    return mid - min(mid - measured, idle), mid


def by_cores(context: Context, settings: Collection[str], paced: Sequence[int]) -> tuple[float, float]:
    """(least, most) that a step may take where ranks share cores, ns, on CPUs; zeros where the ``settings`` change how
    much is computed, or nothing shows it. The CPU time is that of the profiled steps: without the profiler it is less,
    by as much as they are at least.
    """
    told = all(_tells_cpu_time(run, len(context.result.steps)) for run in context.runs.values())
    if context.on_devices or not told or not all(name.startswith(_SAME_WORK) for name in settings):
        return 0.0, 0.0
    needed = cores_needed(context.runs, paced)
    profiler = context.profiler
    share = min(profiler.step_ns / context.result.step_ns, 1.0) if profiler is not None else 1.0
    return share * needed.least_ns, share * needed.contended_ns


def range_around(measured: float, mid: float, shares: tuple[float, float], sure: Uncertainty) -> tuple[float, float]:
    """(low, high) of a prediction, ns: ``shares`` of it, below and above, are uncertain whatever was changed."""
    saving = abs(measured - mid)
    below, above = (sure.either_ns + share * mid for share in shares)
    # What makes a step longer makes it no shorter.
    less = (sure.less if mid <= measured else min(sure.less, 1.0)) * saving
    more = sure.more * saving
    toward_slower, toward_faster = (less, more) if mid <= measured else (more, less)
    return max(mid - (toward_faster + below + sure.faster_ns), 0.0), mid + (toward_slower + above + sure.slower_ns)


def least_of_devices_ns(schedules: EditableSchedules, context: Context, sure: Uncertainty) -> float:
    """What the busiest device takes for its computation and its copies in a step with these ``schedules``, as far as
    that is ``sure``. No step is shorter, whatever waits for it.
    """
    used = frozenset(context.result.steps.tolist())
    least = 0.0
    for rank, ops in schedules.ops.items():
        own_ns = np.array([op.own_ns for op in ops if op.step in used])
        left = float(own_ns[:, _OF_DEVICE].sum()) / len(used) if len(own_ns) else 0.0
        recorded = float(context.result.totals[rank][:, _OF_DEVICE].sum(axis=1).mean())
        least = max(least, left - sure.more * max(recorded - left, 0.0))
    return (1 - _ALONE) * max(least, 0.0)


def transfers_ns(schedules: EditableSchedules) -> dict[int, float]:
    """Rank -> what all its transfers take together, ns."""
    taken = dict.fromkeys(schedules.ops, 0.0)
    for rank_op in schedules.issued():
        taken[rank_op.rank] += rank_op.transfer_ns
    return taken


def quicker_alone_ns(context: Context, before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """By how much kernels may take less in a step because fewer transfers run beside them, ns; 0 on CPUs, where
    ``freed_ns`` is that. ``before`` and ``after``: the ranks' ``transfers_ns``.

    Example: transfers overlap 48 ms of the kernels' time, and take half as long. Kernels that took a tenth longer
    meanwhile, 24 ms for what takes 21.8 alone, save 2.2 ms.
    """
    if not context.on_devices:
        return 0.0
    result, most = context.result, 0.0
    for rank, taken in before.items():
        overlapped = float((result.communication[rank] - result.totals[rank][:, _EXPOSED].sum(axis=1)).mean())
        less = max(1 - after[rank] / taken, 0.0) if taken else 0.0
        most = max(most, less * max(overlapped, 0.0))
    return most * (1 - 1 / (1 + _ALONE))


def freed_ns(context: Context, before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """By how much a step may become shorter where training threads wait less for cores, in the replay's time; 0 where
    nothing shows it. ``before`` and ``after``: the ranks' ``transfers_ns``.
    """
    if context.on_devices or context.events_cost_all:  # what events cost includes the waits for cores
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
    """Rank -> what it computes in all used steps, ns."""
    return {rank: float(own_ns[:, TimeCategory.COMPUTE].sum()) for rank, own_ns in _own_ns(schedules).items()}


def _own_ns(schedules: EditableSchedules) -> dict[int, Float64]:
    """Rank -> own time before each of its ops in used steps, by category."""
    used, none = frozenset(schedules.recorded.steps[schedules.recorded.used].tolist()), np.zeros((0, len(TimeCategory)))
    return {rank: np.array([op.own_ns for op in ops if op.step in used] or none) for rank, ops in schedules.ops.items()}


def least_computed_ns(
    before: Mapping[int, float], after: Mapping[int, float], context: Context, freed_ns: float
) -> float:
    """The most that a rank computes per step whose computing (``computed_ns``) a change leaves as it was, or adds to; 0
    where it takes something from all ranks'. Where the change frees cores (``freed_ns``), or what it waited for one was
    hidden, it need not wait for one meanwhile. It is as sure as steps are alike in what they compute, however unlike
    their waits are.
    """
    same = (
        before[rank] * (_running(context.runs.get(rank)) if freed_ns else 1.0) * (1 - _unlike(context, rank))
        for rank, ns in after.items()
        if ns > before[rank] or math.isclose(ns, before[rank], rel_tol=1e-6)
    )
    return max(same, default=0.0) / max(len(context.result.steps), 1)


@dataclass(frozen=True)
class RankWork:
    """What a rank does: its own time in all used steps, ns, and how many collectives it issues in all recorded ones."""

    own_ns: float
    issued: int


def work_of_ranks(schedules: EditableSchedules) -> dict[int, RankWork]:
    """That of each rank."""
    issued = Counter(rank_op.rank for rank_op in schedules.issued())
    return {rank: RankWork(float(own_ns.sum()), issued[rank]) for rank, own_ns in _own_ns(schedules).items()}


def removed_ns(
    context: Context,
    before: tuple[Mapping[int, float], Mapping[int, RankWork]],
    after: tuple[Mapping[int, float], Mapping[int, RankWork]],
) -> dict[int, float]:
    """Rank -> CPU time that a change takes from a step at most, ns, in the replay's time: what its training thread does
    itself less, all of it taken to be that, and of its process's other threads what they did for transfers that are
    left out. ``before`` and ``after``: the ranks' ``transfers_ns`` and ``work_of_ranks``.
    """
    steps = max(len(context.result.steps), 1)
    removed = {}
    for rank, taken in before[0].items():
        run = context.runs.get(rank)
        cpu = run.cpu if run is not None else None
        others_ns = max(cpu.process_ns - cpu.thread_ns, 0) / cpu.steps if cpu is not None and cpu.steps else 0.0
        less = max(1 - after[0][rank] / taken, 0.0) if taken else 0.0
        removed[rank] = max(before[1][rank].own_ns - after[1][rank].own_ns, 0.0) / steps + less * others_ns
    return removed


def on_shared_cores_ns(context: Context, measured: float, changed: ChangedStep) -> float:
    """What a step takes where other programs go on to use as much of the hosts' cores, no more than is ``measured``; 0
    where that is not known.
    """
    removed = {rank: ns * context.correction for rank, ns in changed.removed_ns.items()}
    least = (shared.least_ns(measured, removed) for shared in context.shared_cores)
    return min(max(least, default=0.0), measured) if removed else 0.0


def least_run_ns(before: Mapping[int, RankWork], after: Mapping[int, RankWork], context: Context) -> float:
    """The most CPU time that the training thread of a rank takes in a step whatever is changed, in the replay's time; 0
    where that is not known. What the profiler's events take of it is left out, at the most that they can; where work is
    taken to have been slower in the recorded steps, so is this. What a change takes from a rank's own time may all have
    been CPU time, and nobody knows what the collectives took that it leaves out.

    Example: the training thread runs for 9 ms of each step, of which 200 events cost 5 µs each at most. Whatever
    becomes of the pauses of other ranks, the step takes 8 ms, less a tenth.
    """
    steps, profiler = len(context.result.steps), context.profiler
    most = 0.0
    for rank, work in before.items():
        run = context.runs.get(rank)
        if run is None or run.cpu is None or not _tells_cpu_time(run, steps) or after[rank].issued < work.issued:
            continue
        run_ns = run.cpu.thread_ns / steps
        if profiler is not None:
            run_ns = (run_ns - profiler.most_of_step(context.result, rank)) / (1 + profiler.work_slower)
        run_ns *= 1 - _RUN_UNLIKE
        most = max(most, run_ns - max(work.own_ns - after[rank].own_ns, 0.0) / steps)
    return most / max(context.correction, 1.0)


def _tells_cpu_time(run: RunMetadata, steps: int) -> bool:
    """Is the CPU time of a rank's training known, of these steps alone? It is of all captured steps: some may have been
    left out, which evaluate. Of several threads of operators each waits for the others.
    """
    return run.cpu is not None and run.cpu.steps == steps and (run.cpu_threads or 1) == 1


def _unlike(context: Context, rank: int) -> float:
    """How far what a rank computes in a step may be below the mean of the recorded steps, a share of that."""
    computed = context.result.totals[rank][:, TimeCategory.COMPUTE]
    if not computed.any():
        return 0.0
    varies = standard_error(computed, loader.unseen_variation(context))
    return min(_SUREST + 2 * varies + of_odd_step(computed), 1.0)


def _running(run: RunMetadata | None) -> float:
    """Share of its training thread's time in which it ran, of that in which it wanted to; 1 where that is not known."""
    cpu = run.cpu if run is not None else None
    if cpu is None or cpu.waited_ns is None or not cpu.thread_ns:
        return 1.0
    return cpu.thread_ns / (cpu.thread_ns + cpu.waited_ns)
