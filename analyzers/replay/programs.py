"""From compared ranks to programs that play what was recorded.

Own time is what ``progress`` says it is; the rest follows from order: what blocked a rank, which collective ran before
which on a stream, and when each could begin. Played unchanged, the programs give the recorded times back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.intervals import Intervals
from perfscope.analyzers.rank import RankPartial
from perfscope.analyzers.replay.engine import Op, Played, Programs
from perfscope.analyzers.replay.loader import deliveries, deliveries_under_work
from perfscope.analyzers.replay.participations import Matches, Participations
from perfscope.trace import NONE, Bool, Int64


@dataclass(frozen=True, eq=False)
class Recorded:
    """Programs of all ranks and what their marks mean.

    ``begin`` and ``end`` hold the mark at which each rank (line) begins and ends each recorded step (column);
    ``steps`` are the steps' numbers, ``used`` tells which of them the analysis uses. ``row`` is each participation's
    row in its rank's ``Collectives``; ``begin_ns`` [rank, step] when each rank began each step, aligned; ``lead_ns``
    and ``late`` are each rank's ``Progress.lead_ns`` and ``Progress.late`` of the first step.
    """

    programs: Programs
    begin: Int64
    end: Int64
    steps: Int64
    used: Bool
    row: Int64
    begin_ns: Int64
    lead_ns: Int64
    late: Bool

    def windows_ns(self, played: Played) -> Int64:
        """Length of each rank's (lines) window in each used step (columns)."""
        return (played.mark_ns[self.end] - played.mark_ns[self.begin])[:, self.used]

    def slowest_ns(self, played: Played) -> Int64:
        """The used windows of the rank whose mean window is longest; their mean is the job's step time."""
        windows = self.windows_ns(played)
        return np.asarray(windows[int(windows.sum(axis=1).argmax())])


def record(result: Comparison) -> Recorded:
    """The programs of all ranks over all recorded steps that they share."""
    steps = np.unique(np.concatenate((result.matched_before.instances.step, result.steps)))
    for partial in result.partials.values():
        steps = steps[np.isin(steps, partial.steps.number)]
    ranks = tuple(sorted(result.partials))
    begin = np.arange(len(ranks) * len(steps), dtype=np.int64).reshape(len(ranks), len(steps))
    end = begin + begin.size
    builder = _Builder(result, steps)
    for index, rank in enumerate(ranks):
        builder.add(rank, begin[index], end[index])
    firsts = [(own.progress, int(own.steps.indices_of(steps[:1])[0])) for _, own in sorted(result.partials.items())]
    return Recorded(
        programs=builder.programs(ranks, marks=2 * begin.size),
        begin=begin,
        end=end,
        steps=steps,
        used=np.isin(steps, result.steps),
        row=builder.rows(),
        begin_ns=builder.begin_ns(),
        lead_ns=np.array([progress.lead_ns[index] for progress, index in firsts], dtype=np.int64),
        late=np.array([progress.late[index] for progress, index in firsts], dtype=np.bool_),
    )


@dataclass(frozen=True, eq=False)
class _Instructions:
    """Instructions of one rank with the time of each, own clock."""

    time_ns: Int64
    op: Int64
    operand: Int64
    lag_ns: Int64

    @classmethod
    def of(cls, op: Op, time_ns: Int64, operand: Int64, lag_ns: Int64 | None = None) -> _Instructions:
        """Instructions that all do the same."""
        lag = np.zeros(len(time_ns), dtype=np.int64) if lag_ns is None else lag_ns
        return cls(time_ns, np.full(len(time_ns), op, dtype=np.int64), operand.astype(np.int64), lag)

    @classmethod
    def in_order(cls, *parts: _Instructions) -> _Instructions:
        """All of them by time; at one moment first what ends a wait or a stall, then marks, then what is issued."""
        time, op, operand, lag = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("time_ns", "op", "operand", "lag_ns")
        )
        order = np.lexsort((_AT_ONE_MOMENT[op], time))
        return cls(time[order], op[order], operand[order], lag[order])

    def own_and_lag(self, first_ns: int, blocked: Intervals) -> tuple[Int64, Int64]:
        """Own time before each instruction, counted from ``first_ns``, and its lag.

        What falls into a blocked stretch happens that much after the rank came to it, and what was handed over before
        ``first_ns`` that much before.
        """
        begin = np.array([first_ns], dtype=np.int64)
        own = self.time_ns - first_ns - (blocked.before(self.time_ns) - blocked.before(begin))
        lag = self.lag_ns.copy()
        inside = np.flatnonzero(blocked.covers(self.time_ns) & np.isin(self.op, (Op.ISSUE, Op.MARK)))
        holding = np.searchsorted(blocked.start_ns, self.time_ns[inside], side="right") - 1
        lag[inside] = self.time_ns[inside] - np.maximum(blocked.start_ns[holding], first_ns)
        early = self.time_ns < first_ns
        lag[early], own[early] = self.time_ns[early] - first_ns, 0
        return np.diff(own, prepend=0), lag


_AT_ONE_MOMENT: Final = np.array([{Op.BLOCK: 0, Op.HOLD: 1, Op.MARK: 2, Op.ISSUE: 3}[op] for op in Op])


class _Builder:
    """Collects the ranks' programs."""

    def __init__(self, result: Comparison, steps: Int64) -> None:
        self._result = result
        self._steps = steps
        self._matches = Matches(result.matched_before)
        self._holds: list[int] = []
        self._starts: list[int] = []
        self._begins: list[Int64] = []
        self._first = [0]
        self._columns: list[tuple[Int64, ...]] = []
        self._participations: list[Participations] = []

    def add(self, rank: int, begin: Int64, end: Int64) -> None:
        """Write one rank's program; ``begin`` and ``end`` are its marks."""
        partial = self._result.partials[rank]
        clocks = self._result.clocks
        chosen = partial.steps.indices_of(self._steps)
        opens, closes = partial.steps.start_ns[chosen], partial.steps.end_ns[chosen]
        first, last = int(opens[0]), int(closes[-1])
        mine = self._matches.of(rank, partial, first, last)
        held = deliveries(partial)
        begun, launched = deliveries_under_work(partial)
        program = _Instructions.in_order(
            _Instructions.of(Op.ISSUE, mine.ready_ns, mine.number),
            _blocks(partial, mine, first, last),
            _Instructions.of(Op.MARK, opens, begin),
            _Instructions.of(Op.MARK, closes, end),
            _Instructions.of(
                Op.HOLD, held.end_ns, len(self._holds) + np.arange(len(held)), held.start_ns - held.end_ns
            ),
            _Instructions.of(Op.HOLD, begun, len(self._holds) + len(held) + np.arange(len(begun))),
        )
        own, lag = program.own_and_lag(first, partial.progress.blocked)
        self._columns.append((program.op, program.operand, own, lag))
        self._participations.append(mine)
        self._begins.append(clocks.to_common(rank, opens))
        self._holds += clocks.to_common(rank, np.concatenate((held.end_ns, launched))).tolist()
        self._starts.append(clocks.to_common(rank, first))
        self._first.append(self._first[-1] + len(own))

    def programs(self, ranks: tuple[int, ...], marks: int) -> Programs:
        """All of them together."""
        op, operand, own, lag = (np.concatenate(column) for column in zip(*self._columns, strict=True))
        parts = self._participations
        return Programs(
            ranks=ranks,
            start_ns=np.array(self._starts, dtype=np.int64),
            first=np.array(self._first, dtype=np.int64),
            op=op,
            operand=operand,
            own_ns=own,
            lag_ns=lag,
            instance=np.concatenate([part.instance for part in parts]),
            previous=np.concatenate([part.previous for part in parts]),
            gap_ns=np.concatenate([part.gap_ns for part in parts]),
            transfer_ns=np.concatenate([part.transfer_ns for part in parts]),
            floor_ns=self._matches.floor_ns(),
            hold_ns=np.array(self._holds, dtype=np.int64),
            marks=marks,
            after=np.concatenate([part.after for part in parts]),
            after_gap_ns=np.concatenate([part.after_gap_ns for part in parts]),
        )

    def begin_ns(self) -> Int64:
        """When each rank (line) began each step (column), aligned."""
        return np.stack(self._begins)

    def rows(self) -> Int64:
        """Row of each participation in its rank's ``Collectives``."""
        return np.concatenate([part.row for part in self._participations])


def _blocks(partial: RankPartial, mine: Participations, first_ns: int, last_ns: int) -> _Instructions:
    """One rank's waits for collectives of its program."""
    stretches, blocker = partial.progress.blocked, partial.progress.blocker
    number = np.full(len(partial.collectives), NONE, dtype=np.int64)
    number[mine.row] = mine.number
    kept = (stretches.end_ns > first_ns) & (stretches.end_ns <= last_ns) & (number[blocker] != NONE)
    until, blocker = stretches.end_ns[kept], blocker[kept]
    return _Instructions.of(Op.BLOCK, until, number[blocker], until - partial.collectives.end_ns[blocker])
