"""Schedules with some ranks at their peers' pace: what stragglers cost is found by replaying these.

Ranks that do the same work issue the same collectives in the same order. These cut the ranks' own time into segments
that can be compared. A rank at its peers' pace takes, for every segment, the median of its peers' own time in it; its
waits and the collectives themselves stay as recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from perfscope.analyzers.job.aligned import AlignedJob
from perfscope.analyzers.job.pipelines.stages import stages
from perfscope.analyzers.rank.partial import RankPartial
from perfscope.analyzers.replay.engine import OpKind, Schedules
from perfscope.analyzers.replay.schedules import RecordedSchedules
from perfscope.trace.trace import NONE, Int64

StepSignature = tuple[tuple[str, ...], tuple[tuple[str, int], ...]]

POINT_TO_POINT: Final = ("send", "recv", "send_recv")


@dataclass(frozen=True, eq=False)
class Peers:
    """Two ranks or more that do the same work, with their own time cut into the same segments.

    ``anchors`` are, for each rank (line), the ops that bound the segments (columns, one more than segments; -1 is the
    schedule's begin); ``own_ns`` [rank, segment] is its own time in each; ``rows_ns`` [rank, segment, category] the
    same by category; ``step`` the index of the recorded step that each segment leads into.
    """

    ranks: tuple[int, ...]
    anchors: Int64
    own_ns: Int64
    rows_ns: Int64
    step: Int64

    def others(self, rank: int, without: Collection[int] = ()) -> list[int]:
        """Lines of the peers that ``rank`` is compared with: all but itself and ``without``; all where that leaves none
        (each is slow now and then, so the median of each segment, of three or more, is a usual one).
        """
        others = [index for index, peer in enumerate(self.ranks) if peer != rank and peer not in without]
        return others or list(range(len(self.ranks)))

    def target_ns(self, rank: int, without: Collection[int] = ()) -> Int64:
        """Own time of each segment at the peers' pace: the median over the others."""
        return np.asarray(np.median(self.own_ns[self.others(rank, without)], axis=0), dtype=np.int64)

    def excess_ns(self, rank: int, without: Collection[int] = ()) -> Int64:
        """[segment, category]: own time beyond the others' median, by category; negative where it is quicker."""
        mine, others = self.rows_ns[self.ranks.index(rank)], self.rows_ns[self.others(rank, without)]
        return np.asarray(mine - np.median(others, axis=0), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class _Anchors:
    """What may bound one rank's segments: ops of its schedule.

    ``issue`` issue collectives, each in the recorded step of index ``step``; ``begin`` begin the steps; ``end`` ends
    the last. Ranks of unlike work have unlike ``signature``.
    """

    issue: Int64
    step: Int64
    begin: Int64
    end: int
    signature: tuple[StepSignature, ...]

    def issued_before_steps(self) -> list[int]:
        """How many collectives were issued before each step began."""
        return [int(count) for count in np.searchsorted(self.issue, self.begin)]

    def bounds(self, *, with_begins: bool) -> tuple[Int64, Int64]:
        """Positions that bound the segments (-1: the schedule's begin), and the step that each segment leads into."""
        inner, step = np.minimum(self.issue, self.end), self.step
        last = len(self.begin) - 1
        if with_begins:
            inner = np.concatenate((inner, self.begin[1:]))
            step = np.concatenate((step, np.arange(last)))
            order = np.argsort(inner, kind="stable")
            inner, step = inner[order], step[order]
        return np.concatenate(([-1], inner, [self.end])), np.maximum.accumulate(np.append(step, last))


def find_peers(result: AlignedJob, recorded: RecordedSchedules) -> tuple[Peers, ...]:
    """Group the ranks by the work they do. Peers issue as many collectives of each kind in every step, and hold the
    same pipeline stage; where the stages are not known, they send and receive in the same order.
    """
    stage_of = stages(result)
    alike: dict[tuple[int | None, tuple[StepSignature, ...]], list[int]] = {}
    anchors = {}
    for index, rank in enumerate(recorded.schedules.ranks):
        anchors[rank] = _anchors(result, recorded, index, rank)
        stage, signature = stage_of.get(rank), anchors[rank].signature
        if stage is not None:  # replicas of a stage send and receive on streams that race
            signature = tuple(((), counts) for _, counts in signature)
        alike.setdefault((stage, signature), []).append(rank)
    return tuple(
        _peers(result, recorded, ranks, [anchors[rank] for rank in ranks]) for ranks in alike.values() if len(ranks) > 1
    )


def at_peers_pace(recorded: RecordedSchedules, peers: Mapping[int, Peers], paced: Sequence[int]) -> Schedules:
    """Schedules in which the ranks ``paced`` take their peers' own time; those among them do not count as peers.

    Where its own work made such a rank come later to its first window than its peers, it comes that much sooner. Every
    rank of ``paced`` must have peers.
    """
    schedules = recorded.schedules
    own, lag, start = schedules.own_ns.copy(), schedules.lag_ns.copy(), schedules.start_ns.copy()
    hold = schedules.hold_ns.copy()
    for rank in paced:
        span, target = schedules.slice_of(rank), peers[rank].target_ns(rank, paced)
        own[span] = _repaced(schedules.own_ns[span], peers[rank].anchors[peers[rank].ranks.index(rank)], target)
        others = [schedules.ranks.index(peers[rank].ranks[line]) for line in peers[rank].others(rank, paced)]
        index = schedules.ranks.index(rank)
        holds, stalls, until = _usual_holds(recorded, index, others)
        lag[holds], hold[schedules.operand[holds]] = stalls, until
        start[index] -= _sooner(recorded, index, others)
    return replace(schedules, own_ns=own, lag_ns=lag, start_ns=start, hold_ns=hold)


def _usual_holds(recorded: RecordedSchedules, index: int, others: Sequence[int]) -> tuple[Int64, Int64, Int64]:
    """(holds of rank ``index``, a line; their lags; their moments) with the loader of ``others``: the median of theirs
    where most of them have holds in the same steps; else none, because their loaders do not make it stall.
    """
    holds, steps = _holds(recorded, index)
    schedules, never = recorded.schedules, np.iinfo(np.int64).min
    alike = [theirs for theirs, when in (_holds(recorded, other) for other in others) if np.array_equal(when, steps)]
    if 2 * len(alike) <= len(others) or len(holds) == 0:
        return holds, np.zeros(len(holds), dtype=np.int64), np.full(len(holds), never)
    stalls = np.median([schedules.lag_ns[theirs] for theirs in alike], axis=0)
    until = np.median([schedules.hold_ns[schedules.operand[theirs]] for theirs in alike], axis=0)
    return holds, stalls.astype(np.int64), until.astype(np.int64)


def _holds(recorded: RecordedSchedules, index: int) -> tuple[Int64, Int64]:
    """(ops, recorded steps in or before which they are) of one rank's holds."""
    schedules, span = recorded.schedules, recorded.schedules.slice_of(recorded.schedules.ranks[index])
    kind, operand = schedules.kind[span], schedules.operand[span]
    holds = np.flatnonzero(kind == OpKind.HOLD)
    begins = np.flatnonzero((kind == OpKind.MARK) & np.isin(operand, recorded.begin[index]))
    return span.start + holds, np.searchsorted(begins, holds)


def _sooner(recorded: RecordedSchedules, index: int, others: Sequence[int]) -> int:
    """By how much sooner rank ``index`` (a line) would come to its first window at the pace of ``others``.

    It came that much later than their median, as far as it does so in the later steps too, or as its host took longer
    to the first launch while the device waited for it.
    """
    later = recorded.begin_ns[index] - np.median(recorded.begin_ns[others], axis=0)
    usually = np.median(later[1:]) if len(later) > 1 else 0
    by_host = recorded.lead_ns[index] - np.median(recorded.lead_ns[others]) if recorded.late[index] else 0
    return max(0, int(min(later[0], max(usually, by_host))))


def scaled(schedules: Schedules, ranks: Sequence[int], factor: float) -> Schedules:
    """Schedules in which all own time of ``ranks`` takes ``factor`` times as long."""
    own = schedules.own_ns.copy()
    for rank in ranks:
        span = schedules.slice_of(rank)
        progress = np.round(np.cumsum(own[span]) * factor).astype(np.int64)
        own[span] = np.diff(progress, prepend=0)
    return replace(schedules, own_ns=own)


def _anchors(result: AlignedJob, recorded: RecordedSchedules, index: int, rank: int) -> _Anchors:
    """What may bound the segments of one rank."""
    schedules, span = recorded.schedules, recorded.schedules.slice_of(rank)
    kind, operand = schedules.kind[span], schedules.operand[span]
    end = int(np.flatnonzero((kind == OpKind.MARK) & (operand == recorded.end[index, -1]))[0])
    issues = np.flatnonzero(kind == OpKind.ISSUE)
    partial = result.partials[rank]
    row = recorded.row[operand[issues]]
    step = _step_index(partial, recorded.steps, row)
    issues, row, step = (column[step >= 0] for column in (issues, row, step))
    kinds = np.array(partial.collectives.kinds or ("",))[partial.collectives.kind[row]]
    return _Anchors(
        issue=issues,
        step=step,
        begin=np.flatnonzero((kind == OpKind.MARK) & np.isin(operand, recorded.begin[index])),
        end=end,
        signature=tuple(_signature(kinds[step == number].tolist()) for number in range(len(recorded.steps))),
    )


def _step_index(partial: RankPartial, steps: Int64, row: Int64) -> Int64:
    """Index in ``steps`` of the step in which each of a rank's collectives was issued; NONE where in none of them."""
    own = partial.collectives.step[row]
    number = np.where(own >= 0, partial.steps.number[np.maximum(own, 0)], NONE)
    index = np.minimum(np.searchsorted(steps, number), len(steps) - 1)
    return np.asarray(np.where(steps[index] == number, index, NONE), dtype=np.int64)


def _signature(kinds: list[str]) -> StepSignature:
    """Point-to-point operations in their order, which is a pipeline stage's own; of the rest how many of each, since
    independent streams may race.
    """
    between_two = tuple(kind for kind in kinds if kind in POINT_TO_POINT)
    return between_two, tuple(sorted(Counter(kinds).items()))


def _peers(result: AlignedJob, recorded: RecordedSchedules, ranks: Sequence[int], anchors: Sequence[_Anchors]) -> Peers:
    """Segments are bounded by collectives, and by the steps' beginnings where those lie between the same collectives on
    all these ranks (a late rank may begin a step before it issues what the others issue first).
    """
    first = anchors[0].issued_before_steps()
    with_begins = all(mine.issued_before_steps() == first for mine in anchors)
    own, rows, positions = [], [], []
    for rank, mine in zip(ranks, anchors, strict=True):
        position, step = mine.bounds(with_begins=with_begins)
        bounds = _bounds(recorded.schedules.own_ns[recorded.schedules.slice_of(rank)], position)
        positions.append(position)
        own.append(np.diff(bounds))
        rows.append(recorded.rows_between(result, rank, bounds))
    return Peers(tuple(ranks), np.stack(positions), np.stack(own), np.stack(rows), step)


def _bounds(own_ns: Int64, anchors: Int64) -> Int64:
    """Own progress at each anchor, ns; the first is the schedule's begin."""
    return np.concatenate(([0], np.cumsum(own_ns)[anchors[1:]]))


def _repaced(own_ns: Int64, anchors: Int64, target_ns: Int64) -> Int64:
    """Own time before each op, once the segments between ``anchors`` take ``target_ns``.

    Inside a segment the ops stay where they are relative to its length; outside all segments nothing changes.
    """
    progress, bounds = np.cumsum(own_ns), _bounds(own_ns, anchors)
    paced = np.concatenate(([0], np.cumsum(target_ns)))
    segment = np.clip(np.searchsorted(anchors, np.arange(len(own_ns)), side="right") - 1, 0, len(target_ns) - 1)
    length = bounds[segment + 1] - bounds[segment]
    share = (progress - bounds[segment]) / np.maximum(length, 1)
    moved = paced[segment] + np.round(share * target_ns[segment]).astype(np.int64)
    moved = np.where(np.arange(len(own_ns)) >= anchors[-1], paced[-1] + progress - bounds[-1], moved)
    return np.asarray(np.diff(moved, prepend=0), dtype=np.int64)
