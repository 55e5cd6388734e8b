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
from perfscope.analyzers.pipelines.stages import stages
from perfscope.analyzers.rank import RankPartial
from perfscope.analyzers.replay.engine import Op, Programs
from perfscope.analyzers.replay.programs import Recorded
from perfscope.analyzers.timeline import Row
from perfscope.trace import NONE, Int64

StepSignature = tuple[tuple[str, ...], tuple[tuple[str, int], ...]]

POINT_TO_POINT: Final = ("send", "recv", "send_recv")


@dataclass(frozen=True, eq=False)
class Peers:
    """Two ranks or more that do the same work, with their own time cut into the same segments.

    ``anchors`` are, for each rank (line), the instructions that bound the segments (columns, one more than segments; -1
    is the program's begin);
    ``own_ns`` [rank, segment] is its own time in each; ``rows_ns`` [rank, segment, row] the same by row of the
    account; ``step`` the index of the recorded step that each segment leads into.
    """

    ranks: tuple[int, ...]
    anchors: Int64
    own_ns: Int64
    rows_ns: Int64
    step: Int64

    def others(self, rank: int, without: Collection[int] = ()) -> list[int]:
        """Lines of the peers that ``rank`` is compared with: all but itself and ``without``; everybody where that
        leaves nobody (all are struck now and then: the median of each segment, of three or more, is a healthy one).
        """
        others = [index for index, peer in enumerate(self.ranks) if peer != rank and peer not in without]
        return others or list(range(len(self.ranks)))

    def target_ns(self, rank: int, without: Collection[int] = ()) -> Int64:
        """Own time of each segment at the peers' pace: the median over the others."""
        return np.asarray(np.median(self.own_ns[self.others(rank, without)], axis=0), dtype=np.int64)

    def excess_ns(self, rank: int, without: Collection[int] = ()) -> Int64:
        """[segment, row]: own time beyond the others' median, by row; negative where it is quicker."""
        mine, others = self.rows_ns[self.ranks.index(rank)], self.rows_ns[self.others(rank, without)]
        return np.asarray(mine - np.median(others, axis=0), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class _Anchors:
    """What may bound one rank's segments: instructions of its program.

    ``issue`` hand collectives over, each in the recorded step of index ``step``; ``begin`` begin the steps; ``end``
    ends the last. The ``signature`` tells unlike ranks apart.
    """

    issue: Int64
    step: Int64
    begin: Int64
    end: int
    signature: tuple[StepSignature, ...]

    def issued_before_steps(self) -> list[int]:
        """How many collectives were handed over before each step began."""
        return [int(count) for count in np.searchsorted(self.issue, self.begin)]

    def bounds(self, *, with_begins: bool) -> tuple[Int64, Int64]:
        """Positions that bound the segments (-1: the program's begin), and the step that each segment leads into."""
        inner, step = np.minimum(self.issue, self.end), self.step
        last = len(self.begin) - 1
        if with_begins:
            inner = np.concatenate((inner, self.begin[1:]))
            step = np.concatenate((step, np.arange(last)))
            order = np.argsort(inner, kind="stable")
            inner, step = inner[order], step[order]
        return np.concatenate(([-1], inner, [self.end])), np.maximum.accumulate(np.append(step, last))


def find_peers(result: Comparison, recorded: Recorded) -> tuple[Peers, ...]:
    """Sort the ranks by the work they do: alike are those that issue as many collectives of each kind in every step,
    and that hold one pipeline stage; where it is not known who holds which, those that send and receive in one order.
    """
    stage_of = stages(result)
    alike: dict[tuple[int | None, tuple[StepSignature, ...]], list[int]] = {}
    anchors = {}
    for index, rank in enumerate(recorded.programs.ranks):
        anchors[rank] = _anchors(result, recorded, index, rank)
        stage, signature = stage_of.get(rank), anchors[rank].signature
        if stage is not None:  # replicas of a stage send and receive on streams that race
            signature = tuple(((), counts) for _, counts in signature)
        alike.setdefault((stage, signature), []).append(rank)
    return tuple(
        _peers(result, recorded, ranks, [anchors[rank] for rank in ranks]) for ranks in alike.values() if len(ranks) > 1
    )


def at_peers_pace(recorded: Recorded, peers: Mapping[int, Peers], cured: Sequence[int]) -> Programs:
    """Programs in which the ranks ``cured`` take their peers' own time. Peers that are cured too do not count.

    Where its own work made such a rank come later to its first window than its peers, it comes that much sooner. Every
    rank cured must have peers.
    """
    programs = recorded.programs
    own, lag, start = programs.own_ns.copy(), programs.lag_ns.copy(), programs.start_ns.copy()
    hold = programs.hold_ns.copy()
    for rank in cured:
        part, target = programs.slice_of(rank), peers[rank].target_ns(rank, cured)
        own[part] = _repaced(programs.own_ns[part], peers[rank].anchors[peers[rank].ranks.index(rank)], target)
        others = [programs.ranks.index(peers[rank].ranks[line]) for line in peers[rank].others(rank, cured)]
        index = programs.ranks.index(rank)
        held, stalls, until = _usual_holds(recorded, index, others)
        lag[held], hold[programs.operand[held]] = stalls, until
        start[index] -= _sooner(recorded, index, others)
    return replace(programs, own_ns=own, lag_ns=lag, start_ns=start, hold_ns=hold)


def _usual_holds(recorded: Recorded, index: int, others: Sequence[int]) -> tuple[Int64, Int64, Int64]:
    """(holds of rank ``index``, a line; their lags; their moments) with the loader of ``others``: the median of theirs
    where most of them are held in the same steps, else none: their loaders do not make it stall.
    """
    held, steps = _holds(recorded, index)
    programs, never = recorded.programs, np.iinfo(np.int64).min
    alike = [theirs for theirs, when in (_holds(recorded, other) for other in others) if np.array_equal(when, steps)]
    if 2 * len(alike) <= len(others) or len(held) == 0:
        return held, np.zeros(len(held), dtype=np.int64), np.full(len(held), never)
    stalls = np.median([programs.lag_ns[theirs] for theirs in alike], axis=0)
    until = np.median([programs.hold_ns[programs.operand[theirs]] for theirs in alike], axis=0)
    return held, stalls.astype(np.int64), until.astype(np.int64)


def _holds(recorded: Recorded, index: int) -> tuple[Int64, Int64]:
    """(instructions, recorded steps in or before which they lie) of one rank's holds."""
    programs, part = recorded.programs, recorded.programs.slice_of(recorded.programs.ranks[index])
    op, operand = programs.op[part], programs.operand[part]
    held = np.flatnonzero(op == Op.HOLD)
    begins = np.flatnonzero((op == Op.MARK) & np.isin(operand, recorded.begin[index]))
    return part.start + held, np.searchsorted(begins, held)


def _sooner(recorded: Recorded, index: int, others: Sequence[int]) -> int:
    """By how much sooner rank ``index`` (a line) would come to its first window at the pace of ``others``.

    It came that much later than their median, as far as it does so in the later steps too, or as its host took longer
    to the first launch while the device waited for it.
    """
    later = recorded.begin_ns[index] - np.median(recorded.begin_ns[others], axis=0)
    usually = np.median(later[1:]) if len(later) > 1 else 0
    by_host = recorded.lead_ns[index] - np.median(recorded.lead_ns[others]) if recorded.late[index] else 0
    return max(0, int(min(later[0], max(usually, by_host))))


def scaled(programs: Programs, ranks: Sequence[int], factor: float) -> Programs:
    """Programs in which all own time of ``ranks`` takes ``factor`` times as long."""
    own = programs.own_ns.copy()
    for rank in ranks:
        part = programs.slice_of(rank)
        progress = np.round(np.cumsum(own[part]) * factor).astype(np.int64)
        own[part] = np.diff(progress, prepend=0)
    return replace(programs, own_ns=own)


def _anchors(result: Comparison, recorded: Recorded, index: int, rank: int) -> _Anchors:
    """What may bound the segments of one rank."""
    programs, part = recorded.programs, recorded.programs.slice_of(rank)
    op, operand = programs.op[part], programs.operand[part]
    end = int(np.flatnonzero((op == Op.MARK) & (operand == recorded.end[index, -1]))[0])
    issues = np.flatnonzero(op == Op.ISSUE)
    partial = result.partials[rank]
    row = recorded.row[operand[issues]]
    step = _step_index(partial, recorded.steps, row)
    issues, row, step = (column[step >= 0] for column in (issues, row, step))
    kinds = np.array(partial.collectives.kinds or ("",))[partial.collectives.kind[row]]
    return _Anchors(
        issue=issues,
        step=step,
        begin=np.flatnonzero((op == Op.MARK) & np.isin(operand, recorded.begin[index])),
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


def _peers(result: Comparison, recorded: Recorded, ranks: Sequence[int], anchors: Sequence[_Anchors]) -> Peers:
    """Segments are bounded by collectives, and by the steps' beginnings where those lie between the same collectives on
    all these ranks (a late rank may begin a step before it hands over what the others hand over first).
    """
    first = anchors[0].issued_before_steps()
    with_begins = all(mine.issued_before_steps() == first for mine in anchors)
    own, rows, positions = [], [], []
    for rank, mine in zip(ranks, anchors, strict=True):
        position, step = mine.bounds(with_begins=with_begins)
        bounds = _bounds(recorded.programs.own_ns[recorded.programs.slice_of(rank)], position)
        positions.append(position)
        own.append(np.diff(bounds))
        rows.append(rows_between(result, recorded, rank, bounds))
    return Peers(tuple(ranks), np.stack(positions), np.stack(own), np.stack(rows), step)


def _bounds(own_ns: Int64, anchors: Int64) -> Int64:
    """Own progress at each anchor, ns; the first is the program's begin."""
    return np.concatenate(([0], np.cumsum(own_ns)[anchors[1:]]))


def rows_between(result: Comparison, recorded: Recorded, rank: int, progress_ns: Int64) -> Int64:
    """Ns of each row of the rank's own account (columns) between consecutive moments of its own progress (lines)."""
    own = result.partials[rank].progress
    if len(own.own) == 0:
        return np.zeros((len(progress_ns) - 1, len(Row)), dtype=np.int64)
    index = recorded.programs.ranks.index(rank)
    begin = result.clocks.to_own(rank, int(recorded.programs.start_ns[index]))
    passed = begin - int(own.own.start_ns[0]) - int(own.blocked.before(np.array([begin]))[0])
    return own.unblocked().totals(progress_ns[:-1] + passed, progress_ns[1:] + passed)


def _repaced(own_ns: Int64, anchors: Int64, target_ns: Int64) -> Int64:
    """Own time before each instruction, once the segments between ``anchors`` take ``target_ns``.

    Inside a segment the instructions keep their place relative to its length; outside all segments nothing changes.
    """
    progress, bounds = np.cumsum(own_ns), _bounds(own_ns, anchors)
    paced = np.concatenate(([0], np.cumsum(target_ns)))
    segment = np.clip(np.searchsorted(anchors, np.arange(len(own_ns)), side="right") - 1, 0, len(target_ns) - 1)
    length = bounds[segment + 1] - bounds[segment]
    share = (progress - bounds[segment]) / np.maximum(length, 1)
    moved = paced[segment] + np.round(share * target_ns[segment]).astype(np.int64)
    moved = np.where(np.arange(len(own_ns)) >= anchors[-1], paced[-1] + progress - bounds[-1], moved)
    return np.asarray(np.diff(moved, prepend=0), dtype=np.int64)
