"""Schedules with some ranks at their peers' pace: what stragglers cost is found by replaying these.

``peers`` cuts the own time of ranks that do the same work into segments that can be compared. A rank at its peers' pace
takes for every segment what its peers usually take; its waits, the collectives and the order of all it does stay as
recorded, so what could be replayed before can be replayed then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from perfscope.analyzers.replay.engine import OpKind, Schedules
from perfscope.analyzers.replay.peers import Peers, progress_at
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.trace.trace import NEVER, Float64, Int64

_AS_SLOW: Final = 1.5
"""Loaders are equally slow where the time between their batches, of which few may be known, differs by less."""


def at_peers_pace(
    recorded: RecordedSchedules, peers: Mapping[int, Peers], paced: Sequence[int], *, even: bool = False
) -> Schedules:
    """Schedules in which the ranks ``paced`` take their peers' own time; those among them do not count as peers.
    ``even``: the mean of it, not the median.

    Where its own work made such a rank come later to its first window than its peers, it comes that much sooner. Every
    rank of ``paced`` must have peers.
    """
    schedules = recorded.schedules
    own, lag, start = schedules.own_ns.copy(), schedules.lag_ns.copy(), schedules.start_ns.copy()
    hold = schedules.hold_ns.copy()
    for rank in paced:
        span, target = schedules.slice_of(rank), peers[rank].target_ns(rank, paced, even=even)
        own[span] = _repaced(schedules.own_ns[span], peers[rank].anchors[peers[rank].ranks.index(rank)], target)
        others = [schedules.ranks.index(peers[rank].ranks[line]) for line in peers[rank].others(rank, paced)]
        index = schedules.ranks.index(rank)
        holds, stalls, until = _usual_holds(recorded, index, others)
        lag[holds], hold[schedules.operand[holds]] = stalls, until
        start[index] -= late_by(recorded, index, others)
    return replace(schedules, own_ns=own, lag_ns=lag, start_ns=start, hold_ns=hold)


def _usual_holds(recorded: RecordedSchedules, index: int, others: Sequence[int]) -> tuple[Int64, Int64, Int64]:
    """(holds of rank ``index``, a line; their lags; their moments) with the loader of ``others``: the median of theirs
    where most of them have holds in the same steps, its own where they have them in other steps. Where they have none,
    none, because their loaders do not make it stall.
    """
    holds, steps = _holds(recorded, index)
    schedules = recorded.schedules
    alike = [theirs for theirs, when in (_holds(recorded, other) for other in others) if np.array_equal(when, steps)]
    if 2 * len(alike) <= len(others) or len(holds) == 0:
        nothing = np.zeros(len(holds), dtype=np.int64)
        if _loads_like(recorded, index, others):
            return holds, nothing, schedules.hold_ns[schedules.operand[holds]]
        return holds, nothing, np.full(len(holds), NEVER)
    stalls = np.median([schedules.lag_ns[theirs] for theirs in alike], axis=0)
    until = np.median([schedules.hold_ns[schedules.operand[theirs]] for theirs in alike], axis=0)
    return holds, stalls.astype(np.int64), until.astype(np.int64)


def _loads_like(recorded: RecordedSchedules, index: int, others: Sequence[int]) -> bool:
    """Do the loaders of most ``others`` (lines) set their pace, and is that of rank ``index`` no slower?

    Loaders that set the pace of one job deliver at the same. Those of hosts that run ahead may be busy, and quicker.
    """
    own, *theirs = (recorded.deliveries[recorded.schedules.ranks[line]].batch_ns for line in (index, *others))
    paces = [pace for pace in theirs if pace is not None]
    return own is not None and 2 * len(paces) > len(theirs) and own <= _AS_SLOW * float(np.median(paces))


def _holds(recorded: RecordedSchedules, index: int) -> tuple[Int64, Int64]:
    """(ops, recorded steps in or before which they are) of one rank's holds."""
    schedules, span = recorded.schedules, recorded.schedules.slice_of(recorded.schedules.ranks[index])
    kind, operand = schedules.kind[span], schedules.operand[span]
    holds = np.flatnonzero(kind == OpKind.HOLD)
    begins = np.flatnonzero((kind == OpKind.MARK) & np.isin(operand, recorded.begin[index]))
    return span.start + holds, np.searchsorted(begins, holds)


def came_later_ns(later_ns: Int64 | Float64, lead_ns: Int64 | Float64) -> Float64:
    """By how much ranks came later to their first window than at their peers' pace.

    ``later_ns`` [..., bound] is by how much each came later than its peers to each of ``RecordedSchedules.bound_ns``:
    the first counts as far as a later one is as large, for what delays a rank in the recording did so before, too; or
    as far as the host took longer to the first launch, by ``lead_ns``, while the device waited for it.
    """
    evident = np.maximum(later_ns[..., 1:].max(axis=-1), lead_ns)
    return np.asarray(np.maximum(np.minimum(later_ns[..., 0], evident), 0.0), dtype=np.float64)


def late_by(recorded: RecordedSchedules, index: int, others: Sequence[int] = ()) -> int:
    """By how much later rank ``index`` (a line) came to its first window than at the pace of ``others``: all if none
    are named.
    """
    others = others or [other for other in range(len(recorded.late)) if other != index] or [index]
    later = recorded.bound_ns[index] - np.median(recorded.bound_ns[others], axis=0)
    lead = recorded.lead_ns[index] - np.median(recorded.lead_ns[others]) if recorded.late[index] else 0.0
    return int(came_later_ns(later, np.float64(lead)))


def scaled(schedules: Schedules, ranks: Sequence[int], factor: float) -> Schedules:
    """Schedules in which all own time of ``ranks`` takes ``factor`` times as long."""
    own = schedules.own_ns.copy()
    for rank in ranks:
        span = schedules.slice_of(rank)
        progress = np.round(np.cumsum(own[span]) * factor).astype(np.int64)
        own[span] = np.diff(progress, prepend=0)
    return replace(schedules, own_ns=own)


def _repaced(own_ns: Int64, anchors: Int64, target_ns: Int64) -> Int64:
    """Own time before each op, once the segments between ``anchors`` take ``target_ns``.

    Inside a segment the ops stay where they are relative to its length; outside all segments nothing changes.
    """
    progress, bounds = np.cumsum(own_ns), progress_at(own_ns, anchors)
    paced = np.concatenate(([0], np.cumsum(target_ns)))
    segment = np.clip(np.searchsorted(anchors, np.arange(len(own_ns)), side="right") - 1, 0, len(target_ns) - 1)
    length = bounds[segment + 1] - bounds[segment]
    share = (progress - bounds[segment]) / np.maximum(length, 1)
    moved = paced[segment] + np.round(share * target_ns[segment]).astype(np.int64)
    moved = np.where(np.arange(len(own_ns)) >= anchors[-1], paced[-1] + progress - bounds[-1], moved)
    return np.asarray(np.diff(moved, prepend=0), dtype=np.int64)
