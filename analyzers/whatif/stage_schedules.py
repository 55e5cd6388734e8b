"""A recorded pipeline divided into pieces: what each stage did between its messages, and what it sent to which rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

import numpy as np

from perfscope.analyzers.job.pipelines.schedule import find_schedule
from perfscope.analyzers.job.pipelines.stages import PipelineMessages, pipeline_messages, place
from perfscope.analyzers.rank.collectives.collectives import POINT_TO_POINT
from perfscope.analyzers.replay.engine import OpKind
from perfscope.analyzers.whatif.change import CannotReplay, Context
from perfscope.analyzers.whatif.pipeline_turns import CONSTRUCTED, Work, turns
from perfscope.analyzers.whatif.schedules.editable import EditableSchedules
from perfscope.analyzers.whatif.schedules.ops import Collective, RankOp, ScheduleOp, without
from perfscope.grouping import grouped
from perfscope.results.categories import TimeCategory
from perfscope.trace.trace import NONE, Float64

_APART: Final = 0.05
"""Computation between two messages is a pass from this share of the mean pass on."""


@dataclass(frozen=True)
class Layout:
    """Which rank does what in the recorded pipeline. ``peers``: rank -> neighbouring stage -> the rank there that it
    exchanges messages with; ``groups`` are the process groups of those messages.
    """

    schedule: str
    stages: int
    microbatches: int
    stage_of: Mapping[int, int]
    peers: Mapping[int, Mapping[int, int]]
    groups: frozenset[int]
    at_once: bool
    """Several messages travel in one kernel, both ways at once."""

    def is_message(self, op: ScheduleOp) -> bool:
        """Does the op issue a message, or wait for one?"""
        collective = op.rank_op.collective if op.rank_op is not None else None
        return collective is not None and collective.kind in POINT_TO_POINT and collective.group in self.groups


@dataclass(frozen=True, eq=False)
class Piece:
    """What a rank did between two exchanges: ops that are no messages, then ``tail_ns`` (by category) of its own."""

    ops: list[ScheduleOp]
    tail_ns: Float64

    @property
    def rows_ns(self) -> Float64:
        """All of its own time, by category."""
        return np.asarray(np.sum([*(op.own_ns for op in self.ops), self.tail_ns], axis=0))

    @property
    def work_ns(self) -> float:
        """What of it is computation: copies and loading are no part of a pass, and idle time for the host is in
        exchanges, too.
        """
        return float(self.rows_ns[TimeCategory.COMPUTE])


@dataclass(frozen=True)
class StageStep:
    """One step of one rank: its pieces by passes (``F``, ``B``, ``FB``), in order, and the rank's own time in an
    exchange, by category: in each of them, and what the first takes in addition (the copy of the batch).
    """

    number: int
    pieces: dict[str, list[Piece]]
    overhead_ns: Float64
    once_ns: Float64


@dataclass(frozen=True)
class StageSchedule:
    """One rank's schedule in parts: ``between[0]``, ``steps[0]``, ``between[1]`` … ``messages`` are models of those
    that it exchanges with each neighbouring stage, ``lanes`` the stream for each of these and each way; ``groups`` are
    the process groups whose collectives belong to every pass.
    """

    rank: int
    steps: list[StageStep]
    between: list[Piece]
    messages: dict[int, RankOp]
    lanes: dict[tuple[int, bool], int]
    groups: frozenset[int]


def layout_of(context: Context, schedules: EditableSchedules, name: str) -> Layout:
    """The recorded pipeline. Raises CannotReplay where there is none, or its schedule cannot be constructed."""
    result = context.result
    messages = pipeline_messages(result)
    placement = place(result, messages)
    if not placement.stage_of or placement.degree is None:
        raise CannotReplay(f"{name}: the recording holds no pipeline whose stages are known")
    schedule = find_schedule(result, messages, placement, context.runs)
    if schedule.microbatches is None or schedule.chunks != 1 or schedule.name not in CONSTRUCTED:
        raise CannotReplay(
            f"{name}: the schedule of this pipeline ({schedule.name}, {schedule.chunks or 'unknown'} chunks per stage) "
            f"cannot be constructed for another number; {' and '.join(CONSTRUCTED)} with one chunk can"
        )
    missing = set(placement.stage_of) - set(schedules.ops)
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
    peers: dict[int, dict[int, int]] = {}
    for rank, peer in sorted(set(zip(messages.rank.tolist(), messages.peer.tolist(), strict=True))):
        if peer == NONE or peer not in stage_of:
            raise CannotReplay(f"{name}: it is not recorded which rank exchanges messages with rank {rank}")
        if peers.setdefault(rank, {}).setdefault(stage_of[peer], peer) != peer:
            raise CannotReplay(f"{name}: rank {rank} exchanges messages with several ranks of one stage")
    return peers


def taken_apart(
    schedules: EditableSchedules, layout: Layout, rank: int, name: str, ends: Mapping[Collective, set[int]]
) -> StageSchedule:
    """One rank's schedule in parts; ``ends`` are the ranks of each collective. Raises CannotReplay where its passes do
    not fit the pipeline's schedule.
    """
    listed = turns(layout.schedule, layout.stages, layout.stage_of[rank], layout.microbatches)
    ops = _collectives_first(schedules.ops[rank], layout)
    if not isinstance(listed[0], Work):
        ops = _issued_when_waited_for(ops, layout, schedules.steps)
    sections: dict[int, tuple[int, int]] = {}
    for at, op in enumerate(ops):
        if (rank_op := op.issued) is not None and layout.is_message(op) and rank_op.collective.step in schedules.steps:
            step = rank_op.collective.step
            sections[step] = sections.get(step, (at, at))[0], at
    works = [turn.passes for turn in listed if isinstance(turn, Work)]
    opens, closes = isinstance(listed[0], Work), isinstance(listed[-1], Work)
    inner = works[opens : len(works) - closes]
    steps: list[StageStep] = []
    between: list[Piece] = []
    begun = 0
    for step, (first, last) in sorted(sections.items()):
        between.append(Piece(ops[begun:first], ops[first].own_ns))
        steps.append(_step(layout, ops[first : last + 1], step, inner, f"{name}: step {step} of rank {rank}"))
        begun = last + 1
    between.append(Piece(ops[begun:], np.zeros(len(TimeCategory))))
    groups = _of_every_pass(steps)
    for number, step_ in enumerate(steps):
        if opens:
            _cut(between[number], _like(step_, works[0], name), groups, at_end=True)
        if closes:
            _cut(between[number + 1], _like(step_, works[-1], name), groups, at_end=False)
    messages = {stage: _typical_message(ops, layout, peer, ends) for stage, peer in layout.peers[rank].items()}
    return StageSchedule(rank, steps, between, messages, _lanes(schedules, layout, rank), groups)


def _collectives_first(ops: list[ScheduleOp], layout: Layout) -> list[ScheduleOp]:
    """The same ops; of those issued at one moment, a pass's last collective comes before the messages that follow it.

    Both could start once the last kernel of the pass had ended; which comes first in a recording is chance.
    """
    ordered: list[ScheduleOp] = []
    first: int | None = None
    for op in ops:
        rank_op = op.rank_op
        if layout.is_message(op):
            first = None if op.kind is not OpKind.ISSUE else len(ordered) if first is None or op.own_ns.any() else first
        elif op.kind is not OpKind.ISSUE or rank_op is None or op.own_ns.any():
            first = None
        elif first is not None and all(
            other.rank_op is None or other.rank_op.lane != rank_op.lane for other in ordered[first:]
        ):
            after = ordered[first]
            ordered[first] = replace(after, own_ns=op.own_ns)
            ordered.insert(first, replace(op, own_ns=after.own_ns))
            first += 1
            continue
        ordered.append(op)
    return ordered


def _issued_when_waited_for(ops: list[ScheduleOp], layout: Layout, steps: Set[int]) -> list[ScheduleOp]:
    """The same ops; the recv that opens a step is issued where the stage waits for it. A host that runs ahead issues
    it before its device begins the step: what the device does until the wait is no pass.
    """
    opening: dict[int | None, RankOp] = {}
    for op in ops:
        rank_op = op.issued
        if rank_op is not None and layout.is_message(op) and (step := rank_op.collective.step) in steps:
            opening.setdefault(step, rank_op)
    awaited = {op.rank_op for op in ops if op.kind is OpKind.WAIT}
    moved = {rank_op for rank_op in opening.values() if rank_op in awaited}
    left, _ = without(ops, moved, OpKind.ISSUE)
    ordered: list[ScheduleOp] = []
    for op in left:
        if op.kind is OpKind.WAIT and op.rank_op in moved:
            moved.remove(op.rank_op)
            ordered.append(replace(op, kind=OpKind.ISSUE, lag_ns=0.0))
            ordered.append(replace(op, own_ns=np.zeros(len(TimeCategory))))
        else:
            ordered.append(op)
    return ordered


def _step(layout: Layout, ops: list[ScheduleOp], number: int, works: list[str], what: str) -> StageStep:
    """Divide what is between the messages of one step into passes and the exchanges' own time."""
    pieces: list[Piece] = []
    held: list[ScheduleOp] = []
    for op in ops[1:]:
        if layout.is_message(op):
            pieces.append(Piece(held, op.own_ns))
            held = []
        else:
            held.append(op)
    least = _APART * sum(piece.work_ns for piece in pieces) / max(len(works), 1)
    passes = [piece for piece in pieces if piece.ops or piece.work_ns > least]
    if len(passes) != len(works):
        raise CannotReplay(f"{what} has {len(passes)} passes between messages, but its schedule needs {len(works)}")
    by_kind = grouped(zip(works, passes, strict=True))
    exchanges = [np.zeros(len(TimeCategory))]
    for piece in pieces:
        if piece in passes:
            exchanges.append(np.zeros(len(TimeCategory)))
        else:
            exchanges[-1] = exchanges[-1] + piece.tail_ns
    each = np.median(exchanges, axis=0)
    once = np.maximum(np.sum(exchanges, axis=0) - len(exchanges) * each, 0.0)
    return StageStep(number, by_kind, each, once)


def _of_every_pass(steps: list[StageStep]) -> frozenset[int]:
    """Process groups with a collective in at least half of the passes: tensor parallel ones, none for gradients."""
    every = [piece for step in steps for pieces in step.pieces.values() for piece in pieces]
    used: Counter[int] = Counter()
    for piece in every:
        used.update({own.collective.group for op in piece.ops if (own := op.issued) is not None})
    return frozenset(group for group, count in used.items() if 2 * count >= len(every))


def _like(step: StageStep, kind: str, name: str) -> float:
    """Own time of a pass of that kind, ns."""
    if not step.pieces.get(kind):
        raise CannotReplay(f"{name}: no pass between two messages shows how long one takes; record more micro-batches")
    return median(float(piece.rows_ns.sum()) for piece in step.pieces[kind])


def _cut(piece: Piece, own_ns: float, groups: frozenset[int], *, at_end: bool) -> None:
    """Take a pass out of what is between two steps: ``own_ns`` of own time, and its collectives. Steps' marks stay."""
    left = _take(piece.tail_ns, own_ns) if at_end else own_ns
    gone: set[RankOp] = set()
    for op in reversed(piece.ops) if at_end else piece.ops:
        if left <= 0 or (at_end and op.kind is OpKind.MARK):
            break
        left = _take(op.own_ns, left)
        rank_op = op.issued
        if rank_op is not None and rank_op.collective.group in groups and (at_end or left > 0):
            gone.add(rank_op)
        if op.kind is OpKind.MARK:
            break
    piece.ops[:], carried = without(piece.ops, gone)
    piece.tail_ns[:] += carried


def _take(rows: Float64, wanted: float) -> float:
    """Shorten ``rows`` by ``wanted`` ns, in proportion; returns by how much that was too much."""
    held = float(rows.sum())
    taken = min(held, wanted)
    if held > 0:
        rows *= 1 - taken / held
    return wanted - taken


def _typical_message(ops: list[ScheduleOp], layout: Layout, peer: int, ends: Mapping[Collective, set[int]]) -> RankOp:
    """A message such as those with ``peer``; such as all where kernels carry several at once."""
    every = [own for op in ops if (own := op.issued) is not None and layout.is_message(op)]
    rank_ops = [rank_op for rank_op in every if ends[rank_op.collective] == {rank_op.rank, peer}] or every
    typical = sorted(rank_ops, key=lambda rank_op: rank_op.transfer_ns)[len(rank_ops) // 2]
    return replace(typical, gap_ns=median(rank_op.gap_ns for rank_op in rank_ops))


def _lanes(schedules: EditableSchedules, layout: Layout, rank: int) -> dict[tuple[int, bool], int]:
    """The stream for messages of each neighbouring stage and way: one per neighbour, or one per way too where both ways
    share a kernel.
    """
    lanes: dict[tuple[int, bool], int] = {}
    for stage in layout.peers[rank]:
        for sends in (True, False):
            shared = not layout.at_once and (stage, not sends) in lanes
            lanes[stage, sends] = lanes[stage, not sends] if shared else schedules.lanes
            schedules.lanes += not shared
    return lanes
