"""Leaves work of one rank out of its schedule.

The recording shows when a rank does it. Each op loses the share of its own time by category, and its host the share of
its own work, that lies there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.rank.host_lane import HostTime
from perfscope.analyzers.rank.intervals import Intervals
from perfscope.analyzers.rank.partial import ExtraWork
from perfscope.analyzers.rank.timeline import Timeline
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.hosts import HOST_ROWS, OF_DEVICE_ROWS, HostPart
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import Float64, Int64

_OF_RANK: Final = (
    TimeCategory.COMPUTE, TimeCategory.COPY, TimeCategory.DEPENDENCY, TimeCategory.LAUNCH, TimeCategory.HOST,
    TimeCategory.UNKNOWN,
)  # fmt: skip
"""A rank's own time that goes with such work."""
OF_HOST: Final = (HostTime.OPERATORS, HostTime.OTHER, HostTime.PAUSES)
"""Its host's."""


def leave_out(
    schedules: EditableSchedules, result: AlignedJob, rank: int, work: ExtraWork, share: float = 1.0,
    rows: Sequence[HostTime] = OF_HOST,
) -> None:  # fmt: skip
    """``share`` of such work of one rank is not done, which its host does by ``rows``. Its ops must still be those that
    were recorded.
    """
    if not (len(work.host) or len(work.device)):
        return
    if schedules.hosts:
        _shorten_lanes(schedules, result, rank, work, share, list(rows))
    else:
        _shorten(schedules, result, rank, work, share)


def is_as_recorded(schedules: EditableSchedules, rank: int) -> bool:
    """Has no change taken ops of this rank out, or put some in, so that work can still be left out?"""
    recorded = schedules.recorded.with_hosts if schedules.hosts else schedules.recorded.schedules
    assert recorded is not None
    span = recorded.slice_of(rank)
    recorded_ops: int = span.stop - span.start
    return len(schedules.ops[rank]) == recorded_ops


def _shorten(schedules: EditableSchedules, result: AlignedJob, rank: int, work: ExtraWork, share: float) -> None:
    """A rank whose host is not replayed beside its device."""
    rank_partial = result.partials[rank]
    own, blocked = rank_partial.progress.own, rank_partial.progress.blocked
    spent = work.of_rank(on_device=rank_partial.has_device_work)
    if len(own) == 0 or len(spent) == 0:
        return

    def progress(at_ns: Int64) -> Int64:
        return at_ns - int(own.start_ns[0]) - blocked.before(at_ns)

    spent = Intervals.of(progress(spent.start_ns), progress(spent.end_ns))
    recorded = schedules.recorded.schedules
    passed = np.cumsum(recorded.own_ns[recorded.slice_of(rank)])
    bounds = np.append(0, passed) + schedules.recorded.first_progress_ns(result, rank)
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


def _shorten_lanes(
    schedules: EditableSchedules, result: AlignedJob, rank: int, work: ExtraWork, share: float, by: list[HostTime]
) -> None:
    """A rank's host and device, side by side."""
    side = schedules.recorded.lanes[schedules.recorded.schedules.line_of(rank)]
    progress = result.partials[rank].progress
    lane, points = progress.host, side.points
    assert lane is not None
    busy = work.host.subtract(Intervals.of(lane.waits.entered_ns, lane.waits.returned_ns))
    moment, done = side.moment_ns, side.done_ns
    launched, started = lane.at_ns[points.listed], np.minimum(lane.start_ns[points.listed], done[points.op + 1])
    of_host = _share_of(busy.within(moment[:-1], moment[1:]), side.rows_ns[:, by].sum(axis=1))
    to_launch = busy.within(np.minimum(moment[points.op], launched), launched)
    of_launch = _share_of(to_launch, points.rows_ns[:, by].sum(axis=1))
    of_device = _shares(work.device, progress.own, done[:-1], done[1:])
    of_piece = _shares(work.device, progress.own, started, done[points.op + 1])
    begun = 0
    for place, op in enumerate(schedules.ops[rank]):
        op.own_ns = op.own_ns * (1 - share * of_device[place])
        part = op.host or HostPart.none()
        end = begun + len(part.launches)
        part.own_ns[by] *= 1 - share * of_host[place]
        rows = part.launches[:, :HOST_ROWS]
        rows[:, by] *= 1 - share * of_launch[begun:end, None]
        part.launches[:, OF_DEVICE_ROWS:] *= 1 - share * of_piece[begun:end]
        begun = end
