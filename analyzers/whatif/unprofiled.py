"""The recorded schedules as they would be without the profiler, which makes every event that it records longer.

What a step costs without the profiler is known where unprofiled steps were timed. The difference is divided among the
events that the training threads recorded. Own work on the host is that much shorter; kernels on a device are as long as
they were, and only its idle time that the host causes gets shorter: where the hosts are replayed beside the devices, by
what the device then waits less for launches. Example: a step of 12 ms on a CPU with 2000
operators, and 10 ms without the profiler: each operator cost 1 µs, and 500 of them between two collectives 0.5 ms.

An event costs no more than the quickest events take, one after the other. Else all that operators take could go into
their cost, where something else made the recorded steps longer: of 50 ms of 8000 operators nothing is left at 20 µs
each, and 16 ms at 4 µs, which is what the quickest ones took.

On CPUs the profiler also slows down what it does not record: threads that send and sum have to wait for the cores that
it keeps busy. Nothing shows how much. So there a prediction lies between two ends, that it only made the hosts' events
longer, and that it slowed down everything alike but what training threads sleep. Where events cannot have cost that
much, something else slowed the recorded steps down (other programs on the same cores), and the second end is that only
the training threads' own work took longer; see :func:`profiler_costs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.asleep import AsleepShares
from perfscope.analyzers.rank.host_lane import HostTime
from perfscope.analyzers.replay.engine import ReplayResult, replay
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.hosts import HOST_ROWS, HostPart
from perfscope.analyzers.whatif.schedules.ops import ScheduleOp
from perfscope.analyzers.whatif.schedules.recorded import editable_schedules
from perfscope.frozen import dataclass
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Float64, Int64

_ON_HOST: Final = np.array([TimeCategory.COMPUTE, TimeCategory.LAUNCH, TimeCategory.HOST, TimeCategory.UNKNOWN])
"""Own time that the profiler makes longer on a rank that computes on the CPU."""
_ON_DEVICE: Final = np.array([TimeCategory.LAUNCH, TimeCategory.HOST, TimeCategory.UNKNOWN])
"""The same on a rank with a device."""

_OF_HOST: Final = np.array([HostTime.OPERATORS, HostTime.OTHER, HostTime.PAUSES])
"""The same of a host beside its device."""

_CLOSE: Final = 0.002
"""Relative error of the unprofiled step with which the cost of an event is found."""

_UNEXPLAINED: Final = 0.05
"""Share of the unprofiled step that events leave of the difference, from which they are not all that costs."""

_MOST_SLOWER: Final = 4.0
"""Work is slowed down by no more: where it seems to be, less is asleep."""

_MOST_REPLAYS: Final = 5

_MOST_EACH_NS: Final = 20_000.0
"""No event costs more, with shapes, stacks and memory recorded. What is left of a difference has another cause."""

_RUN: Final = 16
"""Events in a row, of which the quickest tell what one costs at most: a single one may begin inside the one before."""

_QUICK: Final = 0.25
"""Share of those rows that count as the quickest: they hold next to no work, and a few hold events that cost less."""


@dataclass(frozen=True, eq=False)
class ProfilerCost:
    """``event_ns``: what the profiler adds to each recorded event of a training thread. ``step_ns``: the job's measured
    step without the profiler. ``replayed``: the recorded schedules without that cost, replayed. ``whole``: is there
    nothing else that the profiler may have slowed down? Else what is left of the difference is of all work alike, which
    takes 1 + ``slower`` times as long. Only what is ``asleep`` takes no longer. ``work_slower``: the same of the work
    of training threads alone, while transfers took no longer. ``most_event_ns``: the most that an event can have cost.
    """

    event_ns: float
    step_ns: float
    replayed: ReplayResult
    events: Mapping[int, RankEvents]
    whole: bool = True
    asleep: Mapping[int, AsleepShares] = field(default_factory=dict)
    slower: float = 0.0
    work_slower: float = 0.0
    most_event_ns: float = _MOST_EACH_NS

    def remove_from(self, schedules: EditableSchedules, result: AlignedJob) -> None:
        """Shorten the own time of every rank by what the events in it cost. What is asleep becomes longer by what all
        is then divided by.
        """
        _remove(schedules, result, self.events, self.event_ns)
        _lengthen(schedules, self.asleep, self.slower)
        _quicken(schedules, self.asleep, self.work_slower)
        step_ns = schedules.recorded.step_time_ns(self.replayed)
        for rank, loading_ns in schedules.loading_step_ns.items():
            schedules.loading_step_ns[rank] = min(loading_ns, step_ns)

    def of_step(self, result: AlignedJob, rank: int) -> float:
        """What the profiler adds to the host's work in a step of one rank, ns."""
        return self.event_ns * _events_per_step(result, rank)

    def most_of_step(self, result: AlignedJob, rank: int) -> float:
        """The most that it can have added, ns."""
        return self.most_event_ns * _events_per_step(result, rank)


@dataclass(frozen=True, eq=False)
class RankEvents:
    """Events of one rank before each op since the one before; with its host beside its device, those up to the launch
    of each piece of work as well, op by op.
    """

    ops: Float64
    pieces: Float64


def profiler_costs(
    result: AlignedJob,
    recorded: RecordedSchedules,
    step_ns: float,
    asleep: Mapping[int, AsleepShares],
    *,
    of_network: bool = False,
    with_hosts: bool = False,
    ready: bool = False,
) -> tuple[ProfilerCost, ...]:
    """What the profiler may have cost, the likely cost first.

    On devices it only made the hosts' events longer, by what has the recorded steps, replayed without that, take
    ``step_ns``; as close to that as can be: where unprofiled steps take longer than the recorded ones, a difference is
    left. ``ready``: in steps that take so long nobody waits for loader workers that set the pace.

    On CPUs, of the hosts' events is likely only what the step became shorter by, since more than that they would have
    lost while they waited for others. What is then left of the difference is taken off all that is replayed, in
    proportion, but for what training threads sleep (``asleep``); where transfers wait for the network (``of_network``),
    off the training threads' work alone. The other costs are that nothing was of the events, and all that is replayed
    took longer; and that all of it was of the events, or where these cannot take as much, of the training threads'
    work, whatever made that slower.

    Example: 10 ms recorded, of them 5 in 1000 events between waits for transfers, and 6 without the profiler. An event
    costs 4 µs if nobody waited for transfers, more if somebody did, and none if all of the step took longer alike.
    """
    schedules = editable_schedules(result, recorded, with_hosts=with_hosts)
    find = _events_of_host if schedules.hosts else _events_before
    events = {rank: find(result, schedules, rank) for rank in schedules.ops}
    on_devices = any(partial.has_device_work for partial in result.partials.values())
    most_ns = _MOST_EACH_NS if on_devices else min(_quickest_ns(result, rank) for rank in schedules.ops)
    found: dict[_Slowed, ProfilerCost] = {}

    def cost_of(slowed: _Slowed) -> ProfilerCost:
        if slowed not in found:
            changed = editable_schedules(result, recorded, with_hosts=with_hosts)
            if ready:
                changed.lift_holds()
            _remove(changed, result, events, slowed.event_ns)
            _lengthen(changed, asleep, slowed.alike)
            _quicken(changed, asleep, slowed.work)
            found[slowed] = ProfilerCost(
                slowed.event_ns, step_ns, replay(changed.compiled()), events, whole=False, asleep=asleep,
                slower=slowed.alike, work_slower=slowed.work, most_event_ns=most_ns,
            )  # fmt: skip
        return found[slowed]

    def step_of(slowed: _Slowed) -> float:
        return recorded.step_time_ns(cost_of(slowed).replayed)

    def alike(event_ns: float) -> ProfilerCost:
        slower = _slower(lambda more: step_of(_Slowed(event_ns, alike=more)), step_ns) if asleep else 0.0
        return cost_of(_Slowed(event_ns, alike=slower))

    def of_work(event_ns: float) -> ProfilerCost | None:
        slower = _work_slower(lambda more: step_of(_Slowed(event_ns, work=more)), step_ns)
        slowed = _Slowed(event_ns, work=slower)
        return cost_of(slowed) if abs(step_of(slowed) / step_ns - 1) <= _UNEXPLAINED else None

    per_step = max(_events_per_step(result, rank) for rank in schedules.ops)
    event_ns = _solve(lambda ns: step_of(_Slowed(ns)), step_ns, per_step, most_ns)
    whole = replace(cost_of(_Slowed(event_ns)), whole=True)
    if event_ns <= 0 or on_devices:
        return (whole,)
    likely_ns = min((step_of(_Slowed()) - step_ns) / per_step, event_ns)
    likely = (of_work(likely_ns) if of_network else None) or alike(likely_ns)
    explained = abs(step_of(_Slowed(event_ns)) / step_ns - 1) <= _UNEXPLAINED
    only_hosts = whole if explained else of_work(0.0)
    return tuple(cost for cost in (likely, only_hosts, alike(0.0)) if cost is not None)


@dataclass(frozen=True)
class _Slowed:
    """What made the recorded steps longer, as in ``ProfilerCost``; ``alike`` and ``work`` are its ``slower`` and
    ``work_slower``.
    """

    event_ns: float = 0.0
    alike: float = 0.0
    work: float = 0.0


def _slower(step_at: Callable[[float], float], target_ns: float) -> float:
    """By what share all work took longer, so that a step of ``target_ns`` became the one at 0.

    ``step_at(more)`` is the step in which what is asleep takes 1 + ``more`` times as long, since all is then divided by
    that. Example: 30 ms of work and 70 asleep became 115 ms, so work takes 45 ms, 1.5 times as long. With ``more`` at
    0.5 the step is 45 + 105, and 1.5 times as long as the target.
    """
    profiled_ns = step_at(0.0)
    first = profiled_ns / target_ns - 1
    if first <= 0:
        return 0.0
    asleep_ns = (step_at(first) - profiled_ns) / first
    work_ns = target_ns - asleep_ns
    return (profiled_ns - target_ns) / work_ns if work_ns > (profiled_ns - target_ns) / _MOST_SLOWER else first


def _work_slower(step_at: Callable[[float], float], target_ns: float) -> float:
    """By what share the work of training threads took longer, so that a step of ``target_ns`` became the one at 0; as
    close to that as ``_MOST_SLOWER`` allows.

    The step is nearly linear in the share of the recorded time that work takes, so each guess lies on a line through
    the ones around the target.
    """
    longest, shortest = (1.0, step_at(0.0)), (1 / (1 + _MOST_SLOWER), step_at(_MOST_SLOWER))
    if shortest[1] >= target_ns:
        return _MOST_SLOWER
    best = longest
    for _ in range(_MOST_REPLAYS):
        if abs(best[1] - target_ns) <= _CLOSE * target_ns:
            break
        part = (target_ns - shortest[1]) / (longest[1] - shortest[1])
        share = shortest[0] + part * (longest[0] - shortest[0])
        best = share, step_at(1 / share - 1)
        longest, shortest = (best, shortest) if best[1] > target_ns else (longest, best)
    return 1 / best[0] - 1


def _solve(
    step_at: Callable[[float], float], target_ns: float, per_step: float, most_ns: float = _MOST_EACH_NS
) -> float:
    """The argument up to ``most_ns`` at which ``step_at``, which falls, is ``target_ns``: by steps along its slope."""
    best, before = (0.0, step_at(0.0)), (0.0, 0.0)
    slope = per_step
    for _ in range(_MOST_REPLAYS):
        excess = best[1] - target_ns
        if excess <= _CLOSE * target_ns or slope <= 0:
            break
        before, cost = best, min(best[0] + excess / slope, most_ns)
        if cost <= best[0]:
            break
        step = step_at(cost)
        if abs(step - target_ns) >= abs(excess):
            break
        best = (cost, step)
        slope = (before[1] - step) / (cost - before[0])
    return best[0]


def _events_per_step(result: AlignedJob, rank: int) -> float:
    return result.partials[rank].host_events.within(*_used_ns(result, rank)) / len(result.steps)


def _quickest_ns(result: AlignedJob, rank: int) -> float:
    """What an event of a rank costs at most: no more than the quickest rows of events take for each, what they compute
    included. ``_MOST_EACH_NS`` where these are not quicker, and of few events.
    """
    host_events = result.partials[rank].host_events
    first, end = np.searchsorted(host_events.at_ns, _used_ns(result, rank))
    return quickest_ns(host_events.at_ns[first:end], host_events.each)


def quickest_ns(at_ns: Int64, each: float) -> float:
    """The same of events at these moments, ``each`` at every one.

    Example: 200 operators follow one another every 3 µs, and 100 others take a millisecond each. An operator costs 3 µs
    at most, however much longer the profiled step is.
    """
    row = max(round(_RUN / each), 1) if each > 0 else _RUN
    if len(at_ns) <= 2 * row:
        return _MOST_EACH_NS
    took = (at_ns[row:] - at_ns[:-row]) / (row * each)
    return min(float(np.quantile(took, _QUICK)), _MOST_EACH_NS)


def _used_ns(result: AlignedJob, rank: int) -> tuple[int, int]:
    """From the begin of the first used step to the end of the last, on the rank's own clock."""
    steps = result.partials[rank].steps
    chosen = steps.indices_of(result.steps)
    return int(steps.host_start_ns[chosen[0]]), int(steps.host_end_ns[chosen[-1]])


def _events_before(result: AlignedJob, schedules: EditableSchedules, rank: int) -> RankEvents:
    """Those while the rank is blocked cost nothing."""
    partial = result.partials[rank]
    own, blocked, at_ns = partial.progress.own, partial.progress.blocked, partial.host_events.at_ns
    if len(own) == 0:
        return RankEvents(np.zeros(len(schedules.ops[rank])), np.empty(0))
    at_ns = at_ns[~blocked.covers(at_ns)]
    progress = at_ns - int(own.start_ns[0]) - blocked.before(at_ns)
    until = np.cumsum([op.own_ns.sum() for op in schedules.ops[rank]])
    bounds = np.concatenate(([0.0], until)) + schedules.recorded.first_progress_ns(result, rank)
    return RankEvents(np.diff(np.searchsorted(progress, bounds)) * float(partial.host_events.each), np.empty(0))


def _events_of_host(result: AlignedJob, schedules: EditableSchedules, rank: int) -> RankEvents:
    partial, recorded = result.partials[rank], schedules.recorded
    side, lane = recorded.lanes[recorded.schedules.line_of(rank)], partial.progress.host
    assert lane is not None
    each, at_ns = float(partial.host_events.each), partial.host_events.at_ns
    at_ops = np.searchsorted(at_ns, side.moment_ns)
    at_launches = np.searchsorted(at_ns, lane.at_ns[side.points.listed])
    return RankEvents(np.diff(at_ops) * each, np.maximum(at_launches - at_ops[side.points.op], 0) * each)


def _remove(
    schedules: EditableSchedules, result: AlignedJob, events: Mapping[int, RankEvents], event_ns: float
) -> None:
    for rank, ops in schedules.ops.items():
        if schedules.hosts:
            _remove_from_host([op.host for op in ops if op.host is not None], events[rank], event_ns)
            continue
        on_device = result.partials[rank].has_device_work
        columns = _ON_DEVICE if on_device else _ON_HOST
        left = 0.0
        for op, count in zip(ops, events[rank].ops, strict=True):
            own = float(op.own_ns[columns].sum())
            left += event_ns * float(count)
            less = min(left, own)
            # What a busy device does not notice brings its host that much ahead, until the two meet.
            left = left - less if on_device and not op.own_ns[TimeCategory.SYNC] else 0.0
            if less:
                op.own_ns[columns] *= 1 - less / own


def _remove_from_host(parts: Sequence[HostPart], events: RankEvents, event_ns: float) -> None:
    begun = 0
    for part, count in zip(parts, events.ops, strict=True):
        end = begun + len(part.launches)
        _shorten(part.own_ns[None, :], np.array([event_ns * count]))
        _shorten(part.launches[:, :HOST_ROWS], event_ns * events.pieces[begun:end])
        begun = end


def _shorten(rows: Float64, by_ns: Float64) -> None:
    """Make what the host does in each line that much shorter, in place."""
    own = rows[:, _OF_HOST].sum(axis=1)
    rows[:, _OF_HOST] *= (1 - np.divide(np.minimum(by_ns, own), own, out=np.zeros_like(own), where=own > 0))[:, None]


def _lengthen(schedules: EditableSchedules, asleep: Mapping[int, AsleepShares], slower: float) -> None:
    """Make what is asleep 1 + ``slower`` times as long."""
    for rank, shares in asleep.items() if slower else ():
        ops = schedules.ops[rank]
        for category, share in shares.items():
            for op, slept in zip(ops, _slept(ops, category, share).tolist(), strict=True):
                op.own_ns[category] *= 1 + slept * slower


def _quicken(schedules: EditableSchedules, asleep: Mapping[int, AsleepShares], slower: float) -> None:
    """Make the work of training threads as long as it was before it took 1 + ``slower`` times as long."""
    for rank, ops in schedules.ops.items() if slower else ():
        shares = asleep.get(rank, {})
        # Workers load beside the training thread; a loader without any is known by its share.
        rows = [*_ON_HOST, *({TimeCategory.DATALOADER} & shares.keys())]
        slept = [_slept(ops, TimeCategory(row), shares.get(TimeCategory(row), 0.0)) for row in rows]
        for op, kept in zip(ops, np.stack(slept, axis=1), strict=True):
            op.own_ns[rows] *= kept + (1 - kept) / (1 + slower)


def _slept(ops: Sequence[ScheduleOp], category: TimeCategory, share: float) -> Float64:
    """The share of each op's time in ``category`` that is slept, if ``share`` of all is. Threads sleep for long at a
    time: what the ops take longer than some length, but for loading, which sleeps a little for each sample.
    """
    own = np.array([float(op.own_ns[category]) for op in ops])
    if category == TimeCategory.DATALOADER or not share or not own.any():
        return np.full(len(own), share)
    longest = np.sort(own)[::-1]
    above = np.cumsum(longest) - np.arange(1, len(own) + 1) * longest  # more than each of them, in all
    count = int(np.searchsorted(above, share * own.sum(), side="right"))  # so many are slept in
    length = (longest[:count].sum() - share * own.sum()) / count
    return np.asarray(np.divide(np.maximum(own - length, 0.0), own, out=np.zeros_like(own), where=own > 0))
