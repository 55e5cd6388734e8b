"""The recorded steps as a script that can be edited: lines can be stretched, taken out and put in.

``Programs`` are arrays that play fast; a ``Script`` is the same as objects. A change takes a script apart, and
``Script.programs`` puts together what is to be played.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from perfscope.analyzers.comparison import Comparison
from perfscope.analyzers.replay.engine import Op, Played, Programs
from perfscope.analyzers.replay.pace import rows_between
from perfscope.analyzers.replay.programs import Recorded
from perfscope.trace import NONE, Float64, Int64

NEVER = np.iinfo(np.int64).min


@dataclass(eq=False)
class Meeting:
    """A collective or message. ``bytes`` as in ``Collectives`` (None: not known), ``size`` ranks take part;
    ``floor_ns`` is the last arrival of somebody who is not in the recording.
    """

    kind: str
    group: int
    bytes: int | None
    size: int
    step: int | None
    dtype: str | None = None
    floor_ns: int = NEVER


@dataclass(eq=False)
class Part:
    """One rank's part in a meeting: on which ``lane`` (stream) of the rank, how long after it could begin it did
    (``gap_ns``), and how long it took from the last arrival (``transfer_ns``).
    """

    rank: int
    meeting: Meeting
    lane: int
    gap_ns: float = 0.0
    transfer_ns: float = 0.0


@dataclass(eq=False)
class Line:
    """One instruction: the rank's own time before it by row of the account (ns), and what it then does.

    ``part`` is set where ``op`` is ISSUE or BLOCK, ``mark`` where MARK, ``hold_ns`` where HOLD.
    """

    op: Op
    own_ns: Float64
    lag_ns: float = 0.0
    part: Part | None = None
    mark: int = NONE
    hold_ns: int = NEVER
    step: int | None = None
    """The job's step number in which this happens; None before the first."""


@dataclass(eq=False)
class Script:
    """All ranks' lines, in order. ``start_ns`` is when each rank begins."""

    recorded: Recorded
    lines: dict[int, list[Line]]
    start_ns: dict[int, int]
    marks: int
    lanes: int
    """Lanes in use: a new one takes this number."""
    floor_step_ns: dict[int, float] = field(default_factory=dict)
    """Rank -> host time that a step takes even when nothing else does; the step cannot be shorter."""
    settling: int = 0
    """Steps until ranks have fallen into a new rhythm: they begin the first one as far apart as they were recorded."""

    def of_kind(self, *kinds: str) -> Iterator[tuple[int, int, Line]]:
        """(rank, place, line) of every hand-over of a collective of these kinds."""
        for rank, lines in self.lines.items():
            for place, line in enumerate(lines):
                if line.op is Op.ISSUE and line.part is not None and line.part.meeting.kind in kinds:
                    yield rank, place, line

    def meetings(self) -> dict[Meeting, list[Part]]:
        """Every meeting with its parts, in the order of the first hand-over."""
        found: dict[Meeting, list[Part]] = {}
        for lines in self.lines.values():
            for line in lines:
                if line.op is Op.ISSUE and line.part is not None:
                    found.setdefault(line.part.meeting, []).append(line.part)
        return found

    def without(self, parts: set[Part]) -> None:
        """Take these parts out, with all waits for them. Own time around them stays."""
        for rank, lines in self.lines.items():
            if not any(line.part in parts for line in lines):
                continue
            kept: list[Line] = []
            carried: Float64 | None = None
            for line in lines:
                if line.part in parts:
                    carried = line.own_ns if carried is None else carried + line.own_ns
                else:
                    kept.append(line if carried is None else dataclasses.replace(line, own_ns=line.own_ns + carried))
                    carried = None
            self.lines[rank] = kept

    def programs(self) -> Programs:
        """What is to be played."""
        ranks = tuple(sorted(self.lines))
        numbers: dict[Part, int] = {}
        instances: dict[Meeting, int] = {}
        instance: list[int] = []
        previous: list[int] = []
        gap: list[int] = []
        transfer: list[int] = []
        for rank in ranks:
            last: dict[int, int] = {}
            for line in self.lines[rank]:
                part = line.part
                if line.op is Op.ISSUE and part is not None:
                    numbers[part] = len(numbers)
                    instance.append(instances.setdefault(part.meeting, len(instances)))
                    previous.append(last.get(part.lane, NONE))
                    last[part.lane] = numbers[part]
                    gap.append(round(part.gap_ns))
                    transfer.append(round(part.transfer_ns))
        every = [line for rank in ranks for line in self.lines[rank]]
        holds = [line.hold_ns for line in every if line.op is Op.HOLD]
        number_of_hold = iter(range(len(holds)))
        operand = [
            numbers[line.part] if line.part is not None else next(number_of_hold) if line.op is Op.HOLD else line.mark
            for line in every
        ]
        return Programs(
            ranks=ranks,
            start_ns=np.array([self.start_ns[rank] for rank in ranks], dtype=np.int64),
            first=np.cumsum([0, *(len(self.lines[rank]) for rank in ranks)]),
            op=np.array([line.op for line in every], dtype=np.int64),
            operand=np.array(operand, dtype=np.int64),
            own_ns=np.concatenate([_whole(self.lines[rank]) for rank in ranks]),
            lag_ns=np.array([round(line.lag_ns) for line in every], dtype=np.int64),
            instance=np.array(instance, dtype=np.int64),
            previous=np.array(previous, dtype=np.int64),
            gap_ns=np.array(gap, dtype=np.int64),
            transfer_ns=np.array(transfer, dtype=np.int64),
            floor_ns=np.array([meeting.floor_ns for meeting in instances], dtype=np.int64),
            hold_ns=np.array(holds, dtype=np.int64),
            marks=self.marks,
        )

    def step_ns(self, played: Played, unchanged: Played) -> float:
        """The job's step time once the script was played. What the replay of the ``unchanged`` steps misses of the
        measured ones, it misses too: that is taken out.
        """
        measured = float(self.recorded.slowest_ns(unchanged).mean())
        found = self._settled_ns(played) * (measured / self._settled_ns(unchanged))
        return max([found, *self.floor_step_ns.values()])

    def _settled_ns(self, played: Played) -> float:
        """Mean step of the slowest rank, without those in which ranks still fall into step."""
        windows = self.recorded.windows_ns(played)
        windows = windows[:, min(self.settling, windows.shape[1] - 1) :]
        return float(windows.mean(axis=1).max())


def _whole(lines: list[Line]) -> Int64:
    """Own time before each line in whole ns; rounding does not add up."""
    progress = np.round(np.cumsum([float(line.own_ns.sum()) for line in lines]))
    return np.diff(progress, prepend=0).astype(np.int64)


def script_of(result: Comparison, recorded: Recorded) -> Script:
    """The recorded steps, ready to be edited."""
    programs = recorded.programs
    meetings = _meetings(result, programs)
    lanes = _lanes(programs)
    parts: dict[int, Part] = {}
    lines: dict[int, list[Line]] = {}
    for index, rank in enumerate(programs.ranks):
        own = _own_rows(result, recorded, rank)
        bounds = programs.slice_of(rank)
        mine: list[Line] = []
        begins = {int(mark): int(step) for mark, step in zip(recorded.begin[index], recorded.steps, strict=True)}
        step = None
        for place, at in enumerate(range(bounds.start, bounds.stop)):
            op, operand = Op(int(programs.op[at])), int(programs.operand[at])
            line = Line(op, own[place], lag_ns=int(programs.lag_ns[at]))
            if op in (Op.ISSUE, Op.BLOCK):
                if operand not in parts:
                    parts[operand] = Part(
                        rank, meetings[int(programs.instance[operand])], lanes[operand],
                        int(programs.gap_ns[operand]), int(programs.transfer_ns[operand]),
                    )  # fmt: skip
                line.part = parts[operand]
            elif op is Op.MARK:
                line.mark = operand
                step = begins.get(operand, step)
            else:
                line.hold_ns = int(programs.hold_ns[operand])
            line.step = step
            mine.append(line)
        lines[rank] = mine
    starts = dict(zip(programs.ranks, (int(start) for start in programs.start_ns), strict=True))
    return Script(recorded, lines, starts, programs.marks, max(lanes.values(), default=-1) + 1)


def _own_rows(result: Comparison, recorded: Recorded, rank: int) -> Float64:
    """Own time before each instruction of a rank (lines) by row of the account (columns), ns."""
    own = recorded.programs.own_ns[recorded.programs.slice_of(rank)]
    progress = np.concatenate(([0], np.cumsum(own)))
    return rows_between(result, recorded, rank, progress).astype(np.float64)


def _meetings(result: Comparison, programs: Programs) -> list[Meeting]:
    """One for each instance of the programs; those beyond the matched ones are a single rank's."""
    known = result.matched_before.instances
    found = []
    for number, floor in enumerate(programs.floor_ns.tolist()):
        if number < len(known):
            group = int(known.group[number])
            size = len(known.groups[group].ranks) or known.groups[group].size or int(known.participants[number])
            kind, dtype = known.kinds[int(known.kind[number])], int(known.dtype[number])
            count = int(known.bytes[number])
            found.append(
                Meeting(
                    kind=kind,
                    group=group,
                    bytes=count if count >= 0 else None,
                    size=size,
                    step=int(known.step[number]),
                    dtype=known.dtypes[dtype] if dtype != NONE else None,
                    floor_ns=int(floor),
                )
            )
        else:
            found.append(Meeting(kind="unmatched", group=NONE, bytes=None, size=1, step=None))
    return found


def _lanes(programs: Programs) -> dict[int, int]:
    """Participation -> the lane it runs on: that of the one it follows, else a new one."""
    lanes: dict[int, int] = {}
    for participation, previous in enumerate(programs.previous.tolist()):
        lanes[participation] = lanes[previous] if previous != NONE and previous in lanes else len(lanes)
    return lanes
