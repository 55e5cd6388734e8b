"""Setting of the data loader: the number of workers.

A worker takes as long for a batch as recorded; W workers together deliver W batches in that time, so a step takes at
least batches x load time / W. Without workers the host loads each batch itself, while its device may still work. The
sampler draws indices on the training thread in any case. Workers that are started again for every epoch delay
the first batch, however many they are.

Workers that compute need cores, and so does the training. Where the CPU time of both is recorded, a step takes at least
all CPU time over all cores; and a worker that computes while every core is busy takes that time from the training.
Example: a rank with one core trains for 60 ms, computes in 45 of them and waits for the network in the others; loading
takes 20 ms of CPU time. A worker of its own finds the core busy in 3 of 4 cases and then takes it from the training: 60
+ 3/4 x 20 = 75 ms. At best it always finds the core idle (65, all CPU time), at worst never (80); passing batches
between processes is added to that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import hypot, inf, sqrt
from statistics import median
from typing import Final

from perfscope.analyzers.job.cores import CpuDemand, demands, needed_ns
from perfscope.analyzers.job.deliveries import first_of_workers, taking_ns
from perfscope.analyzers.job.loading import dataloader_rows
from perfscope.analyzers.job.unprofiled import paced_ranks
from perfscope.analyzers.rank.host_lane import HostTime
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif.change import (
    CannotReplay,
    Context,
    Setting,
    Uncertainty,
    launch_sooner,
    whole_number,
)
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.ops import ScheduleOp
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.results.rows import DataLoaderRow

_TAKING_NS: Final = 100_000.0
"""Time to take a batch that a worker has delivered: unpickling, and the queue."""
_TAKING_MOST_NS: Final = 250_000.0
"""It may be as long, as long as no batch was taken from a worker."""
_SURE: Final = Uncertainty(less=0.15, more=0.05)
"""Of a prediction with known CPU time of loading."""
_FEWER: Final = Uncertainty(less=0.20, more=0.05)
"""Of a prediction for fewer workers than set the pace now: cores are not the limit then."""
_BATCHES_VARY: Final = 0.1
"""Standard deviation of what a batch takes to load, as a share: of few that were timed, the mean is no better."""
_STEPS_VARY: Final = 0.02
"""The same of a job's steps, as long as no steps show it."""
_WAITS: Final = 0.01
"""Share of the step from which it waits for its batches."""
_SHOWN: Final = 0.05
"""Share of the step that waits for batches take from which they show what a step takes without them."""
_CROWDED_BY_OTHERS: Final = 0.5
"""Share of the saving that becomes uncertain each time that the training's work takes as long as its CPU time again:
the scheduler favours a training that sleeps over one that never does."""
_ANYTHING: Final = 1.25
"""Share of the saving that may be lost where nothing is known: passing batches between processes takes time too."""


def unseen_variation(context: Context) -> float:
    """Standard deviation of a job's steps, as a share, as long as no steps show it. Batches vary more than what a step
    does with them; all of what one takes longer the step does, too, where the step waits for it at all.
    """
    loading, step_ns = 0.0, context.result.step_ns
    for rank, totals in context.result.totals.items():
        partial = context.result.partials[rank]
        used = partial.steps.indices_of(context.result.steps)
        if totals[:, TimeCategory.DATALOADER].mean() >= _WAITS * step_ns:
            share = min(float(partial.loading.waited_ns[used].mean()) / step_ns, 1.0)
            loading = max(loading, share / sqrt(max(context.result.batches_per_step[rank], 1.0)))
    return hypot(_STEPS_VARY, _BATCHES_VARY * loading)


def of_turns_ns(context: Context, paced: Collection[int]) -> tuple[float, float]:
    """(how much longer, how much shorter) the mean of many steps may be because loader workers deliver in turns. Where
    these set the pace, as many steps may hold more or less of their waits: half a wait. Of a single worker each step
    holds one, which is as long as its batch takes. Where it is not sure that they set the pace, the waits are too few
    to show how often they come: a whole one less. ``paced`` are the ranks whose workers still may.
    """
    steps = max(len(context.result.steps), 1)
    varies = _BATCHES_VARY * context.result.step_ns / sqrt(steps)
    slower, faster = 0.0, 0.0
    for rank, found in context.recorded.deliveries.items():
        one = found.longest_ns / 2 / steps
        one = min(one, varies) if found.workers == 1 else one
        slower = max(slower, one)
        if found.sure or rank in paced:
            faster = max(faster, one if found.sure else found.longest_ns / steps)
    return slower, faster


def keep_workers_pace(schedules: EditableSchedules, context: Context) -> None:
    """No step is shorter than what its batches take to fetch, divided among the workers, or than the CPU time of that,
    where either is recorded.
    """
    for rank, (least, _) in _fetching_ns(context).items():
        if rank in schedules.ops:
            known = schedules.loading_step_ns.get(rank, 0.0)
            schedules.loading_step_ns[rank] = max(known, min(least, context.result.step_ns))


def keep_unprofiled_pace(schedules: EditableSchedules, context: Context) -> None:
    """A step is as long as it was timed without the profiler where its batches take the workers that long, and the
    recorded steps do not show it.
    """
    if context.ready_ns is not None and context.unprofiled_ns is not None:
        for rank in paced_ranks(context.runs, context.result, context.unprofiled_ns) & schedules.ops.keys():
            schedules.loading_step_ns[rank] = context.unprofiled_ns / context.correction


def longest_pace_ns(schedules: EditableSchedules, context: Context) -> float:
    """What a step may take because of what its batches take to fetch, of which a few were timed: the recorded steps may
    have taken batches that were ready, which later ones wait for. Of ranks whose workers still set their pace.
    """
    paces = _fetching_ns(context).items()
    return max(((1 + error) * least for rank, (least, error) in paces if rank in schedules.loading_step_ns), default=0)


def _fetching_ns(context: Context) -> dict[int, tuple[float, float]]:
    """Rank -> (what the workers take for the batches of a step, its relative error), where either was timed."""
    found = {}
    for rank, run in context.runs.items():
        loader = run.dataloaders[0] if run.dataloaders else None
        if loader is not None and loader.num_workers:
            batch_ns = max(loader.load_cpu_ns / max(loader.timed_batches, 1), loader.fetched_ns or 0.0)
            error = 2 * _BATCHES_VARY / sqrt(max(loader.timed_batches, loader.fetched_batches, 1))
            step_ns = batch_ns * context.result.batches_per_step[rank] / loader.num_workers
            found[rank] = step_ns / context.correction, error
    return found


def hidden_waits_ns(context: Context, rank: int) -> float:
    """What a training thread waits for a core per step without that this makes the step longer, at most: all of it
    where its workers take as long for a batch as any step, and the thread hardly waits for one, as it would otherwise.
    0 where that is not recorded.

    Example: a worker takes 120 ms for a batch, and so does a step, of which the thread runs for 60 and waits 55 for a
    core: with a core at once it would wait as long for the batch.
    """
    run, step_ns = context.runs.get(rank), context.result.step_ns
    if run is None or run.cpu is None or not run.cpu.steps:
        return 0.0
    loading_ns = float(context.result.totals[rank][:, TimeCategory.DATALOADER].mean())
    longest_ns = max(step_ns, context.unprofiled_ns or 0.0)
    if loading_ns >= _SHOWN * step_ns or rank not in paced_ranks(context.runs, context.result, longest_ns):
        return 0.0
    return (run.cpu.waited_ns or 0) / run.cpu.steps


def _workers(schedules: EditableSchedules, context: Context, name: str, value: str) -> Uncertainty:
    workers = whole_number(name, value, "a number of workers", least=0)
    rows = {row.rank: row for row in dataloader_rows(context.result, context.runs)}
    if not rows:
        raise CannotReplay(f"{name}: the recorded steps draw no batch from a DataLoader")
    batches = {rank: row.batches_per_step for rank, row in rows.items()}
    slower = context.profiler.work_slower if context.profiler is not None else 0.0
    needs = {
        rank: replace(need, training_ns=need.training_ns / (1 + slower))
        for rank, need in demands(context.runs, batches).items()
    }
    usual_us = [row.batch_us for row in rows.values() if row.batch_us is not None]
    sure: list[Uncertainty] = []
    for rank in schedules.ops:
        if rank not in rows:
            continue
        row, batch_us = rows[rank], rows[rank].batch_us
        if row.num_workers == workers:
            continue  # nothing changes
        if batch_us is None:
            if not len(context.recorded.deliveries[rank]) and workers >= _had(context, row, rows):
                continue  # they are quick enough already, and more of them change nothing
            if not usual_us:
                raise CannotReplay(
                    f"{name}: no rank waits for its workers, or their number is not known, so the load time of a batch "
                    "is not known; record a run with num_workers=0, or with perfscope run"
                )
            batch_us = median(usual_us)
        # Workers are not profiled, and those that sleep are not slowed down by what slows down the training.
        load = batch_us * 1e3 * batches[rank] / context.correction
        sampler = row.sampler_us * 1e3 / context.correction
        schedules.at_least(rank, load / workers if workers else 0.0)
        taking = _taking_ns(context, row) * batches[rank] if workers else load
        kept = starting_steps(context, rank) if workers and row.num_workers else frozenset[int]()
        need = needs.get(rank)
        if need is None:
            _set_loading(schedules, context, rank, taking + sampler, load + sampler, batches[rank], kept)
            more = workers >= _had(context, row, rows)
            of_rank = _unknown(context, rank, workers) if more else _fewer(context, rank, load / max(workers, 1))
            if workers and not row.num_workers:
                longer = (_TAKING_MOST_NS - _TAKING_NS) * batches[rank]
                allowed = of_rank.less * max(load - taking, 0.0)  # a part of the saving, or more than that
                of_rank = replace(of_rank, slower_ns=max(longer - allowed, 0.0))
            sure.append(of_rank)
            continue
        contended = _contended(context, row, need, workers, batches[rank])
        taking = max(taking + contended.mid - contended.before, 0.0)
        _set_loading(schedules, context, rank, taking + sampler, load + sampler, batches[rank], kept)
        # Work that fits into a step now will still fit. The profiler's own CPU time is in what was recorded.
        profiling = context.profiler.of_step(context.result, rank) if context.profiler is not None else 0.0
        least, floor = (
            min(max(needed_ns(needs, rank, batches) * longer - profiling, 0.0), context.result.step_ns)
            for longer in (1.0, need.slowdown)
        )
        schedules.at_least(rank, floor)
        less = min(_SURE.less + _CROWDED_BY_OTHERS * (need.slowdown - 1), _ANYTHING)
        sure.append(
            Uncertainty(
                less=_FEWER.less if workers < (row.num_workers or 0) else less,
                more=_SURE.more,
                slower_ns=contended.most - contended.mid,
                faster_ns=max(contended.step_ns + contended.mid, floor)
                - max(contended.step_ns - hidden_waits_ns(context, rank), least),
            )
        )
    return Uncertainty.worst(sure)


def _taking_ns(context: Context, row: DataLoaderRow) -> float:
    """What taking a batch from a worker costs: as recorded, where a rank's workers had some ready."""
    if row.num_workers == 0:
        return _TAKING_NS
    found = context.recorded.deliveries.get(row.rank)
    if found is not None and found.sure and found.share == 1:
        return _TAKING_NS  # none was ready
    recorded = taking_ns(context.result.partials[row.rank], context.result.taking_at_most_ns[row.rank])
    return _TAKING_NS if recorded is None else recorded


def _fewer(context: Context, rank: int, least_ns: float) -> Uncertainty:
    """With fewer workers a step takes what its batches take these, ``least_ns``, of which a few batches are known."""
    run = context.runs.get(rank)
    timed = run.dataloaders[0].fetched_batches if run is not None and run.dataloaders else 0
    error = 2 * _BATCHES_VARY / sqrt(max(timed, len(context.recorded.deliveries[rank]), 1))
    limits = (1 + error) * least_ns > context.result.step_ns
    return replace(_FEWER, slower_ns=error * least_ns if limits else 0.0)


def _had(context: Context, row: DataLoaderRow, rows: Mapping[int, DataLoaderRow]) -> float:
    """The number of workers of a rank; where it is not known the most that other ranks show; else infinite."""
    if row.num_workers is not None:
        return row.num_workers
    shown = [context.recorded.deliveries[rank].workers for rank in rows]
    return max((count for count in shown if count is not None), default=inf)


@dataclass(frozen=True)
class _Contended:
    """By how much a step is longer because workers take cores from its training, ns."""

    before: float
    """With the workers that it has."""
    mid: float
    """With the new number; at least 0."""
    most: float
    step_ns: float
    """The recorded step without its loading."""


def _contended(context: Context, row: DataLoaderRow, need: CpuDemand, workers: int, batches: float) -> _Contended:
    step_ns = context.result.mean_step_ns(row.rank) - row.fetching_us * 1e3
    at_work = min(need.training_ns * need.slowdown / (step_ns * need.threads), 1.0) if step_ns > 0 else 1.0
    loading_ns = need.batch_ns * need.slowdown * batches
    if not row.num_workers:  # they take from the training at most the time that it now waits for loading
        loading_ns = min(loading_ns, row.fetching_us * 1e3)
    crowding = _crowding(need, workers)
    # A worker has one thread: where several loaded a batch, it takes longer.
    alone = (need.batch_most_ns - need.batch_ns) * batches / workers if workers else 0.0
    return _Contended(
        before=_crowding(need, row.num_workers or 0) * at_work * loading_ns / need.cores,
        mid=crowding * at_work * loading_ns / need.cores,
        most=crowding * loading_ns * _ANYTHING + alone,
        step_ns=step_ns,
    )


def _crowding(need: CpuDemand, workers: int) -> float:
    """Share of the workers beyond the cores that the training never uses."""
    return min(max(workers - (need.cores - need.threads), 0.0) / workers, 1.0) if workers else 0.0


def _unknown(context: Context, rank: int, workers: int) -> Uncertainty:
    """It is not known whether loading computes or waits. Where it computes and all cores are busy, nothing is saved,
    and passing batches between processes takes time too.
    """
    run = context.runs.get(rank)
    fits = run is not None and run.cpu_count is not None and (workers + 1) * run.local_world_size <= run.cpu_count
    return Uncertainty(less=0.20 if fits else _ANYTHING, more=0.0)


def _loaded_before_ns(context: Context, rank: int) -> int:
    """For how long a rank loaded before its first window, where that is no more than assumed to begin so late."""
    recorded, partial = context.recorded, context.result.partials[rank]
    begin = partial.steps.start_ns[partial.steps.indices_of(recorded.steps[:1])]
    assumed = recorded.assumed_ns[recorded.schedules.line_of(rank), :1]
    loading = Intervals.of(partial.loading.start_ns, partial.loading.end_ns)
    return int(loading.within(begin - assumed, begin)[0])


def _set_loading(
    schedules: EditableSchedules, context: Context, rank: int, per_step_ns: float, load_ns: float, batches: float,
    kept: frozenset[int],
) -> None:  # fmt: skip
    """Set the loader's time in every step of one rank, in which loading takes a worker ``load_ns``: at each batch,
    where hosts are beside their devices; else at the op that had most. Outside the steps there is none. Steps that are
    ``kept`` wait for their longest batch as they did.
    """
    by_step: dict[int, list[ScheduleOp]] = {}
    schedules.free_loading([rank])
    if context.recorded.steps[0] not in kept:
        loading = context.result.timelines[rank].where(TimeCategory.DATALOADER)
        less = max(1 - per_step_ns / max(load_ns, 1.0), 0.0)
        launch_sooner(schedules, context, rank, loading, less)
        schedules.begin_sooner(rank, less * _loaded_before_ns(context, rank))
    before: int | None = None
    for op in schedules.ops[rank]:
        # Own time is before its op: that of the mark that begins a step is still of the step before.
        step = before if op.kind is OpKind.MARK else op.step
        before = op.step
        if step is not None:
            by_step.setdefault(step, []).append(op)
        elif op.host is not None:
            op.host.set_host(HostTime.LOADER, per_step_ns / batches if op.kind is OpKind.HOLD else 0.0)
    for step, ops in by_step.items():
        most = max(ops, key=_loading_ns)
        longest_ns = _loading_ns(most) if step in kept else 0.0
        for op in ops:
            if op.host is None:
                op.own_ns[TimeCategory.DATALOADER] = max(per_step_ns, longest_ns) if op is most else 0.0
            elif op is not most or step not in kept:
                op.host.set_host(HostTime.LOADER, per_step_ns / batches if op.kind is OpKind.HOLD else 0.0)


def _loading_ns(op: ScheduleOp) -> float:
    """What the host loads before an op; of a rank without hosts beside the device, what it waits for."""
    return float(op.own_ns[TimeCategory.DATALOADER] if op.host is None else op.host.own_ns[HostTime.LOADER])


def starting_steps(context: Context, rank: int) -> frozenset[int]:
    """Steps of a rank that take the first batch of workers that start."""
    partial = context.result.partials[rank]
    start_ns = partial.loading.start_ns
    at = partial.steps.of_host_time(start_ns[first_of_workers(partial, start_ns)])
    return frozenset(partial.steps.number[at[at >= 0]].tolist())


SETTINGS = (Setting("dataloader.num_workers", "N", "DataLoader(num_workers=N)", _workers, 0, with_hosts=True),)
