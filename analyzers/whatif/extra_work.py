"""Settings that leave out work that need not be done: activations computed again, changes of memory layout, the many
kernels of an optimizer that loops over parameters.

The recording shows when a rank does it. Each op loses the share of its own time by category, and its host the share of
its own work, that lies there. What would take its place is not replayed: without recomputation the forward keeps its
tensors, and convolutions on tensors whose channels are last run other kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Final

import numpy as np

from perfscope.analyzers.rank.extra_work import FEW
from perfscope.analyzers.rank.host_lane import HostTime
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.partial import ExtraWork, RankPartial
from perfscope.analyzers.rank.timeline import Timeline
from perfscope.analyzers.whatif.change import CannotReplay, Context, Setting, Uncertainty, number
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.hosts import HOST_ROWS, OF_DEVICE_ROWS, HostPart
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Float64, Int64

_OF_RANK: Final = (
    TimeCategory.COMPUTE, TimeCategory.COPY, TimeCategory.DEPENDENCY, TimeCategory.LAUNCH, TimeCategory.HOST,
    TimeCategory.UNKNOWN,
)  # fmt: skip
"""A rank's own time that goes with such work."""
_OF_HOST: Final = [HostTime.OPERATORS, HostTime.OTHER, HostTime.PAUSES]


def _left_out(
    of: Callable[[RankPartial], ExtraWork], missing: str, sure: Uncertainty,
    schedules: EditableSchedules, context: Context, name: str, value: str,
) -> Uncertainty:  # fmt: skip
    """``value`` times such work. Raises CannotReplay, with ``missing``, where none is recorded."""
    left = number(name, value, "the share of it that is left, from 0 (none) to 1 (all)", zero=True)
    result = context.result
    every = {rank: of(result.partials[rank]) for rank in schedules.ops}
    if not any(work.count[_used(context, rank)].any() for rank, work in every.items()):
        raise CannotReplay(f"{name}: {missing}")
    for rank, work in every.items():
        leave_out(schedules, context, rank, work, 1 - left)
        if not schedules.hosts and result.partials[rank].has_device_work and rank not in context.paced:
            steps, used = result.partials[rank].steps, _used(context, rank)
            host_ns = float(work.host.within(steps.host_start_ns[used], steps.host_end_ns[used]).mean())
            schedules.at_least(rank, max(context.host_busy_ns(rank) - (1 - left) * host_ns, 0.0))
    return sure


def leave_out(schedules: EditableSchedules, context: Context, rank: int, work: ExtraWork, share: float = 1.0) -> None:
    """``share`` of such work of one rank is not done. Its ops must still be those that were recorded."""
    (_shorten_lanes if schedules.hosts else _shorten)(schedules, context, rank, work, share)


def _used(context: Context, rank: int) -> Int64:
    """Indices of the used steps in a rank's own."""
    return context.result.partials[rank].steps.indices_of(context.result.steps)


def _shorten(schedules: EditableSchedules, context: Context, rank: int, work: ExtraWork, share: float) -> None:
    """A rank whose host is not replayed beside its device."""
    result, rank_partial = context.result, context.result.partials[rank]
    own, blocked = rank_partial.progress.own, rank_partial.progress.blocked
    spent = work.of_rank(on_device=rank_partial.has_device_work)
    if len(own) == 0 or len(spent) == 0:
        return

    def progress(at_ns: Int64) -> Int64:
        return at_ns - int(own.start_ns[0]) - blocked.before(at_ns)

    spent = Intervals.of(progress(spent.start_ns), progress(spent.end_ns))
    recorded = context.recorded.schedules
    passed = np.cumsum(recorded.own_ns[recorded.slice_of(rank)])
    bounds = np.append(0, passed) + context.recorded.first_progress_ns(result, rank)
    gone = _shares(spent, rank_partial.progress.unblocked(), bounds[:-1], bounds[1:])
    for op, of_op in zip(schedules.ops[rank], gone, strict=True):
        op.own_ns = op.own_ns * (1 - share * of_op)


def _shares(spent: Intervals, own: Timeline, start_ns: Int64, end_ns: Int64) -> Float64:
    """For each window (lines) the share of its time of each category (columns) that is ``spent``."""
    gone = np.zeros((len(start_ns), len(TimeCategory)))
    for category in _OF_RANK:
        whole = own.where(category)
        part = whole.intersect(spent).within(start_ns, end_ns)
        gone[:, category] = _share_of(part, whole.within(start_ns, end_ns))
    return gone


def _share_of(part: Int64, whole: Int64) -> Float64:
    """Elementwise, from 0 to 1; 0 of nothing."""
    return np.clip(np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0), 0.0, 1.0)


def _shorten_lanes(schedules: EditableSchedules, context: Context, rank: int, work: ExtraWork, share: float) -> None:
    """A rank's host and device, side by side."""
    side = context.recorded.lanes[context.recorded.schedules.ranks.index(rank)]
    progress = context.result.partials[rank].progress
    lane, points = progress.host, side.points
    assert lane is not None
    busy = work.host.subtract(Intervals.of(lane.waits.entered_ns, lane.waits.returned_ns))
    moment, done = side.moment_ns, side.done_ns
    launched, started = lane.at_ns[points.listed], np.minimum(lane.start_ns[points.listed], done[points.op + 1])
    of_host = _share_of(busy.within(moment[:-1], moment[1:]), side.rows_ns[:, _OF_HOST].sum(axis=1))
    to_launch = busy.within(np.minimum(moment[points.op], launched), launched)
    of_launch = _share_of(to_launch, points.rows_ns[:, _OF_HOST].sum(axis=1))
    of_device = _shares(work.device, progress.own, done[:-1], done[1:])
    of_piece = _shares(work.device, progress.own, started, done[points.op + 1])
    begun = 0
    for place, op in enumerate(schedules.ops[rank]):
        op.own_ns = op.own_ns * (1 - share * of_device[place])
        part = op.host or HostPart.none()
        end = begun + len(part.launches)
        part.own_ns[_OF_HOST] *= 1 - share * of_host[place]
        rows = part.launches[:, :HOST_ROWS]
        rows[:, _OF_HOST] *= 1 - share * of_launch[begun:end, None]
        part.launches[:, OF_DEVICE_ROWS:] *= 1 - share * of_piece[begun:end]
        begun = end


_recomputation = partial(
    _left_out,
    attrgetter("recomputation"),
    "the recording shows no forward that runs again in the backward",
    Uncertainty(less=0.20, more=0.20),
)
_conversions = partial(
    _left_out,
    attrgetter("conversions"),
    "the recording shows no kernels that write tensors with their channels last around convolutions",
    Uncertainty(less=0.25, more=1.00),
)
_loops = partial(
    _left_out,
    attrgetter("optimizer_loops"),
    f"the recording marks no optimizer step that launches more than {FEW} kernels",
    Uncertainty(less=0.25, more=0.25),
)

SETTINGS = (
    Setting("activations.recompute", "SHARE", "the share of activation checkpointing that is left; 0: none",
            _recomputation, -1, with_hosts=True, of_host_work=True),
    Setting("layout.conversions", "SHARE", "the share of conversions to channels last around convolutions that is left",
            _conversions, -1, with_hosts=True, of_host_work=True),
    Setting("optimizer.loops", "SHARE", "the share of the optimizer's kernels but for a few that is left; 0: foreach",
            _loops, -1, with_hosts=True, of_host_work=True),
)  # fmt: skip
