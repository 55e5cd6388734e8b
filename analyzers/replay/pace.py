"""Programs with some ranks at their peers' pace: the question behind every lost microsecond.

Ranks that do the same work issue the same collectives in the same order, which cuts their own time into segments that
can be set side by side. A rank at its peers' pace takes, for every segment, the median of its peers' own time in it;
what it waits for, and the collectives themselves, stay as they were recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.replay.engine import Op, Programs
from perfscope.analyzers.replay.programs import Recorded
from perfscope.trace import Int64

StepSignature = tuple[tuple[str, ...], tuple[tuple[str, int], ...]]

POINT_TO_POINT: Final = ("send", "recv", "send_recv")


@dataclass(frozen=True, eq=False)
class Peers:
    """Ranks that do the same work, with their own time cut into the same segments.

    ``anchors`` are, for each rank (line), the instructions that bound the segments (columns, one more than segments);
    ``own_ns`` [rank, segment] is its own time in each; ``rows_ns`` [rank, segment, row] the same by row of the
    account; ``step`` the index of the recorded step in which each segment lies.
    """

    ranks: tuple[int, ...]
    anchors: Int64
    own_ns: Int64
    rows_ns: Int64
    step: Int64

    def target_ns(self, rank: int, without: Collection[int] = ()) -> Int64 | None:
        """Own time of each segment at the peers' pace: the median over all peers but ``rank`` and ``without``.

        None where nobody is left to compare with.
        """
        others = [index for index, peer in enumerate(self.ranks) if peer != rank and peer not in without]
        if not others:
            return None
        return np.asarray(np.median(self.own_ns[others], axis=0), dtype=np.int64)

    def excess_ns(self, rank: int, without: Collection[int] = ()) -> Int64 | None:
        """[segment, row]: own time beyond the peers' median, by row; negative where it is quicker."""
        others = [index for index, peer in enumerate(self.ranks) if peer != rank and peer not in without]
        if not others:
            return None
        mine = self.rows_ns[self.ranks.index(rank)]
        return np.asarray(mine - np.median(self.rows_ns[others], axis=0), dtype=np.int64)


def find_peers(result: Comparison, recorded: Recorded) -> tuple[Peers, ...]:
    """Sort the ranks by the work they do: alike are those that issue the same kinds of collectives in the same order in
    every step, point-to-point ones included (a pipeline's stages differ in those).
    """
    alike: dict[tuple[StepSignature, ...], list[int]] = {}
    anchors = {}
    for index, rank in enumerate(recorded.programs.ranks):
        anchors[rank], signature = _anchors(result, recorded, index, rank)
        alike.setdefault(signature, []).append(rank)
    return tuple(_peers(result, recorded, ranks, [anchors[rank] for rank in ranks]) for ranks in alike.values())


def at_peers_pace(recorded: Recorded, peers: Mapping[int, Peers], cured: Sequence[int]) -> Programs:
    """Programs in which the ranks ``cured`` take their peers' own time. Peers that are cured too do not count.

    Where such a rank came to its first window late because its host was late with the first launch, it comes as much
    earlier as its peers' hosts were quicker, but not before the first of them. Ranks without other peers keep their
    pace.
    """
    programs = recorded.programs
    own, lag, start = programs.own_ns.copy(), programs.lag_ns.copy(), programs.start_ns.copy()
    hold = programs.hold_ns.copy()
    for rank in cured:
        target = peers[rank].target_ns(rank, cured)
        if target is None:
            continue
        part = programs.slice_of(rank)
        own[part] = _repaced(programs.own_ns[part], peers[rank].anchors[peers[rank].ranks.index(rank)], target)
        # Its peers' loaders do not make it stall.
        held = programs.op[part] == Op.HOLD
        lag[part][held] = 0
        hold[programs.operand[part][held]] = np.iinfo(np.int64).min
        others = [programs.ranks.index(peer) for peer in peers[rank].ranks if peer != rank and peer not in cured]
        index = programs.ranks.index(rank)
        if recorded.late[index]:
            sooner = max(0, int(recorded.lead_ns[index] - np.median(recorded.lead_ns[others])))
            start[index] = max(start[index] - sooner, min(start[index], int(start[others].min())))
    return replace(programs, own_ns=own, lag_ns=lag, start_ns=start, hold_ns=hold)


def scaled(programs: Programs, ranks: Sequence[int], factor: float) -> Programs:
    """Programs in which all own time of ``ranks`` takes ``factor`` times as long."""
    own = programs.own_ns.copy()
    for rank in ranks:
        part = programs.slice_of(rank)
        progress = np.round(np.cumsum(own[part]) * factor).astype(np.int64)
        own[part] = np.diff(progress, prepend=0)
    return replace(programs, own_ns=own)


def _anchors(result: Comparison, recorded: Recorded, index: int, rank: int) -> tuple[Int64, tuple[StepSignature, ...]]:
    """Instructions (positions in the rank's program) that bound its segments, and what tells ranks apart.

    They are the beginnings of the steps, every collective handed over inside a step, and the last step's end.
    """
    programs, part = recorded.programs, recorded.programs.slice_of(rank)
    op, operand = programs.op[part], programs.operand[part]
    is_mark = op == Op.MARK
    begins = np.flatnonzero(is_mark & np.isin(operand, recorded.begin[index]))
    end = np.flatnonzero(is_mark & (operand == recorded.end[index, -1]))
    issues = np.flatnonzero(op == Op.ISSUE)
    issues = issues[(issues > begins[0]) & (issues < end[0])]
    own = result.partials[rank].collectives
    kinds = np.array(own.kinds)[own.kind[recorded.row[operand[issues]]]] if len(issues) else np.empty(0, dtype=str)
    step = np.searchsorted(begins, issues, side="right") - 1
    signature = tuple(_signature(kinds[step == number].tolist()) for number in range(len(begins)))
    return np.sort(np.concatenate((begins, issues, end))), signature


def _signature(kinds: list[str]) -> StepSignature:
    """Point-to-point operations in their order, which is a pipeline stage's own; of the rest how many of each, since
    independent streams may race.
    """
    between_two = tuple(kind for kind in kinds if kind in POINT_TO_POINT)
    return between_two, tuple(sorted(Counter(kinds).items()))


def _peers(result: Comparison, recorded: Recorded, ranks: Sequence[int], anchors: Sequence[Int64]) -> Peers:
    own, rows = [], []
    for rank, positions in zip(ranks, anchors, strict=True):
        progress = np.cumsum(recorded.programs.own_ns[recorded.programs.slice_of(rank)])[positions]
        own.append(np.diff(progress))
        rows.append(_rows_between(result, recorded, rank, progress))
    first = recorded.programs.slice_of(ranks[0])
    op, operand = recorded.programs.op[first][anchors[0]], recorded.programs.operand[first][anchors[0]]
    begins_step = (op == Op.MARK) & np.isin(operand, recorded.begin)
    return Peers(tuple(ranks), np.stack(anchors), np.stack(own), np.stack(rows), np.cumsum(begins_step)[:-1] - 1)


def _rows_between(result: Comparison, recorded: Recorded, rank: int, progress_ns: Int64) -> Int64:
    """Ns of each row of the rank's own account (columns) between consecutive moments of its own progress (lines)."""
    own = result.partials[rank].progress
    index = recorded.programs.ranks.index(rank)
    begin = int(recorded.programs.start_ns[index]) - result.clocks.offset_of(rank)
    passed = begin - int(own.own.start_ns[0]) - int(own.blocked.before(np.array([begin]))[0])
    return own.unblocked().totals(progress_ns[:-1] + passed, progress_ns[1:] + passed)


def _repaced(own_ns: Int64, anchors: Int64, target_ns: Int64) -> Int64:
    """Own time before each instruction, once the segments between ``anchors`` take ``target_ns``.

    Inside a segment the instructions keep their place relative to its length; outside all segments nothing changes.
    """
    progress = np.cumsum(own_ns)
    bounds = progress[anchors]
    paced = bounds[0] + np.concatenate(([0], np.cumsum(target_ns)))
    segment = np.clip(np.searchsorted(anchors, np.arange(len(own_ns)), side="right") - 1, 0, len(target_ns) - 1)
    length = bounds[segment + 1] - bounds[segment]
    share = (progress - bounds[segment]) / np.maximum(length, 1)
    moved = paced[segment] + np.round(share * target_ns[segment]).astype(np.int64)
    moved = np.where(np.arange(len(own_ns)) < anchors[0], progress, moved)
    moved = np.where(np.arange(len(own_ns)) >= anchors[-1], paced[-1] + progress - bounds[-1], moved)
    return np.diff(moved, prepend=0)
