"""A recorded pipeline taken apart: what each stage did between its messages, and what it sent to whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import numpy as np

from perfscope.analyzers.pipelines.messages import PipelineMessages, pipeline_messages
from perfscope.analyzers.pipelines.schedule import find_schedule
from perfscope.analyzers.pipelines.stages import place
from perfscope.analyzers.replay.engine import Op
from perfscope.analyzers.replay.pace import POINT_TO_POINT
from perfscope.analyzers.timeline import Row
from perfscope.analyzers.whatif.change import CannotReplay, Context
from perfscope.analyzers.whatif.schedules import CONSTRUCTED, Work, turns
from perfscope.analyzers.whatif.script import Line, Meeting, Part, Script
from perfscope.trace import NONE, Float64

_APART: Final = 0.05
"""Own time between two messages, as a share of the mean pass, from which it is a pass."""

_BESIDE: Final = [Row.COPY, Row.DATALOADER]


@dataclass(frozen=True)
class Layout:
    """Who does what in the recorded pipeline. ``peers``: rank -> neighbouring stage -> the rank there that it exchanges
    messages with; ``groups`` carry those.
    """

    schedule: str
    stages: int
    microbatches: int
    stage_of: Mapping[int, int]
    peers: Mapping[int, Mapping[int, int]]
    groups: frozenset[int]
    at_once: bool
    """Several messages travel in one kernel, both ways at once."""

    def is_message(self, line: Line) -> bool:
        """Does the line hand a message over, or wait for one?"""
        return (
            line.part is not None
            and line.part.meeting.kind in POINT_TO_POINT
            and line.part.meeting.group in self.groups
        )


@dataclass(frozen=True, eq=False)
class Piece:
    """What a rank did between two exchanges: lines that are no messages, then ``tail_ns`` (by row) of its own."""

    lines: list[Line]
    tail_ns: Float64

    @property
    def own_ns(self) -> float:
        """All of its own time."""
        return float(sum(line.own_ns.sum() for line in self.lines) + self.tail_ns.sum())

    @property
    def work_ns(self) -> float:
        """The same without copies and loading, which are no part of a pass."""
        return self.own_ns - float(sum(line.own_ns[_BESIDE].sum() for line in self.lines) + self.tail_ns[_BESIDE].sum())


@dataclass(frozen=True)
class StageStep:
    """One step of one rank: its pieces by what they are (``F``, ``B``, ``FB``), in order, and the rank's own time in an
    exchange, by row: in each of them, and what comes on top in the first (the copy of the batch).
    """

    number: int
    pieces: dict[str, list[Piece]]
    overhead_ns: Float64
    once_ns: Float64


@dataclass(frozen=True)
class StageProgram:
    """One rank's program in parts: ``between[0]``, ``steps[0]``, ``between[1]`` … ``messages`` are models of those that
    it exchanges with each neighbouring stage, ``lanes`` the stream for each of these and each way; ``groups`` are those
    whose collectives belong to every pass.
    """

    rank: int
    steps: list[StageStep]
    between: list[Piece]
    messages: dict[int, Part]
    lanes: dict[tuple[int, bool], int]
    groups: frozenset[int]


def layout_of(context: Context, script: Script, name: str) -> Layout:
    """The recorded pipeline. Raises CannotReplay where there is none, or its schedule cannot be written down anew."""
    result = context.result
    messages = pipeline_messages(result)
    placement = place(result, messages)
    if not placement.stage_of or placement.degree is None:
        raise CannotReplay(f"{name}: the recording holds no pipeline whose stages are known")
    schedule = find_schedule(result, messages, placement, context.runs)
    if schedule.microbatches is None or schedule.chunks != 1 or schedule.name not in CONSTRUCTED:
        raise CannotReplay(
            f"{name}: the order in which this pipeline works ({schedule.name}, {schedule.chunks or 'unknown'} chunks a "
            f"stage) cannot be written down for another number; {' and '.join(CONSTRUCTED)} with one chunk can"
        )
    missing = set(placement.stage_of) - set(script.lines)
    if missing or len(set(placement.stage_of.values())) != placement.degree:
        raise CannotReplay(f"{name}: ranks of the pipeline are missing from the recording; record all of them")
    return Layout(
        schedule=schedule.name,
        stages=placement.degree,
        microbatches=schedule.microbatches,
        stage_of=placement.stage_of,
        peers=_peers(messages, placement.stage_of, name),
        groups=frozenset(np.unique(result.matched.instances.group[result.matched.instance[messages.line]]).tolist()),
        at_once=len(np.unique(messages.line)) < len(messages),
    )


def _peers(messages: PipelineMessages, stage_of: Mapping[int, int], name: str) -> dict[int, dict[int, int]]:
    found: dict[int, dict[int, int]] = {}
    for rank, peer in sorted(set(zip(messages.rank.tolist(), messages.peer.tolist(), strict=True))):
        if peer == NONE or peer not in stage_of:
            raise CannotReplay(f"{name}: the recording does not tell whom rank {rank} exchanges messages with")
        if found.setdefault(rank, {}).setdefault(stage_of[peer], peer) != peer:
            raise CannotReplay(f"{name}: rank {rank} exchanges messages with several ranks of one stage")
    return found


def taken_apart(script: Script, layout: Layout, rank: int, name: str, ends: Mapping[Meeting, set[int]]) -> StageProgram:
    """One rank's program in parts; ``ends`` are the ranks of each meeting. Raises CannotReplay where its passes do not
    fit the schedule.
    """
    lines = _collectives_first(script.lines[rank], layout)
    sections: dict[int, tuple[int, int]] = {}
    for at, line in enumerate(lines):
        if line.op is Op.ISSUE and line.step is not None and layout.is_message(line):
            sections[line.step] = sections.get(line.step, (at, at))[0], at
    listed = turns(layout.schedule, layout.stages, layout.stage_of[rank], layout.microbatches)
    works = [turn.passes for turn in listed if isinstance(turn, Work)]
    opens, closes = isinstance(listed[0], Work), isinstance(listed[-1], Work)
    inner = works[opens : len(works) - closes]
    steps: list[StageStep] = []
    between: list[Piece] = []
    begun = 0
    for step, (first, last) in sorted(sections.items()):
        between.append(Piece(lines[begun:first], lines[first].own_ns))
        steps.append(_step(layout, lines[first : last + 1], step, inner, f"{name}: step {step} of rank {rank}"))
        begun = last + 1
    between.append(Piece(lines[begun:], np.zeros(len(Row))))
    groups = _of_every_pass(steps)
    for number, step_ in enumerate(steps):
        if opens:
            _cut(between[number], _like(step_, works[0], name), groups, at_end=True)
        if closes:
            _cut(between[number + 1], _like(step_, works[-1], name), groups, at_end=False)
    messages = {stage: _typical_message(lines, layout, peer, ends) for stage, peer in layout.peers[rank].items()}
    return StageProgram(rank, steps, between, messages, _lanes(script, layout, rank), groups)


def _collectives_first(lines: list[Line], layout: Layout) -> list[Line]:
    """What was handed over at one moment, a pass's last collective before the messages that follow that pass.

    Both could begin once the last kernel of the pass had ended; which comes first in a recording is chance.
    """
    found: list[Line] = []
    first: int | None = None
    for line in lines:
        part = line.part
        if layout.is_message(line):
            first = None if line.op is not Op.ISSUE else len(found) if first is None or line.own_ns.any() else first
        elif line.op is not Op.ISSUE or part is None or line.own_ns.any():
            first = None
        elif first is not None and all(other.part is None or other.part.lane != part.lane for other in found[first:]):
            after = found[first]
            found[first] = replace(after, own_ns=line.own_ns)
            found.insert(first, replace(line, own_ns=after.own_ns))
            first += 1
            continue
        found.append(line)
    return found


def _step(layout: Layout, lines: list[Line], number: int, works: list[str], what: str) -> StageStep:
    """Sort what lies between the messages of one step into passes and the exchanges' own time."""
    pieces: list[Piece] = []
    held: list[Line] = []
    for line in lines[1:]:
        if layout.is_message(line):
            pieces.append(Piece(held, line.own_ns))
            held = []
        else:
            held.append(line)
    least = _APART * sum(piece.work_ns for piece in pieces) / max(len(works), 1)
    passes = [piece for piece in pieces if piece.lines or piece.work_ns > least]
    if len(passes) != len(works):
        raise CannotReplay(f"{what} shows {len(passes)} stretches of work between messages, its schedule {len(works)}")
    by_kind: dict[str, list[Piece]] = {}
    for kind, piece in zip(works, passes, strict=True):
        by_kind.setdefault(kind, []).append(piece)
    exchanges = [np.zeros(len(Row))]
    for piece in pieces:
        if piece in passes:
            exchanges.append(np.zeros(len(Row)))
        else:
            exchanges[-1] = exchanges[-1] + piece.tail_ns
    each = np.median(exchanges, axis=0)
    once = np.maximum(np.sum(exchanges, axis=0) - len(exchanges) * each, 0.0)
    return StageStep(number, by_kind, each, once)


def _of_every_pass(steps: list[StageStep]) -> frozenset[int]:
    """Groups with a collective in at least half of the passes: tensor parallel ones, none that reduce gradients."""
    every = [piece for step in steps for pieces in step.pieces.values() for piece in pieces]
    used = Counter(
        group
        for piece in every
        for group in {line.part.meeting.group for line in piece.lines if line.part is not None and line.op is Op.ISSUE}
    )
    return frozenset(group for group, count in used.items() if 2 * count >= len(every))


def _like(step: StageStep, kind: str, name: str) -> float:
    """Own time of a pass of that kind, ns."""
    if not step.pieces.get(kind):
        raise CannotReplay(f"{name}: no pass between two messages shows how long one takes; record more micro-batches")
    return median(piece.own_ns for piece in step.pieces[kind])


def _cut(piece: Piece, own_ns: float, groups: frozenset[int], *, at_end: bool) -> None:
    """Take a pass out of what lies between two steps: so much own time, and its collectives. Steps' marks stay put."""
    left = _take(piece.tail_ns, own_ns) if at_end else own_ns
    gone: set[Part] = set()
    for line in reversed(piece.lines) if at_end else piece.lines:
        if left <= 0 or (at_end and line.op is Op.MARK):
            break
        left = _take(line.own_ns, left)
        part = line.part
        if part is not None and line.op is Op.ISSUE and part.meeting.group in groups and (at_end or left > 0):
            gone.add(part)
        if line.op is Op.MARK:
            break
    if gone:
        kept: list[Line] = []
        carried = np.zeros(len(Row))
        for line in piece.lines:
            line.own_ns = line.own_ns + carried
            if line.part in gone:
                carried = line.own_ns
            else:
                kept.append(line)
                carried = np.zeros(len(Row))
        piece.lines[:] = kept
        piece.tail_ns[:] = piece.tail_ns + carried


def _take(rows: Float64, wanted: float) -> float:
    """Shorten ``rows`` by ``wanted`` ns, in proportion; returns what they do not hold."""
    held = float(rows.sum())
    taken = min(held, wanted)
    if held > 0:
        rows *= 1 - taken / held
    return wanted - taken


def _typical_message(lines: list[Line], layout: Layout, peer: int, ends: Mapping[Meeting, set[int]]) -> Part:
    """A message such as those with ``peer``; such as all where kernels carry several at once."""
    every = [line.part for line in lines if line.part is not None and line.op is Op.ISSUE and layout.is_message(line)]
    parts = [part for part in every if ends[part.meeting] == {part.rank, peer}] or every
    typical = sorted(parts, key=lambda part: part.transfer_ns)[len(parts) // 2]
    return replace(typical, gap_ns=median(part.gap_ns for part in parts))


def _lanes(script: Script, layout: Layout, rank: int) -> dict[tuple[int, bool], int]:
    """The stream for messages of each neighbouring stage and way: one a neighbour, but one a way as well where both
    ways share a kernel.
    """
    found: dict[tuple[int, bool], int] = {}
    for stage in layout.peers[rank]:
        for sends in (True, False):
            shared = not layout.at_once and (stage, not sends) in found
            found[stage, sends] = found[stage, not sends] if shared else script.lanes
            script.lanes += not shared
    return found
